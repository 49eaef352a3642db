"""The dual encoder and its configuration: `load_model_config`, `build_model`, `ClipModel`."""

from megaclip.models.clip import ClipModel, build_model
from megaclip.models.config import ModelConfig, TextConfig, VisionConfig, list_models, load_model_config

__all__ = ["ClipModel", "ModelConfig", "TextConfig", "VisionConfig", "build_model", "list_models", "load_model_config"]
