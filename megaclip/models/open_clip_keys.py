"""Convert state dicts between MegaCLIP's and open_clip's parameter names and layouts.

MegaCLIP uses open_clip's names, with three differences:
- The attention's q, k and v are separate projections. open_clip stacks them in `in_proj_weight` (3 C, C) and
  `in_proj_bias` (3 C,).
- The text tower is under `text.`. In open_clip's CLIP it is at the top level, in its CustomTextCLIP under `text.`;
  `config.custom_text` selects one of them.
- `logit_scale` and `logit_bias` have shape (1,) instead of ().

The parameters of open_clip's own modules (`OpenClipModel`) have the last two differences only.
"""

import re

import torch

from megaclip.models.dual_encoder import ModelDescription
from megaclip.models.open_clip_config import OpenClipConfig

StateDict = dict[str, torch.Tensor]

SCALARS = ("logit_scale", "logit_bias")
"""Names of the parameters that belong to no tower."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
TEXT_ROOTS = ("positional_embedding", "text_projection", "token_embedding.", "ln_final.", "transformer.")
"""Beginnings of the names of the text tower's parameters in open_clip's CLIP."""
_SEPARATE = re.compile(r"(.*\.attn\.)q_proj\.(weight|bias)")
_FUSED = re.compile(r"(.*\.attn\.)in_proj_(weight|bias)")


def to_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return MegaCLIP's state dict with open_clip's names and layouts; values and dtypes are unchanged.

    Raises:
        KeyError: a q projection has no k and v projection.
    """
    own, has_prefix, scalar_shape = True, config.custom_text, torch.Size()
    if isinstance(config, OpenClipConfig):
        own, has_prefix = False, config.has_text_prefix
        scalar_shape = torch.Size([1] if config.nonscalar_logit_scale else [])
    result = {}
    for name, value in state_dict.items():
        if own and any(f".{projection}." in name for projection in _PROJECTIONS):
            match = _SEPARATE.fullmatch(name)
            if match is None:
                continue
            stem, kind = match.groups()
            name = f"{stem}in_proj_{kind}"
            value = torch.cat([state_dict[f"{stem}{projection}.{kind}"] for projection in _PROJECTIONS])
        elif name in SCALARS:
            value = value.reshape(scalar_shape)
        result[name if has_prefix else name.removeprefix("text.")] = value
    return result


def from_open_clip(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return the state dict of open_clip's CLIP or CustomTextCLIP with the names of the model that `config` describes;
    keep unknown entries."""
    result = {}
    for name, value in state_dict.items():
        if name.startswith(TEXT_ROOTS):
            name = f"text.{name}"
        match = None if isinstance(config, OpenClipConfig) else _FUSED.fullmatch(name)
        if match is not None and value.ndim > 0 and len(value) % 3 == 0:
            stem, kind = match.groups()
            for projection, part in zip(_PROJECTIONS, value.chunk(3), strict=True):
                result[f"{stem}{projection}.{kind}"] = part
        else:
            result[name] = value.reshape(1) if name in SCALARS and value.numel() == 1 else value
    return result
