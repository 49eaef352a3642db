"""Load image-text pairs and labelled images as batches.

sources.py opens datasets, order.py computes the order of the samples, and loader.py yields this rank's batches.
"""

from megaclip.data.batch import PADDING_ID, Batch, EvaluationBatch, LabelledBatch, TrainBatch
from megaclip.data.gpu_decoder import GpuDecoder, open_gpu_decoder
from megaclip.data.images import CPU_DECODER, GPU_DECODER, OPENAI_MEAN, OPENAI_STD, ImageTransform, normalised_pixels
from megaclip.data.labelled import LabelledDataset, open_labelled
from megaclip.data.loader import EvaluationLoader, TrainLoader, check_batch, slots_ahead
from megaclip.data.shard_cache import bytes_to_come
from megaclip.data.sources import DATASET_TYPES, PairDataset, check_image_root, check_manifest, open_pairs
from megaclip.data.tokenizers import Tokenizer, load_tokenizer
