"""Parameter names and layouts: MegaCLIP's and open_clip's, both ways, as pure functions of a state dict.

MegaCLIP keeps open_clip's names but for three things: the attention's q, k and v are separate projections (open_clip
stacks them in `in_proj_weight` (3 C, C) and `in_proj_bias` (3 C,)); the text tower is under `text.` (open_clip's CLIP
has it at the top, its CustomTextCLIP under `text.`; `config.custom_text` says which); `logit_scale` and `logit_bias`
are (1,), not ().
"""

import re

import torch

from megaclip.models.config import ModelConfig

StateDict = dict[str, torch.Tensor]

_SCALARS = ("logit_scale", "logit_bias")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_TEXT_ROOTS = ("positional_embedding", "text_projection", "token_embedding.", "ln_final.", "transformer.")
_SEPARATE = re.compile(r"(.*\.attn\.)q_proj\.(weight|bias)")
_FUSED = re.compile(r"(.*\.attn\.)in_proj_(weight|bias)")


def to_open_clip(state_dict: StateDict, config: ModelConfig) -> StateDict:
    """MegaCLIP's state dict in open_clip's names and layouts; values and dtypes unchanged.

    Raises:
        KeyError: a q projection comes without its k and v.
    """
    result = {}
    for name, value in state_dict.items():
        if any(f".{projection}." in name for projection in _PROJECTIONS):
            match = _SEPARATE.fullmatch(name)
            if match is None:
                continue
            stem, kind = match.groups()
            name = f"{stem}in_proj_{kind}"
            value = torch.cat([state_dict[f"{stem}{projection}.{kind}"] for projection in _PROJECTIONS])
        elif name in _SCALARS:
            value = value.reshape(())
        if not config.custom_text:
            name = name.removeprefix("text.")
        result[name] = value
    return result


def from_open_clip(state_dict: StateDict) -> StateDict:
    """open_clip's state dict (of CLIP or CustomTextCLIP) in MegaCLIP's names; unknown entries stay as they are."""
    result = {}
    for name, value in state_dict.items():
        if name.startswith(_TEXT_ROOTS):
            name = f"text.{name}"
        match = _FUSED.fullmatch(name)
        if match is not None and value.ndim > 0 and len(value) % 3 == 0:
            stem, kind = match.groups()
            for projection, part in zip(_PROJECTIONS, value.chunk(3), strict=True):
                result[f"{stem}{projection}.{kind}"] = part
        else:
            result[name] = value.reshape(1) if name in _SCALARS and value.numel() == 1 else value
    return result
