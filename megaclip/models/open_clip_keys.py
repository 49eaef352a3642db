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

import torch

from megaclip.models.config import TextConfig, TimmVisionConfig, VisionConfig
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
    "visual.attn_pool.attn.kv_proj_": "visual.trunk.attn_pool.kv.",
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
_GATED_PARTS = _TIMM_PARTS | {
    ".attn.ln_inner.": ".attn.norm.",
    ".mlp.ln_inner.": ".mlp.norm.",
    ".mlp.c_gate.": ".mlp.fc1_g.",
    ".mlp.c_fc.": ".mlp.fc1_x.",
}
_BIASES_OF_EVA = {".attn.q_proj.bias": ".attn.q_bias", ".attn.v_proj.bias": ".attn.v_bias"}
_POOLING = "visual.attn_pool.attn."
_SEPARATE = re.compile(r"(.*\.attn\.)([qkv]_proj)\.(weight|bias)")
_FUSED = re.compile(r"(.*\.attn\.)(?:in|kv)_proj_(weight|bias)")


def to_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return MegaCLIP's state dict with open_clip's names and layouts; values and dtypes are unchanged.

    Raises:
        KeyError: a q projection has no k and v projection.
    """
    own, has_prefix, scalar_shape = True, config.custom_text, torch.Size()
    if isinstance(config, OpenClipConfig):
        own, has_prefix = False, config.has_text_prefix
        scalar_shape = torch.Size([1] if config.nonscalar_logit_scale else [])
    vision = config.vision_cfg
    result = {}
    for name, value in state_dict.items():
        match = _SEPARATE.fullmatch(name) if own else None
        stack = () if match is None else _stacked(match[1], match[3], config)
        if match is not None and match[2] in stack:
            if match[2] != stack[0]:
                continue  # it is stacked with the first
            value = torch.cat([state_dict[f"{match[1]}{projection}.{match[3]}"] for projection in stack])
            name = f"{match[1]}{'kv' if len(stack) == 2 else 'in'}_proj_{match[3]}"
        elif name in SCALARS:
            value = value.reshape(scalar_shape)
        if isinstance(vision, TimmVisionConfig):
            value = value[None] if name == "visual.positional_embedding" else value
            name = to_timm(name, vision)
        result[name if has_prefix else name.removeprefix("text.")] = value
    return result


def from_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return the state dict of open_clip's CLIP or CustomTextCLIP with the names of the model that `config` describes;
    keep unknown entries."""
    vision = config.vision_cfg
    result = {}
    for name, value in state_dict.items():
        if name.startswith(TEXT_ROOTS):
            name = f"text.{name}"
        if isinstance(vision, TimmVisionConfig):
            value = value[0] if name == "visual.trunk.pos_embed" and value.ndim == 3 and len(value) == 1 else value
            name = from_timm(name, vision)
        match = None if isinstance(config, OpenClipConfig) else _FUSED.fullmatch(name)
        stack = () if match is None else _stacked(match[1], match[2], config)
        if match is not None and stack and value.ndim > 0 and len(value) % len(stack) == 0:
            for projection, part in zip(stack, value.chunk(len(stack)), strict=True):
                result[f"{match[1]}{projection}.{match[2]}"] = part
        else:
            result[name] = value.reshape(1) if name in SCALARS and value.numel() == 1 else value
    return result


def _stacked(stem: str, kind: str, config: ModelDescription) -> tuple[str, ...]:
    """Return the projections that open_clip or timm stacks. stem: beginning of their names. kind: weight or bias."""
    if stem == _POOLING:
        return _PROJECTIONS[1:]
    blocks = config.vision_cfg if stem.startswith("visual.") else config.text_cfg
    assert isinstance(blocks, VisionConfig | TextConfig), "open_clip's modules have open_clip's parameters"
    return () if blocks.gated or (kind == "bias" and not blocks.key_bias) else _PROJECTIONS


def to_timm(name: str, vision: TimmVisionConfig | None = None) -> str:
    """Return the name in timm, under `visual.trunk.`, of a parameter of the image tower; other names unchanged.

    vision: default: a tower whose blocks are those of timm's VisionTransformer.
    """
    return _renamed(name, "visual.", _TIMM_TOWER, _timm_parts(vision))


def from_timm(name: str, vision: TimmVisionConfig | None = None) -> str:
    """Return the name of which `to_timm` makes `name`; other names unchanged."""
    tower, parts = ({timm: own for own, timm in names.items()} for names in (_TIMM_TOWER, _timm_parts(vision)))
    return _renamed(name, "visual.trunk.", tower, parts)


def _timm_parts(vision: TimmVisionConfig | None) -> dict[str, str]:
    if vision is not None and vision.gated:
        return _GATED_PARTS
    return _TIMM_PARTS if vision is None or vision.key_bias else _TIMM_PARTS | _BIASES_OF_EVA


def _renamed(name: str, prefix: str, beginnings: dict[str, str], parts: dict[str, str]) -> str:
    if not name.startswith(prefix):
        return name
    old = next((beginning for beginning in beginnings if name.startswith(beginning)), "")
    name = beginnings.get(old, "") + name.removeprefix(old)
    for part, new in parts.items():
        name = name.replace(part, new)
    return name
