"""Build the model of a description with the implementation of that description, and set its initial values.

MegaCLIP's own towers get open_clip's distributions of initial values. Values are drawn in float32 on the CPU from a
separate generator, one parameter after the other, and copied into the parameters. So the values are equal on a CPU and
a GPU, for whole parameters and those that `deepspeed.zero.Init` partitioned, and in float32 and bfloat16 up to
rounding. Partitioned parameters are gathered one at a time, so no rank ever holds the whole model.

Source of the distributions: open_clip 3.3.0, `transformer.py`, `TextTransformer.init_parameters`; timm 1.0,
`vision_transformer.py`, `init_weights_vit_timm`, and `eva.py`, `Eva.init_weights`. open_clip's image tower keeps
PyTorch's defaults; the functions below write them out.
"""

import math
import re

import deepspeed
import torch

from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.models.clip import ClipModel
from megaclip.models.config import ModelConfig, TextConfig, TimmVisionConfig, VisionConfig
from megaclip.models.dual_encoder import DualEncoder, ModelDescription
from megaclip.models.layers import own_part, whole_shape
from megaclip.models.open_clip_model import OpenClipModel

_LAST_PROJECTION = re.compile(r"transformer\.resblocks\.(\d+)\.(?:attn\.out_proj|mlp\.c_proj)\.weight")


def build_model(config: ModelDescription, *, tensor: RankGroup = ONE_RANK, layer_norm: str = "torch") -> DualEncoder:
    """Build a model with open_clip's distributions of initial values, drawn from torch's global seed.

    For MegaCLIP's own towers the same `torch.manual_seed` gives the same values with and without `deepspeed.zero.Init`.
    With it, every rank must call this with the same seed. Under `torch.device("meta")` the parameters get no values.

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


@torch.no_grad()
def initialise(model: ClipModel, config: ModelConfig, seed: int) -> None:
    """Set every parameter of a model to its initial value, except parameters on the meta device.

    If the model was built under `deepspeed.zero.Init`, every rank must call this with the same seed.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        value = _initial_value(name, whole_shape(name, parameter, model.tensor), config, generator)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.copy_(own_part(name, value, model.tensor))


def sin_cos_2d_positions(width: int, grid_size: int) -> torch.Tensor:
    """Return fixed sine-cosine positions of a square grid, as in open_clip and MAE (arXiv:2111.06377).

    They are (1 + grid_size ** 2, width) float32. Row 0 belongs to the class token and is zero. The first half of the
    channels encodes the column and the second half the row, each as sines followed by cosines.
    """
    # linspace instead of arange: deepspeed.zero.Init replaces torch.arange by one that rounds to the training dtype.
    channels = width // 4
    frequency = 1.0 / 10000 ** torch.linspace(0, 1 - 1 / channels, channels, dtype=torch.float64)
    angle = torch.linspace(0, grid_size - 1, grid_size, dtype=torch.float64)[:, None] * frequency
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    grid = torch.cat([axis.repeat(grid_size, 1), axis.repeat_interleave(grid_size, dim=0)], dim=1)
    return torch.cat([grid.new_zeros(1, width), grid]).float()


def _initial_value(name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """Return the float32 initial value of parameter `name`."""
    if name == "logit_scale":
        return torch.full(shape, config.init_logit_scale)
    if name == "logit_bias":
        assert config.init_logit_bias is not None, "a model without init_logit_bias has no logit_bias"
        return torch.full(shape, config.init_logit_bias)
    if ".ln_" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    tower, _, rest = name.partition(".")
    return (_vision_value if tower == "visual" else _text_value)(rest, shape, config, generator)


def _vision_value(name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    width = config.vision_cfg.width
    if name == "positional_embedding" and config.vision_position_init == "sin_cos_2d":
        return sin_cos_2d_positions(width, config.vision_cfg.grid_size)[-config.vision_cfg.tokens :]
    if name.startswith("conv1."):
        return _uniform(shape, (3 * config.vision_cfg.patch_size**2) ** -0.5, generator)
    if isinstance(config.vision_cfg, TimmVisionConfig):
        return _timm_value(name, shape, config.vision_cfg, generator)
    if name in ("class_embedding", "positional_embedding", "proj"):
        return _normal(shape, width**-0.5, generator)
    if _is_qkv_weight(name):
        # Xavier uniform for the fused (3 C, C) matrix that open_clip initialises.
        return _uniform(shape, math.sqrt(6 / (4 * width)), generator)
    if name.endswith("weight"):
        return _uniform(shape, shape[1] ** -0.5, generator)
    return _bias_or_scale(name, shape, config.vision_cfg, generator)


def _timm_value(name: str, shape: torch.Size, vision: TimmVisionConfig, generator: torch.Generator) -> torch.Tensor:
    if name == "attn_pool.latent":
        std = vision.width**-0.5
        return torch.nn.init.trunc_normal_(_normal(shape, 1.0, generator), 0.0, std, -2 * std, 2 * std, generator)
    if name.endswith("gamma"):
        return _bias_or_scale(name, shape, vision, generator)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name == "class_embedding" and not vision.eva:
        return _normal(shape, 1e-6, generator)
    value = _normal(shape, 0.02, generator)
    if vision.eva and (match := _LAST_PROJECTION.fullmatch(name)):
        return value / math.sqrt(2.0 * (int(match[1]) + 1))
    return 0.001 * value if vision.eva and name == "proj.weight" else value


def _text_value(name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    width, layers = config.text_cfg.width, config.text_cfg.layers
    if name == "token_embedding.weight":
        return _normal(shape, 0.02, generator)
    if name == "positional_embedding":
        return _normal(shape, 0.01, generator)
    if name in ("text_projection", "text_projection.weight") or _is_qkv_weight(name):
        return _normal(shape, width**-0.5, generator)
    if name.endswith("mlp.c_fc.weight"):
        return _normal(shape, (2 * width) ** -0.5, generator)
    if name.endswith("weight"):
        return _normal(shape, (2 * layers * width) ** -0.5, generator)
    return _bias_or_scale(name, shape, config.text_cfg, generator)


def _bias_or_scale(
    name: str, shape: torch.Size, config: VisionConfig | TextConfig, generator: torch.Generator
) -> torch.Tensor:
    if config.ls_init_value is not None and name.endswith("gamma"):
        return torch.full(shape, config.ls_init_value)
    if name.endswith("mlp.c_fc.bias"):
        return _uniform(shape, config.width**-0.5, generator)
    if name.endswith("mlp.c_proj.bias"):
        return _uniform(shape, int(config.width * config.mlp_ratio) ** -0.5, generator)
    return torch.zeros(shape)


def _is_qkv_weight(name: str) -> bool:
    return name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))


# deepspeed.zero.Init does not replace torch.normal and torch.rand, so they keep the given dtype and device.
def _normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32, device="cpu")


def _uniform(shape: torch.Size, bound: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(2 * bound).sub_(bound)
