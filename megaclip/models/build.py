"""Build the model of a description with the implementation of that description."""

import torch

from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import ConfigError
from megaclip.models.clip import ClipModel, build_own_model
from megaclip.models.config import ModelConfig
from megaclip.models.dual_encoder import DualEncoder, ModelDescription
from megaclip.models.open_clip_model import OpenClipModel


def build_model(
    config: ModelDescription,
    *,
    patch_dropout: float | None = None,
    tensor: RankGroup = ONE_RANK,
    layer_norm: str = "torch",
) -> DualEncoder:
    """Build a model with open_clip's distributions of initial values, drawn from torch's global seed.

    Args:
        config: model description.
        patch_dropout: replaces `config.vision_cfg.patch_dropout`.
        tensor: tensor-parallel group; the values do not depend on its size.
        layer_norm: implementation of the layer norms, "torch" or "apex".

    Raises:
        ConfigError: patch_dropout is outside [0, 1), or a setting requires MegaCLIP's own towers.
    """
    if patch_dropout is not None:
        config = config.replace(vision_cfg={"patch_dropout": patch_dropout})
    if isinstance(config, ModelConfig):
        return build_own_model(config, tensor=tensor, layer_norm=layer_norm)
    for setting, value, default in (
        ("tensor_parallel_size", tensor.size, 1),
        ("layer_norm", layer_norm, "torch"),
    ):
        if value != default:
            raise ConfigError(
                f"megaclip.{setting} {value!r} requires MegaCLIP's own towers, and open_clip's modules run this model; "
                f"set it to {default!r}, or choose a model that `megaclip show models` lists with MegaCLIP's "
                "towers"
            )
    return OpenClipModel(config)


def meta_model(config: ModelDescription) -> DualEncoder:
    """Return the model on the meta device: it has names and shapes, and tensors can be assigned as its parameters."""
    with torch.device("meta"):
        return ClipModel(config) if isinstance(config, ModelConfig) else OpenClipModel(config)
