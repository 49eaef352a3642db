"""Convert state dicts between MegaCLIP's and open_clip's parameter names and layouts.

MegaCLIP uses open_clip's names, with three differences:
- The attention's q, k and v are separate projections. open_clip stacks them in `in_proj_weight` (3 C, C) and
  `in_proj_bias` (3 C,).
- The text tower is under `text.`. In open_clip's CLIP it is at the top level, in its CustomTextCLIP under `text.`;
  `config.custom_text` selects one of them.
- `logit_scale` and `logit_bias` have shape (1,) instead of ().

A vision transformer of timm has timm's names in open_clip, under `visual.trunk.`. Blocks stack q, k and v there too
(`attn.qkv`), attention pooling stacks k and v (`kv`), and positions are (1, L, C) instead of (L, C).

The parameters of open_clip's own modules (`OpenClipModel`) have the last two differences only.
"""

import re

import torch

from megaclip.models.config import TimmVisionConfig
from megaclip.models.dual_encoder import ModelDescription
from megaclip.models.open_clip_config import OpenClipConfig

StateDict = dict[str, torch.Tensor]

SCALARS = ("logit_scale", "logit_bias")
"""Names of the parameters that belong to no tower."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
TEXT_ROOTS = ("positional_embedding", "text_projection", "token_embedding.", "ln_final.", "transformer.")
"""Beginnings of the names of the text tower's parameters in open_clip's CLIP."""
_TIMM_TOWER = {
    "visual.conv1.": "visual.trunk.patch_embed.proj.",
    "visual.class_embedding": "visual.trunk.cls_token",
    "visual.positional_embedding": "visual.trunk.pos_embed",
    "visual.ln_pre.": "visual.trunk.norm_pre.",
    "visual.transformer.resblocks.": "visual.trunk.blocks.",
    "visual.ln_post.": "visual.trunk.norm.",
    "visual.attn_pool.attn.q_proj.": "visual.trunk.attn_pool.q.",
    "visual.attn_pool.attn.kv.": "visual.trunk.attn_pool.kv.",
    "visual.attn_pool.attn.out_proj.": "visual.trunk.attn_pool.proj.",
    "visual.attn_pool.ln_2.": "visual.trunk.attn_pool.norm.",
    "visual.attn_pool.": "visual.trunk.attn_pool.",
    "visual.proj.": "visual.trunk.head.",
}
"""Beginnings of names, MegaCLIP's and timm's; the first one that fits counts."""
_TIMM_PARTS = {
    ".ln_1.": ".norm1.",
    ".ln_2.": ".norm2.",
    ".attn.in_proj_": ".attn.qkv.",
    ".attn.out_proj.": ".attn.proj.",
    ".ls_1.": ".ls1.",
    ".ls_2.": ".ls2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
"""Parts of names in blocks and attention pooling, MegaCLIP's and timm's."""
_POOLING = "visual.attn_pool.attn."
_SEPARATE = re.compile(r"(.*\.attn\.)q_proj\.(weight|bias)")
_FUSED = re.compile(r"(.*\.attn\.)(?:in_proj_|kv\.)(weight|bias)")


def to_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return MegaCLIP's state dict with open_clip's names and layouts; values and dtypes are unchanged.

    Raises:
        KeyError: a q projection has no k and v projection.
    """
    own, has_prefix, scalar_shape = True, config.custom_text, torch.Size()
    if isinstance(config, OpenClipConfig):
        own, has_prefix = False, config.has_text_prefix
        scalar_shape = torch.Size([1] if config.nonscalar_logit_scale else [])
    is_timm = own and isinstance(config.vision_cfg, TimmVisionConfig)
    result = {}
    for name, value in state_dict.items():
        if own and any(f".{projection}." in name for projection in _PROJECTIONS):
            match = _SEPARATE.fullmatch(name)
            if match is None:
                continue
            stem, kind = match.groups()
            parts = [state_dict[f"{stem}{projection}.{kind}"] for projection in _PROJECTIONS]
            if stem == _POOLING:
                result[_to_timm(name)] = parts.pop(0)
            name = f"{stem}kv.{kind}" if stem == _POOLING else f"{stem}in_proj_{kind}"
            value = torch.cat(parts)
        elif name in SCALARS:
            value = value.reshape(scalar_shape)
        if is_timm:
            value = value[None] if name == "visual.positional_embedding" else value
            name = _to_timm(name)
        result[name if has_prefix else name.removeprefix("text.")] = value
    return result


def from_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return the state dict of open_clip's CLIP or CustomTextCLIP with the names of the model that `config` describes;
    keep unknown entries."""
    is_timm = isinstance(config.vision_cfg, TimmVisionConfig)
    result = {}
    for name, value in state_dict.items():
        if name.startswith(TEXT_ROOTS):
            name = f"text.{name}"
        if is_timm:
            value = value[0] if name == "visual.trunk.pos_embed" and value.ndim == 3 and len(value) == 1 else value
            name = _from_timm(name)
        match = None if isinstance(config, OpenClipConfig) else _FUSED.fullmatch(name)
        stacked = _PROJECTIONS if match is None or match[1] != _POOLING else _PROJECTIONS[1:]
        if match is not None and value.ndim > 0 and len(value) % len(stacked) == 0:
            stem, kind = match.groups()
            for projection, part in zip(stacked, value.chunk(len(stacked)), strict=True):
                result[f"{stem}{projection}.{kind}"] = part
        else:
            result[name] = value.reshape(1) if name in SCALARS and value.numel() == 1 else value
    return result


def _to_timm(name: str) -> str:
    """Return the name in timm, under `visual.trunk.`, of a parameter of the image tower; other names unchanged."""
    return _renamed(name, "visual.", _TIMM_TOWER, _TIMM_PARTS)


def _from_timm(name: str) -> str:
    tower, parts = ({timm: own for own, timm in names.items()} for names in (_TIMM_TOWER, _TIMM_PARTS))
    return _renamed(name, "visual.trunk.", tower, parts)


def _renamed(name: str, prefix: str, beginnings: dict[str, str], parts: dict[str, str]) -> str:
    if not name.startswith(prefix):
        return name
    old = next((beginning for beginning in beginnings if name.startswith(beginning)), "")
    name = beginnings.get(old, "") + name.removeprefix(old)
    for part, new in parts.items():
        name = name.replace(part, new)
    return name
