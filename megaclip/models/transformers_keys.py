"""Convert state dicts between MegaCLIP's, open_clip's and transformers' parameter names and layouts.

transformers' `CLIPModel`, `ChineseCLIPModel`, `SiglipModel` and `Siglip2Model` hold the towers of open_clip's models:

| transformers | image tower in open_clip | text tower in open_clip |
| --- | --- | --- |
| `CLIPModel` | its vision transformer | its text transformer |
| `ChineseCLIPModel` | its vision transformer | Hugging Face's BERT |
| `SiglipModel`, `Siglip2Model` | timm's SigLIP, with attention pooling | its text transformer, with a linear layer |

Values and dtypes stay the same. Layouts that differ:
- q, k and v of blocks are separate in transformers and stacked in open_clip. The pooling head of SigLIP is the reverse:
  stacked in transformers, q apart from k and v in timm.
- The projections of CLIP are (C, D) parameters in open_clip, and weights (D, C) of linear layers in transformers.
- timm's positions are (1, P, C). The patch embedding of `Siglip2Model` is a linear layer over (row, column, channel).
"""

import math
import re

import torch

from megaclip.errors import CheckpointError
from megaclip.models.open_clip_keys import SCALARS, TEXT_ROOTS, StateDict, from_timm, to_timm

# Beginnings of names: MegaCLIP's, which are open_clip's with the text tower under `text.`, and transformers'.
# "." is added to every name before it is compared. Longer beginnings come before shorter ones.
_IMAGE = {
    "visual.class_embedding.": "vision_model.embeddings.class_embedding.",
    "visual.positional_embedding.": "vision_model.embeddings.position_embedding.weight.",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj.": "visual_projection.weight.",
    "visual.attn_pool.latent.": "vision_model.head.probe.",
    "visual.attn_pool.attn.in_proj_": "vision_model.head.attention.in_proj_",
    "visual.attn_pool.attn.out_proj.": "vision_model.head.attention.out_proj.",
    "visual.attn_pool.ln_2.": "vision_model.head.layernorm.",
    "visual.attn_pool.mlp.c_fc.": "vision_model.head.mlp.fc1.",
    "visual.attn_pool.mlp.c_proj.": "vision_model.head.mlp.fc2.",
}
_TEXT = {
    "text.token_embedding.": "text_model.embeddings.token_embedding.",
    "text.positional_embedding.": "text_model.embeddings.position_embedding.weight.",
    "text.transformer.resblocks.": "text_model.encoder.layers.",
    "text.ln_final.": "text_model.final_layer_norm.",
    "text.text_projection.weight.": "text_model.head.weight.",  # of SigLIP, a linear layer
    "text.text_projection.bias.": "text_model.head.bias.",
    "text.text_projection.": "text_projection.weight.",  # of CLIP, a parameter
}
_BERT = {"text.transformer.": "text_model.", "text.proj.": "text_projection."}
_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.": "self_attn.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
_TRANSPOSED = ("visual.proj", "text.text_projection")
_POSITIONS = "visual.positional_embedding"
_PATCHES = "vision_model.embeddings.patch_embedding.weight"
_QKV = ("q_proj", "k_proj", "v_proj")
_STACKED = re.compile(r"(.*\.attn\.)in_proj_(weight|bias)")
_SEPARATE = re.compile(r"(.*\.attn\.)([qkv]_proj)\.(weight|bias)")
_POOL = "visual.attn_pool.attn."


def is_transformers(names: StateDict) -> bool:
    """Return whether the names are those of a CLIP-like model of transformers, or of one of its towers."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in names)


def transformers_name(name: str) -> str | None:
    """Return the name in transformers of a parameter or module of MegaCLIP; None if transformers has none.

    name: MegaCLIP's or timm's, such as `visual.transformer.resblocks.0.attn.q_proj`, also with `.lora_A.weight`;
    a projection that is not stacked.
    """
    return name if name in SCALARS else _renamed(from_timm(f"{name}.").removesuffix("."), _IMAGE | _TEXT | _BERT)


def to_transformers(state_dict: StateDict, *, patches_are_linear: bool = False) -> StateDict:
    """Return open_clip's state dict of a model with transformers' names and layouts.

    Args:
        state_dict: open_clip's names, with the text tower under `text.` or not.
        patches_are_linear: for `Siglip2Model`.

    Raises:
        KeyError: a parameter has no name in transformers.
    """
    is_siglip = "visual.trunk.attn_pool.latent" in state_dict
    named = {f"text.{name}" if name.startswith(TEXT_ROOTS) else name: value for name, value in state_dict.items()}
    result: StateDict = {}
    for name, value in _separate({from_timm(name): value for name, value in named.items()}).items():
        theirs = transformers_name(name)
        if theirs is None:
            raise KeyError(name)
        if name in SCALARS:
            value = value.reshape([1] if is_siglip else [])
        elif name in _TRANSPOSED:
            value = value.T
        elif name == _POSITIONS and is_siglip:
            value = value[0]
        elif theirs == _PATCHES and patches_are_linear:
            value = value.permute(0, 2, 3, 1).flatten(1)
        result[theirs] = value.contiguous()
    return result


def from_transformers(tensors: StateDict) -> StateDict:
    """Return the state dict of a whole model of transformers, or of one tower, with open_clip's names and layouts.

    The text tower is under `text.`. Entries with other names keep them.

    Raises:
        CheckpointError: tensors that open_clip stacks have different shapes.
    """
    is_clip = any(name.startswith(("vision_model.pre_layrnorm", "visual_projection")) for name in tensors)
    is_bert = any(name.startswith("text_model.embeddings.word_embeddings") for name in tensors)
    table = {theirs: own for own, theirs in (_IMAGE | (_BERT if is_bert else _TEXT)).items()}
    result: StateDict = {}
    for name, value in tensors.items():
        own = name if name in SCALARS else _renamed(name, table) or name
        if own in _TRANSPOSED and value.ndim == 2:
            value = value.T
        elif own == _POSITIONS and not is_clip:
            value = value[None]
        elif name == _PATCHES and value.ndim == 2:
            side = math.isqrt(value.shape[1] // 3)
            if value.shape[1] == 3 * side**2:
                value = value.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        result[own] = value
    stacked = _stack(result)
    return stacked if is_clip else {to_timm(name): value for name, value in stacked.items()}


def _renamed(name: str, table: dict[str, str]) -> str | None:
    """Return a name with another beginning, and other names of the parts of a block; None if no entry begins it."""
    dotted = f"{name}."
    found = next((start for start in table if dotted.startswith(start)), None)
    if found is None:
        return None
    start, rest = table[found], dotted.removeprefix(found)
    if found.endswith(("resblocks.", "layers.")):
        number, _, part = rest.partition(".")
        names = {theirs: own for own, theirs in _BLOCK.items()} if found.endswith("layers.") else _BLOCK
        inner = next((one for one in names if part.startswith(one)), "")
        rest = f"{number}.{names.get(inner, '')}{part.removeprefix(inner)}"
    return f"{start}{rest}".removesuffix(".")


def _separate(state_dict: StateDict) -> StateDict:
    """Return open_clip's tensors with q, k and v of blocks apart, and those of timm's pooling head stacked."""
    result: StateDict = {}
    for name, value in state_dict.items():
        if (match := _STACKED.fullmatch(name)) is not None:
            for projection, part in zip(_QKV, value.chunk(3), strict=True):
                result[f"{match[1]}{projection}.{match[2]}"] = part
        elif name.startswith(f"{_POOL}q_proj."):
            kind = name.removeprefix(f"{_POOL}q_proj.")
            result[f"{_POOL}in_proj_{kind}"] = torch.cat([value, state_dict[f"{_POOL}kv_proj_{kind}"]])
        elif not name.startswith(f"{_POOL}kv_proj_"):
            result[name] = value
    return result


def _stack(tensors: StateDict) -> StateDict:
    """Return tensors with q, k and v of blocks stacked, and those of timm's pooling head apart."""
    result: StateDict = {}
    for name, value in tensors.items():
        if name.startswith(f"{_POOL}in_proj_") and value.ndim > 0:
            kind, width = name.removeprefix(f"{_POOL}in_proj_"), len(value) // 3
            result |= {f"{_POOL}q_proj.{kind}": value[:width], f"{_POOL}kv_proj_{kind}": value[width:]}
            continue
        match = _SEPARATE.fullmatch(name)
        parts = [] if match is None else [tensors.get(f"{match[1]}{one}.{match[3]}") for one in _QKV]
        found = [part for part in parts if part is not None]
        if match is None or len(found) < len(_QKV):
            result[name] = value
        elif match[2] == "q_proj":
            # An expanded tensor may have a huge shape with little storage.
            if any(part.shape != value.shape or not part.is_contiguous() or part.ndim == 0 for part in found):
                shapes = ", ".join(str(list(part.shape)) for part in found)
                raise CheckpointError(f"{match[1]}q_proj, k_proj, v_proj cannot be stacked: their shapes are {shapes}")
            result[f"{match[1]}in_proj_{match[3]}"] = torch.cat(found)
    return result
