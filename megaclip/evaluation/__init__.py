"""Evaluation on all ranks: exact zero-shot classification and image-text retrieval, and pictures of retrieval.

`Evaluator` runs the whole evaluation; its parts can be used separately. Metric names: `zero_shot_top1`,
`zero_shot_top5`, `retrieval_r1_i2t`, `retrieval_r5_i2t`, `retrieval_r10_i2t`, and the same with `_t2i`. Ties count
against the model (`ranking`).
"""

from megaclip.evaluation.encoder import Encode, ModelEncoder, image_features
from megaclip.evaluation.pictures import example_pictures
from megaclip.evaluation.retrieval import RetrievalExamples, retrieval, retrieval_examples
from megaclip.evaluation.scores import Evaluation, Evaluator, evaluate_pairs
from megaclip.evaluation.zero_shot import classify
