"""Convert state dicts between MegaCLIP's and open_clip's parameter names and layouts.

MegaCLIP uses open_clip's names, with three differences:
- The attention's q, k and v are separate projections. open_clip stacks them in `in_proj_weight` (3 C, C) and
  `in_proj_bias` (3 C,).
- The text tower is under `text.`. In open_clip's CLIP it is at the top level, in its CustomTextCLIP under `text.`;
  `config.custom_text` selects one of them.
- `logit_scale` and `logit_bias` have shape (1,) instead of ().

A vision transformer of timm has timm's names in open_clip, under `visual.trunk.`. Blocks stack q, k and v there too
(`attn.qkv`; EVA's biases are separate, and all of EVA-02's), attention pooling stacks k and v (`kv`), and positions are
(1, L, C) instead of (L, C).

The parameters of open_clip's own modules (`OpenClipModel`) have the last two differences only.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from megaclip.errors import CheckpointError
from megaclip.models.config import TextConfig, TimmVisionConfig, VisionConfig
from megaclip.models.dual_encoder import ModelDescription
from megaclip.models.open_clip_config import OpenClipConfig

StateDict = dict[str, torch.Tensor]

SCALARS = ("logit_scale", "logit_bias")
"""Names of the parameters that belong to no tower."""
TEXT_ROOTS = ("positional_embedding", "text_projection", "token_embedding.", "ln_final.", "transformer.")
"""Beginnings of the names of the text tower's parameters in open_clip's CLIP."""
POOLING = "visual.attn_pool.attn."
"""Beginning of the names of the attention's parameters in attention pooling."""
_SEPARATE = re.compile(r"(.*\.attn\.)([qkv]_proj)\.(weight|bias)")
_FUSED = re.compile(r"(.*\.attn\.)(in|kv)_proj_(weight|bias)")
_FUSIONS = {"in": ("q_proj", "k_proj", "v_proj"), "kv": ("k_proj", "v_proj")}
"""Projections that are stacked, by the beginning of the name of the stack."""


class Names(NamedTuple):
    """Names of MegaCLIP and those of another library, both with a dot behind them."""

    beginnings: dict[str, str]
    """Beginnings of names, MegaCLIP's and the library's; the first one that fits counts."""
    parts: dict[str, str]
    """Parts of the rest of a name."""

    def inverse(self) -> "Names":
        """Return the names with MegaCLIP as the other library."""
        beginnings, parts = ({theirs: own for own, theirs in table.items()} for table in self)
        return Names(beginnings, parts)

    def of(self, name: str) -> str | None:
        """Return the library's name of a parameter or module of MegaCLIP; None if it has none."""
        dotted = f"{name}."
        found = next((own for own in self.beginnings if dotted.startswith(own)), None)
        if found is None:
            return None
        dotted = self.beginnings[found] + dotted.removeprefix(found)
        for own, theirs in self.parts.items():
            dotted = dotted.replace(own, theirs)
        return dotted.removesuffix(".")


TIMM = Names(
    {
        "visual.conv1.": "visual.trunk.patch_embed.proj.",
        "visual.class_embedding.": "visual.trunk.cls_token.",
        "visual.positional_embedding.": "visual.trunk.pos_embed.",
        "visual.ln_pre.": "visual.trunk.norm_pre.",
        "visual.transformer.resblocks.": "visual.trunk.blocks.",
        "visual.ln_post.": "visual.trunk.norm.",
        "visual.attn_pool.attn.q_proj.": "visual.trunk.attn_pool.q.",
        "visual.attn_pool.attn.kv_proj_": "visual.trunk.attn_pool.kv.",
        "visual.attn_pool.attn.out_proj.": "visual.trunk.attn_pool.proj.",
        "visual.attn_pool.ln_2.": "visual.trunk.attn_pool.norm.",
        "visual.attn_pool.": "visual.trunk.attn_pool.",
        "visual.proj.": "visual.trunk.head.",
    },
    {
        ".ln_1.": ".norm1.",
        ".ln_2.": ".norm2.",
        ".attn.in_proj_": ".attn.qkv.",
        ".attn.out_proj.": ".attn.proj.",
        ".ls_1.": ".ls1.",
        ".ls_2.": ".ls2.",
        ".mlp.c_fc.": ".mlp.fc1.",
        ".mlp.c_proj.": ".mlp.fc2.",
    },
)
"""Names of timm's VisionTransformer."""
_GATED_PARTS = {
    ".attn.ln_inner.": ".attn.norm.",
    ".mlp.ln_inner.": ".mlp.norm.",
    ".mlp.c_gate.": ".mlp.fc1_g.",
    ".mlp.c_fc.": ".mlp.fc1_x.",
}
_BIASES_OF_EVA = {".attn.q_proj.bias.": ".attn.q_bias.", ".attn.v_proj.bias.": ".attn.v_bias."}


def to_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return MegaCLIP's state dict with open_clip's names and layouts. Raises CheckpointError as `stacked`."""
    names, has_prefix, scalar_shape = None, config.custom_text, torch.Size()
    if isinstance(config, OpenClipConfig):
        has_prefix = config.has_text_prefix
        scalar_shape = torch.Size([1] if config.nonscalar_logit_scale else [])
    else:
        state_dict = stacked(state_dict, lambda stem, kind: _stack_of(stem, kind, config))
        names = _timm_names(config)
    result = {}
    for name, value in state_dict.items():
        if name in SCALARS:
            value = value.reshape(scalar_shape)
        if names is not None:
            value = value[None] if name == "visual.positional_embedding" else value
            name = names.of(name) or name
        result[name if has_prefix else name.removeprefix("text.")] = value
    return result


def from_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return the state dict of open_clip's CLIP or CustomTextCLIP with the names of the model that `config` describes;
    keep unknown entries."""
    timm = _timm_names(config)
    names = None if timm is None else timm.inverse()
    result = {}
    for name, value in state_dict.items():
        if name.startswith(TEXT_ROOTS):
            name = f"text.{name}"
        if names is not None:
            value = value[0] if name == "visual.trunk.pos_embed" and value.ndim == 3 and len(value) == 1 else value
            name = names.of(name) or name
        result[name] = value.reshape(1) if name in SCALARS and value.numel() == 1 else value
    if isinstance(config, OpenClipConfig):
        return result
    return separate(result, lambda stem, kind: _stack_of(stem, kind, config))


def stacked(state_dict: StateDict, stack_of: Callable[[str, str], str]) -> StateDict:
    """Return tensors with projections stacked whose parts are all there.

    stack_of: returns the key in `_FUSIONS`, or "", of an attention whose parameters' names begin with the first
    argument. The second one is weight or bias. Raises CheckpointError if parts have different shapes.
    """
    result: StateDict = {}
    for name, value in state_dict.items():
        match = _SEPARATE.fullmatch(name)
        key = "" if match is None else stack_of(match[1], match[3])
        parts = _FUSIONS.get(key, ())
        names = [] if match is None else [f"{match[1]}{part}.{match[3]}" for part in parts]
        if match is None or name not in names or not state_dict.keys() >= set(names):
            result[name] = value
        elif name == names[0]:
            tensors = [state_dict[part] for part in names]
            # An expanded tensor may have a huge shape with little storage.
            if any(part.shape != value.shape or not part.is_contiguous() or part.ndim == 0 for part in tensors):
                shapes = ", ".join(str(list(part.shape)) for part in tensors)
                raise CheckpointError(f"{match[1]}{', '.join(parts)} cannot be stacked: their shapes are {shapes}")
            result[f"{match[1]}{key}_proj_{match[3]}"] = torch.cat(tensors)
    return result


def separate(state_dict: StateDict, stack_of: Callable[[str, str], str]) -> StateDict:
    """Return tensors with stacked projections apart. stack_of: as for `stacked`."""
    result: StateDict = {}
    for name, value in state_dict.items():
        match = _FUSED.fullmatch(name)
        parts = _FUSIONS[match[2]] if match is not None and stack_of(match[1], match[3]) == match[2] else ()
        if match is None or not parts or value.ndim == 0 or len(value) % len(parts):
            result[name] = value
            continue
        for part, tensor in zip(parts, value.chunk(len(parts)), strict=True):
            result[f"{match[1]}{part}.{match[3]}"] = tensor
    return result


def _stack_of(stem: str, kind: str, config: ModelDescription) -> str:
    """Return the stack of open_clip or timm, as `stacked` describes, in which MegaCLIP's own projections are."""
    if stem == POOLING:
        return "kv"
    blocks = config.vision_cfg if stem.startswith("visual.") else config.text_cfg
    assert isinstance(blocks, VisionConfig | TextConfig), "open_clip's modules have open_clip's parameters"
    return "" if blocks.gated or (kind == "bias" and not blocks.key_bias) else "in"


def _timm_names(config: ModelDescription) -> Names | None:
    """Return the names of the image tower of timm that MegaCLIP's own tower computes; None if it is open_clip's."""
    vision = config.vision_cfg
    if not isinstance(vision, TimmVisionConfig):
        return None
    if vision.gated:
        return TIMM._replace(parts=TIMM.parts | _GATED_PARTS)
    return TIMM if vision.key_bias else TIMM._replace(parts=TIMM.parts | _BIASES_OF_EVA)
