"""Settings of MegaCLIP's image tower for a vision transformer of timm, which open_clip's `vision_cfg` names.

timm's functions for named models call a constructor with many arguments. `timm_settings` lets timm make that call,
reads the arguments and stops it, so nothing is built. Every argument that is not timm's default must have a counterpart
in `VisionConfig`; a model with any other argument runs on open_clip's modules.

Source: timm 1.0, `vision_transformer.py` and `eva.py`, and open_clip 3.3.0, `timm_model.py`.
"""

import functools
import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from megaclip.errors import first_line
from megaclip.open_clip_package import import_torchvision


class TimmArguments(BaseModel):
    """Arguments of timm's function for a vision transformer; those that are None keep the default of its name.

    They are `image_size`, `patch_size`, `width`, `layers`, `heads`, `mlp_ratio` and `act_kwargs` of `VisionConfig`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    img_size: int | None = Field(None, gt=0, le=1 << 14)
    patch_size: int | None = Field(None, gt=0)
    embed_dim: int | None = Field(None, gt=0, le=1 << 17)
    depth: int | None = Field(None, gt=0, le=1000)
    num_heads: int | None = Field(None, gt=0)
    mlp_ratio: float | None = Field(None, gt=0, le=100)
    act_layer: Literal["gelu", "gelu_tanh"] | None = None


_READ = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes", "global_pool"} | {
    *("class_token", "norm_layer")
}
_READ_OF = {
    "VisionTransformer": {"init_values", "act_layer", "pre_norm"},
    "Eva": {
        *("use_pre_transformer_norm", "use_post_norm", "attn_type", "qkv_fused", "attn_pool_num_heads"),
        *("attn_pool_mlp_ratio", "swiglu_mlp", "scale_mlp", "scale_attn_inner", "use_rot_pos_emb", "ref_feat_shape"),
        *("rope_grid_offset", "rope_grid_indexing"),
    },
}
"""Arguments of timm's constructors that become settings, of both classes and of one."""


def timm_settings(vision: dict[str, Any]) -> dict[str, Any] | str:
    """Return fields of `VisionConfig`, or the setting that only open_clip's modules have, such as "timm_pool avg".

    vision: open_clip's `vision_cfg` with `timm_model_name`.
    """
    name, size = vision["timm_model_name"], vision.get("image_size", 224)
    pool, projection = vision.get("timm_pool", "avg"), vision.get("timm_proj", "linear")
    for key, value, known in (("timm_pool", pool, ("map", "token")), ("timm_proj", projection, ("none", None))):
        if value not in known:
            return f"{key} {json.dumps(value, default=str)}"
    if vision.get("timm_drop_path"):
        return f"timm_drop_path {vision['timm_drop_path']}"
    options = vision.get("timm_model_kwargs") or {}
    if not isinstance(options, dict) or not TimmArguments.model_fields.keys() >= options.keys():
        return f"timm_model_kwargs {json.dumps(options, default=str)}"
    found = _trunk_settings(str(name), pool, json.dumps(options, default=str))
    if isinstance(found, str):
        return f"timm_model_name {name} with {found}"
    if size not in (found["image_size"], [found["image_size"]] * 2):
        return f"image_size {size} with timm_model_name {name}"
    return {**found, "projection": "none" if projection == "none" else "linear"}


@functools.lru_cache(maxsize=256)
def _trunk_settings(name: str, pool: str, options: str) -> dict[str, Any] | str:
    """Return fields of `VisionConfig`, or the first argument that has no counterpart.

    options: values of `TimmArguments`, in JSON.
    """
    if ":" in name:
        return "a source outside timm"
    try:
        kind, arguments, defaults = _constructor_call(name, global_pool=pool, **json.loads(options))
    except Exception as error:  # timm does not document what it raises; open_clip's modules repeat the error
        return f"{type(error).__name__}: {first_line(error)}"
    if kind not in _READ_OF:
        return f"class {kind}"
    for argument, value in arguments.items():
        if argument not in _READ | _READ_OF[kind] and value != defaults[argument]:
            return f"{argument} {getattr(value, '__name__', value)}"
    from timm.layers import LayerNorm, get_act_layer, get_norm_layer

    norm = (get_norm_layer(arguments["norm_layer"]) or LayerNorm)(8)
    activation = (get_act_layer(arguments.get("act_layer")) or nn.GELU)()
    gelu = {"GELU": "none", "GELUTanh": "tanh"}.get(type(activation).__name__)
    width, heads, pools = arguments["embed_dim"], arguments["num_heads"], pool == "map"
    pool_heads = (arguments.get("attn_pool_num_heads") or heads) if pools else 0
    sides = [_square(arguments[side]) for side in ("img_size", "patch_size")]
    for condition, reason in (
        (not isinstance(norm, nn.LayerNorm), f"norm_layer {type(norm).__name__}"),
        (gelu is None, f"act_layer {type(activation).__name__}"),
        (kind != "Eva" and pools and arguments["class_token"], "a class token and global_pool map"),
        (not pools and not arguments["class_token"], "global_pool token and no class token"),
        (width % heads > 0 or width % (pool_heads or 1) > 0, f"num_heads {heads} and embed_dim {width}"),
        (None in sides, "images or patches that are not square"),
    ):
        if condition:
            return reason
    blocks = _eva_blocks(arguments) if kind == "Eva" else {"ls_init_value": arguments["init_values"] or None}
    if isinstance(blocks, str):
        return blocks
    normalises_first = arguments["use_pre_transformer_norm" if kind == "Eva" else "pre_norm"]
    return {
        "image_size": sides[0],
        "patch_size": sides[1],
        "width": width,
        "layers": arguments["depth"],
        "head_width": width // heads,
        "mlp_ratio": float(arguments["mlp_ratio"]),
        "no_ln_pre": not normalises_first,
        "patch_bias": not normalises_first,
        "class_token": bool(arguments["class_token"]),
        "pool_heads": pool_heads,
        "pool_mlp_ratio": float(arguments.get("attn_pool_mlp_ratio") or arguments["mlp_ratio"]),
        "norm_kwargs": {"eps": norm.eps},
        "act_kwargs": {"approximate": gelu},
        **blocks,
    }


def _square(size: Any) -> int | None:
    """Return the side of a square; None if it is none."""
    high, wide = (size, size) if isinstance(size, int) else size
    return int(high) if high == wide else None


def _eva_blocks(arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the fields of EVA's blocks, or the first argument that has no counterpart."""
    gated, shape = bool(arguments["swiglu_mlp"]), arguments["ref_feat_shape"]
    reference = None if shape is None else _square(shape)
    together = {"scale_mlp": gated, "scale_attn_inner": gated, "qkv_fused": not gated}
    for argument, expected in together.items():
        if bool(arguments[argument]) != expected:
            return f"{argument} {arguments[argument]} and swiglu_mlp {gated}"
    if gated and (arguments["use_post_norm"] or arguments["attn_type"] != "eva"):
        return "swiglu_mlp and use_post_norm or attn_type"
    if reference is None and shape is not None:
        return f"ref_feat_shape {shape}"
    if arguments["use_rot_pos_emb"] and arguments["embed_dim"] // arguments["num_heads"] % 4:
        return f"rotary embeddings, num_heads {arguments['num_heads']} and embed_dim {arguments['embed_dim']}"
    rotary = {
        "reference": reference,
        "offset": float(arguments["rope_grid_offset"]),
        "columns_first": arguments["rope_grid_indexing"] == "xy",
    }
    return {
        "eva": True,
        "key_bias": arguments["attn_type"] == "rope",
        "gated": gated,
        "norms_behind": bool(arguments["use_post_norm"]),
        "rotary": rotary if arguments["use_rot_pos_emb"] else None,
    }


def _constructor_call(name: str, **options: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the class that timm builds for a model, the arguments of its constructor, and their defaults."""
    import_torchvision()
    import timm
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    class Stop(Exception):
        pass

    def stop_at(constructor: Callable[..., None]) -> Callable[..., None]:
        def stop(self: nn.Module, *values: Any, **options: Any) -> None:
            signature = inspect.signature(constructor)
            bound = signature.bind(self, *values, **options)
            bound.apply_defaults()
            defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
            raise Stop(type(self).__name__, dict(list(bound.arguments.items())[1:]), defaults)

        return stop

    with ExitStack() as patches, torch.device("meta"):
        for kind in (VisionTransformer, Eva):
            patches.enter_context(mock.patch.object(kind, "__init__", stop_at(kind.__init__)))
        try:
            built = timm.create_model(name, pretrained=False, num_classes=0, **options)
        except Stop as stopped:
            found, arguments, defaults = stopped.args
            return found, arguments, defaults
    return type(built).__name__, {}, {}
