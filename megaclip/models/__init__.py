"""The dual encoder and its description: `load_model_config`, `build_model`, `DualEncoder`."""

from megaclip.models.build import build_model, meta_model
from megaclip.models.clip import ClipModel
from megaclip.models.config import ModelConfig, TextConfig, VisionConfig, list_models
from megaclip.models.descriptions import load_model_config
from megaclip.models.dual_encoder import DualEncoder, ModelDescription
from megaclip.models.open_clip_config import OpenClipConfig, OpenClipText
