"""One small model description per family of open_clip's towers, without weights and without network.

timm trunks are registered with timm under the names `small_...`. Hugging Face text models are directories with a
config.json. Dropout and stochastic depth are active in families that have them, so a replay with other random numbers
is detected.
"""

import functools
import json
from pathlib import Path
from typing import Any

from megaclip.models import OpenClipConfig
from megaclip.open_clip_package import import_open_clip

IMAGE_SIZE = 64
CONTEXT_LENGTH = 6
VOCAB_SIZE = 64
EMBED_DIM = 16

_TEXT: dict[str, Any] = {
    "context_length": CONTEXT_LENGTH,
    "vocab_size": VOCAB_SIZE,
    "width": 32,
    "heads": 4,
    "layers": 2,
    "eos_id": 2,
    "pool_type": "eos",
}
_VISION: dict[str, Any] = {"image_size": IMAGE_SIZE, "layers": 2, "width": 32, "head_width": 8, "patch_size": 16}

HUGGING_FACE: dict[str, dict[str, Any]] = {
    "roberta": {
        "model_type": "roberta",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
    },
    "mt5": {
        "model_type": "mt5",
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
    },
    "m2m_100": {
        "model_type": "m2m_100",
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "max_position_embeddings": 16,
        "pad_token_id": 1,
    },
}

_TIMM = {
    "vit": {"timm_model_name": "small_vit", "timm_pool": "token", "timm_proj": "linear", "timm_drop_path": 0.3},
    "siglip": {"timm_model_name": "small_siglip", "timm_pool": "map", "timm_proj": "none"},
    "convnext": {"timm_model_name": "small_convnext", "timm_pool": "", "timm_proj": "linear", "timm_drop": 0.2},
    "eva": {"timm_model_name": "small_eva", "timm_pool": "token", "timm_proj": None},
    "mobileclip": {"timm_model_name": "small_fastvit", "timm_pool": "avg", "timm_proj": None},
}

OWN_TIMM: dict[str, dict[str, Any]] = {
    "siglip": {"timm_model_name": "small_siglip", "timm_pool": "map", "timm_proj": "none"},
    "siglip i18n": {"timm_model_name": "small_siglip_tanh", "timm_pool": "map", "timm_proj": "none"},
    "clip": {"timm_model_name": "small_clip", "timm_pool": "token", "timm_proj": None},
    "pe": {"timm_model_name": "small_pe", "timm_pool": "map", "timm_proj": None},
    "pe without class token": {"timm_model_name": "small_pe_gigantic", "timm_pool": "map", "timm_proj": None},
    "eva01": {"timm_model_name": "small_eva01", "timm_pool": "token", "timm_proj": None},
    "eva02": {"timm_model_name": "small_eva", "timm_pool": "token", "timm_proj": None},
    "eva02 enormous": {"timm_model_name": "small_eva_enormous", "timm_pool": "token", "timm_proj": None},
}
"""Image towers of timm that MegaCLIP's own towers compute, by family."""

WITH_BATCH_NORM = ("resnet", "mobileclip")
FAMILIES = ("open_clip", *_TIMM, "resnet", *(name for name in HUGGING_FACE if name != "bert"))
"""Families with code of their own; BERT's towers differ from RoBERTa's in names only."""
COCA = "coca"
"""A caption decoder reads the tokens of both towers."""
CUT_CONTEXT_LENGTH = 24
"""Context length of captions of several lengths."""
BOTH_RANDOM = "vit with roberta"
"""Both towers draw random numbers."""


@functools.cache
def family(name: str, folder: Path) -> OpenClipConfig:
    """Return the description of a family. folder: where configurations of Hugging Face models are written."""
    import_open_clip()
    description: dict[str, Any] = {"embed_dim": EMBED_DIM, "vision_cfg": _VISION, "text_cfg": _TEXT}
    if name == "open_clip":
        description["vision_cfg"] = {**_VISION, "attentional_pool": True, "attn_pooler_heads": 4}
    elif name == COCA:
        description["vision_cfg"] = {**_VISION, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
        description["vision_cfg"] |= {"attn_pooler_queries": 5}
        description["embed_dim"] = 32
        length = {"context_length": CUT_CONTEXT_LENGTH}
        description["text_cfg"] = {**_TEXT, **length, "embed_cls": True, "output_tokens": True}
        decoder = {key: _TEXT[key] for key in ("vocab_size", "width", "heads", "layers")}
        description |= {"multimodal_cfg": {**decoder, **length}, "custom_text": True}
    elif name == "resnet":
        layers = {"image_size": IMAGE_SIZE, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}
        description["vision_cfg"] = layers
    elif name in _TIMM:
        _register()
        description |= {"vision_cfg": {"image_size": IMAGE_SIZE, **_TIMM[name]}, "custom_text": True}
        if name == "siglip":
            description["embed_dim"] = 32
            description |= {"init_logit_bias": -3.0, "init_logit_scale": 1.0}
    elif name == BOTH_RANDOM:
        vision, text = family("vit", folder), family("roberta", folder)
        return vision.replace(text_cfg=text.text_cfg.model_dump(exclude_unset=True))
    else:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(HUGGING_FACE[name]))
        description["text_cfg"] = {
            "context_length": CONTEXT_LENGTH,
            "hf_model_name": str(path),
            "hf_proj_type": "mlp",
            "hf_pooler_type": "mean_pooler",
        }
    return OpenClipConfig.from_dict(description, name)


def own_description(name: str) -> dict[str, Any]:
    """Return the description of a family of timm's image towers that MegaCLIP's own towers compute."""
    import_open_clip()
    _register()
    siglip = {"no_causal_mask": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    description: dict[str, Any] = {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": {"image_size": IMAGE_SIZE, **OWN_TIMM[name]},
        "text_cfg": _TEXT,
    }
    if name == "siglip":
        text = {**_TEXT, **siglip, "act_kwargs": {"approximate": "tanh"}, "proj_bias": True}
        description |= {"text_cfg": text, "init_logit_bias": -3.0, "init_logit_scale": 1.0}
    elif name == "siglip i18n":
        description |= {"text_cfg": {**_TEXT, **siglip, "proj_type": "none"}}
    return description


@functools.cache
def _register() -> None:
    """Register the small trunks with timm."""
    from timm.layers import LayerNorm
    from timm.models import convnext, eva, fastvit, register_model, vision_transformer

    def small_vit(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"img_size": IMAGE_SIZE, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
        return vision_transformer._create_vision_transformer("small_vit", **{**settings, **kwargs})

    def small_siglip(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"img_size": IMAGE_SIZE, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
        settings |= {"class_token": False, "global_pool": "map"}
        return vision_transformer._create_vision_transformer("small_siglip", **{**settings, **kwargs})

    def small_siglip_tanh(pretrained: bool = False, **kwargs: Any) -> Any:
        return small_siglip(act_layer="gelu_tanh", mlp_ratio=3.7362, **kwargs)

    def small_clip(pretrained: bool = False, **kwargs: Any) -> Any:
        return small_vit(pre_norm=True, init_values=0.3, **kwargs)

    def small_convnext(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
        return convnext._create_convnext("small_convnext", **{**settings, **kwargs})

    def small_eva(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"img_size": IMAGE_SIZE, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
        settings |= {"qkv_fused": False, "mlp_ratio": 2, "swiglu_mlp": True, "scale_mlp": True}
        settings |= {"scale_attn_inner": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
        settings["global_pool"] = kwargs.pop("global_pool", "token")
        return eva._create_eva("small_eva", **{**settings, **kwargs})

    def small_eva01(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"img_size": IMAGE_SIZE, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
        return eva._create_eva("small_eva01", **{**settings, "mlp_ratio": 96 / 32, **kwargs})

    def small_eva_enormous(pretrained: bool = False, **kwargs: Any) -> Any:
        return small_eva01(use_post_norm=True, **kwargs)

    def small_pe(pretrained: bool = False, **kwargs: Any) -> Any:
        settings = {"attn_type": "rope", "use_pre_transformer_norm": True, "use_rot_pos_emb": True}
        settings |= {"ref_feat_shape": (3, 3), "rope_grid_offset": 1.0, "rope_grid_indexing": "xy"}
        settings |= {"attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 4.0}
        settings["norm_layer"] = functools.partial(LayerNorm, eps=1e-5)
        return small_eva01(**{**settings, **kwargs})

    def small_pe_gigantic(pretrained: bool = False, **kwargs: Any) -> Any:
        return small_pe(class_token=False, rope_grid_offset=0.0, **kwargs)

    def small_fastvit(pretrained: bool = False, **kwargs: Any) -> Any:
        settings: dict[str, Any] = {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64), "mlp_ratios": (3, 3, 3, 3)}
        settings |= {"se_downsamples": (False, False, True, True), "lkc_use_act": True}
        settings["pos_embs"] = (None, None, None, functools.partial(fastvit.RepConditionalPosEnc, spatial_shape=(7, 7)))
        settings["token_mixers"] = ("repmixer", "repmixer", "repmixer", "attention")
        return fastvit._create_fastvit("small_fastvit", **{**settings, **kwargs})

    own = (small_siglip_tanh, small_clip, small_eva01, small_eva_enormous, small_pe, small_pe_gigantic)
    for builder in (small_vit, small_siglip, small_convnext, small_eva, small_fastvit, *own):
        register_model(builder)
