"""Build the model of a description with the implementation of that description."""

import torch

from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.models.clip import ClipModel
from megaclip.models.config import ModelConfig
from megaclip.models.dual_encoder import DualEncoder, ModelDescription
from megaclip.models.initialise import initialise
from megaclip.models.open_clip_model import OpenClipModel


def build_model(
    config: ModelDescription,
    *,
    tensor: RankGroup = ONE_RANK,
    layer_norm: str = "torch",
) -> DualEncoder:
    """Build a model with open_clip's distributions of initial values, drawn from torch's global seed.

    For MegaCLIP's own towers the same `torch.manual_seed` gives the same values with and without `deepspeed.zero.Init`.
    With it, every rank must call this with the same seed. Under `torch.device("meta")` the parameters get no values.

    Args:
        config: model description.
        tensor: tensor-parallel group, of one rank for open_clip's modules; the values do not depend on its size.
        layer_norm: implementation of the layer norms, "torch" or "apex"; "torch" for open_clip's modules.
    """
    if not isinstance(config, ModelConfig):
        assert tensor.size == 1 and layer_norm == "torch", "engine.inputs refuses these settings of open_clip's modules"
        return OpenClipModel(config)
    # The seed is drawn before construction, which uses the generator differently under deepspeed.zero.Init.
    seed = int(torch.randint(2**62, (1,), device="cpu"))
    model = ClipModel(config, tensor, layer_norm)
    initialise(model, config, seed)
    return model


def meta_model(config: ModelDescription) -> DualEncoder:
    """Return the model on the meta device: it has names and shapes, and tensors can be assigned as its parameters."""
    with torch.device("meta"):
        return ClipModel(config) if isinstance(config, ModelConfig) else OpenClipModel(config)
