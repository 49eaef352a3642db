"""Settings of MegaCLIP's image tower for a vision transformer of timm, which open_clip's `vision_cfg` names.

timm's functions for named models call a constructor with many arguments. `timm_settings` lets timm make that call,
reads the arguments and stops it, so nothing is built. Every argument that is not timm's default must have a counterpart
in `VisionConfig`; a model with any other argument runs on open_clip's modules.

Source: timm 1.0, `vision_transformer.py`, and open_clip 3.3.0, `timm_model.py`.
"""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from megaclip.errors import first_line
from megaclip.open_clip_package import import_open_clip

_READ = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes", "global_pool"} | {
    *("init_values", "class_token", "norm_layer", "act_layer", "pre_norm")
}
"""Arguments of timm's constructors that become settings."""


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
    found = _trunk_settings(str(name), pool)
    if isinstance(found, str):
        return f"timm_model_name {name} with {found}"
    if size not in (found["image_size"], [found["image_size"]] * 2):
        return f"image_size {size} with timm_model_name {name}"
    return {**found, "projection": "none" if projection == "none" else "linear"}


@functools.lru_cache(maxsize=256)
def _trunk_settings(name: str, pool: str) -> dict[str, Any] | str:
    """Return fields of `VisionConfig`, or the first argument that has no counterpart."""
    if ":" in name:
        return "a source outside timm"
    try:
        kind, arguments, defaults = _constructor_call(name, pool)
    except Exception as error:  # timm does not document what it raises; open_clip's modules repeat the error
        return f"{type(error).__name__}: {first_line(error)}"
    if kind != "VisionTransformer":
        return f"class {kind}"
    for argument, value in arguments.items():
        if argument not in _READ and value != defaults[argument]:
            return f"{argument} {getattr(value, '__name__', value)}"
    from timm.layers import LayerNorm, get_act_layer, get_norm_layer

    norm = (get_norm_layer(arguments["norm_layer"]) or LayerNorm)(8)
    activation = (get_act_layer(arguments["act_layer"]) or nn.GELU)()
    gelu = {"GELU": "none", "GELUTanh": "tanh"}.get(type(activation).__name__)
    width, heads, pools = arguments["embed_dim"], arguments["num_heads"], pool == "map"
    sides = [
        (side, side) if isinstance(side, int) else side for side in (arguments["img_size"], arguments["patch_size"])
    ]
    for condition, reason in (
        (not isinstance(norm, nn.LayerNorm), f"norm_layer {type(norm).__name__}"),
        (gelu is None, f"act_layer {type(activation).__name__}"),
        (pools and arguments["class_token"], "a class token and global_pool map"),
        (any(high != wide for high, wide in sides), "images or patches that are not square"),
    ):
        if condition:
            return reason
    return {
        "image_size": sides[0][0],
        "patch_size": sides[1][0],
        "width": width,
        "layers": arguments["depth"],
        "head_width": width // heads,
        "mlp_ratio": float(arguments["mlp_ratio"]),
        "ls_init_value": arguments["init_values"] or None,
        "no_ln_pre": not arguments["pre_norm"],
        "patch_bias": not arguments["pre_norm"],
        "class_token": bool(arguments["class_token"]),
        "pool_heads": heads if pools else 0,
        "norm_kwargs": {"eps": norm.eps},
        "act_kwargs": {"approximate": gelu},
    }


def _constructor_call(name: str, pool: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the class that timm builds for a model, the arguments of its constructor, and their defaults."""
    import_open_clip()
    import timm
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

    with mock.patch.object(VisionTransformer, "__init__", stop_at(VisionTransformer.__init__)), torch.device("meta"):
        try:
            built = timm.create_model(name, pretrained=False, num_classes=0, global_pool=pool)
        except Stop as stopped:
            kind, arguments, defaults = stopped.args
            return kind, arguments, defaults
    return type(built).__name__, {}, {}
