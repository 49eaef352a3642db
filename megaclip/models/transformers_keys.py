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

from megaclip.models.open_clip_keys import POOLING, SCALARS, TIMM, Names, StateDict, separate, stacked

_BLOCK = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
_IMAGE = {
    "visual.class_embedding.": "vision_model.embeddings.class_embedding.",
    "visual.positional_embedding.": "vision_model.embeddings.position_embedding.weight.",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj.": "visual_projection.weight.",
    "visual.attn_pool.latent.": "vision_model.head.probe.",
    "visual.attn_pool.attn.": "vision_model.head.attention.",
    "visual.attn_pool.ln_2.": "vision_model.head.layernorm.",
    "visual.attn_pool.mlp.": "vision_model.head.mlp.",
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
_OWN = Names(_IMAGE | _TEXT | _BERT, _BLOCK)
_TRANSPOSED = ("visual.proj", "text.text_projection")
_PATCHES = "vision_model.embeddings.patch_embedding.weight"


def is_transformers(names: StateDict) -> bool:
    """Return whether the names are those of a CLIP-like model of transformers, or of one of its towers."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in names)


def transformers_name(name: str) -> str | None:
    """Return the name in transformers of a parameter or module of MegaCLIP; None if transformers has none."""
    return name if name in SCALARS else _OWN.of(name)


def to_transformers(state_dict: StateDict, *, patches_are_linear: bool = False) -> StateDict:
    """Return the state dict of MegaCLIP's own towers with transformers' names and layouts.

    patches_are_linear: for `Siglip2Model`. `config_of` has accepted the model, so every parameter has a name.
    """
    is_siglip = "visual.attn_pool.latent" in state_dict
    result: StateDict = {}
    for name, value in stacked(state_dict, lambda stem, _: "in" if stem == POOLING else "").items():
        theirs = transformers_name(name)
        assert theirs is not None, name
        if name in SCALARS:
            value = value.reshape([1] if is_siglip else [])
        elif name in _TRANSPOSED:
            value = value.T
        elif theirs == _PATCHES and patches_are_linear:
            value = value.permute(0, 2, 3, 1).flatten(1)
        result[theirs] = value.contiguous()
    return result


def from_transformers(tensors: StateDict) -> StateDict:
    """Return the state dict of a whole model of transformers, or of one tower, with open_clip's names and layouts.

    The text tower is under `text.`. Entries with other names keep them. Raises CheckpointError as `stacked`.
    """
    is_clip = any(name.startswith(("vision_model.pre_layrnorm", "visual_projection")) for name in tensors)
    is_bert = any(name.startswith("text_model.embeddings.word_embeddings") for name in tensors)
    names = Names(_IMAGE | (_BERT if is_bert else _TEXT), _BLOCK).inverse()
    result: StateDict = {}
    for name, value in tensors.items():
        own = name if name in SCALARS else names.of(name) or name
        if own in _TRANSPOSED and value.ndim == 2:
            value = value.T
        elif own == "visual.positional_embedding" and not is_clip:
            value = value[None]
        elif name == _PATCHES and value.ndim == 2:
            side = math.isqrt(value.shape[1] // 3)
            if value.shape[1] == 3 * side**2:
                value = value.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        result[own] = value
    result = separate(result, lambda stem, _: "in" if stem == POOLING else "")
    result = stacked(result, lambda stem, _: "kv" if stem == POOLING else "in")
    return result if is_clip else {TIMM.of(name) or name: value for name, value in result.items()}
