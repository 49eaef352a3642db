"""Translate between the configurations of transformers' CLIP-like models and open_clip's model cards.

`read_card` reads a model card, or the config.json and the image processor of a folder that transformers has saved.
`config_of` and `processor_of` return the content of those files for a model card. transformers is not imported: the
defaults of its classes are in `transformers_fields.json`, with the fields that change neither features nor gradients.
Any other field that a file sets, and every value that open_clip's towers lack, is refused by name. On the way out a
model is refused if what `read_card` makes of its config.json differs from it.
"""

import hashlib
import json
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

from megaclip.errors import ConfigError, shortened
from megaclip.models.config import CARD_NAME, ModelConfig, TextConfig, VisionConfig, read_json_object, reason_not_own
from megaclip.models.timm_towers import timm_settings

CONFIG_NAME = "config.json"
PROCESSOR_NAME = "preprocessor_config.json"
ANY_TOKENIZER = "hugging face"
"""text_cfg.hf_tokenizer_name of a model whose tokenizer is in the files beside its card."""
KIND_KEY = "transformers"
"""Key of a model card with the model_type of the folder that it was translated from."""
FIELDS: dict[str, Any] = json.loads((resources.files("megaclip.models") / "transformers_fields.json").read_text())
"""Defaults of transformers' classes, fields that change nothing and fields that must be off; settings of open_clip's
schema that change nothing; names of timm's SigLIP towers; SHA-256 of CLIP's tokens, one per line."""
CLASSES = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}
"""Beginnings of the names of transformers' classes, by model_type."""
_RESAMPLING = {"2": "bilinear", "3": "bicubic"}
"""open_clip's names of Pillow's filters, by their numbers."""
_NAMES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
"""Settings of towers that have one value in open_clip's schema and in config.json: names in both."""
_SIGLIP_IMAGE = {"timm_model_pretrained": False, "timm_pool": "map", "timm_proj": "none"}
_SIGLIP_TEXT = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
"""Settings of SigLIP's towers in open_clip's schema."""
_TANH = {"approximate": "tanh"}
_EXACT = "open_clip's towers lack it"


def card_path(directory: Path) -> Path | None:
    """Return the model card in a directory, or the config.json of a CLIP-like model of transformers, or None."""
    if os.path.isfile(directory / CARD_NAME):  # False if the name is too long
        return directory / CARD_NAME
    path = directory / CONFIG_NAME
    try:
        return path if os.path.isfile(path) and str(read_json_object(path).get("model_type")) in CLASSES else None
    except ConfigError:
        return None


def read_card(path: Any) -> dict[str, Any]:
    """Return the content of a model card, or that of other files translated to it; "model_cfg" has the description.

    path: a model card, a bare model JSON or a config.json, as a `Path` or an entry of `importlib.resources`. Raises
    ConfigError if a file cannot be read, or describes a model or an image processor that open_clip lacks.
    """
    content = read_json_object(path)
    if path.name != CONFIG_NAME or content.keys() & {"model_cfg", "embed_dim"}:
        return content if "model_cfg" in content else {"model_cfg": content}
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        problem = "has no model_type" if kind is None else f"has the model_type {shortened(repr(kind))}"
        problem += f"; expected {', '.join(CLASSES)}, that of transformers' CLIPModel, ..."
        if str(kind).endswith(("_vision_model", "_text_model")):
            problem += "; --pretrained-image and --pretrained-text read a tower alone"
        raise ConfigError(f"{path} {problem}")
    description = _description(content, path)
    if not _has_clip_vocabulary(path.parent, kind, description["text_cfg"]["vocab_size"]):
        description["text_cfg"]["hf_tokenizer_name"] = ANY_TOKENIZER
    preprocess = _preprocessing(path.parent, kind, description["vision_cfg"]["image_size"])
    return {"model_cfg": description, "preprocess_cfg": preprocess, KIND_KEY: kind}


def _description(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return open_clip's description of the model in the content of a config.json."""
    of_kind = FIELDS["defaults"][content["model_type"]]
    top, text, image = (_fields(content, of_kind[name], name, path) for name in ("", "text_config", "vision_config"))
    return _clip(top, text, image, path) if content["model_type"] == "clip" else _siglip(text, image, path)


def _fields(content: dict[str, Any], defaults: dict[str, Any], section: str, path: Path) -> dict[str, Any]:
    """Return the fields of a section of config.json that have defaults, after a check of all its fields."""
    prefix = f"{path}: {section}." if section else f"{path}: "
    given = (content.get(section) or {}) if section else content
    replacement = content.get(f"{section}_dict") if section else None  # of old files
    if not isinstance(given, dict) or not isinstance(replacement, dict | None):
        raise ConfigError(f"{prefix.removesuffix('.')} is not a JSON object")
    if replacement is not None:
        given = {**given, **defaults, **replacement}
    _refuse_unknown(given, defaults.keys() | FIELDS["neutral"], prefix)
    fields = {**defaults, **{name: _side(value) for name, value in given.items() if name in defaults}}
    for name, value in fields.items():
        default = defaults[name]
        kinds = {float: (int, float), type(None): (int, type(None))}.get(type(default), (type(default),))
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise ConfigError(f"{prefix}{name} is {shortened(json.dumps(value))}; expected a value like {default!r}")
        if isinstance(value, int) and not isinstance(value, bool) and value < (0 if default == 0 else 1):
            raise ConfigError(f"{prefix}{name} is {value}; expected a positive number")
    if section:
        _require(prefix, fields, attention_dropout=0, num_channels=3)
        if fields["hidden_size"] % fields["num_attention_heads"]:
            raise ConfigError(
                f"{prefix}hidden_size {fields['hidden_size']} is not a multiple of num_attention_heads "
                f"{fields['num_attention_heads']}"
            )
    return fields


def _refuse_unknown(given: dict[str, Any], known: set[str], prefix: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None and not (name in FIELDS["off"] and not value):
            raise ConfigError(
                f"{prefix}{name} {shortened(json.dumps(value))} is not known, and could change the features; remove it "
                "if the model does not read it"
            )


def _require(prefix: str, fields: dict[str, Any], **only: Any) -> None:
    """Raise ConfigError for a field of which open_clip's towers have one value only."""
    for name, value in only.items():
        if name in fields and fields[name] != value:
            found = shortened(json.dumps(fields[name]))
            raise ConfigError(f"{prefix}{name} {found}: {_EXACT}; only {json.dumps(value)} can be imported")


def _side(value: Any) -> Any:
    """Return the side of a square that a file gives as [n, n] or {"height": n, "width": n}; else the value."""
    sides = list(value.values()) if isinstance(value, dict) and value.keys() == {"height", "width"} else value
    return sides[0] if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1] else value


def _tower(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings of a transformer in open_clip's schema, and "heads"."""
    width, hidden, act = fields["hidden_size"], fields["intermediate_size"], fields["hidden_act"]
    if act not in ("gelu", "quick_gelu", "gelu_pytorch_tanh"):
        raise ConfigError(f"{prefix}hidden_act {act!r}: {_EXACT}; expected gelu, quick_gelu or gelu_pytorch_tanh")
    ratio, epsilon = hidden / width, fields["layer_norm_eps"]
    return {
        **{own: fields[theirs] for own, theirs in _NAMES.items() if theirs in fields},
        "mlp_ratio": ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf),
        **({} if epsilon == 1e-5 else {"norm_kwargs": {"eps": epsilon}}),
        **({"act_kwargs": _TANH} if act == "gelu_pytorch_tanh" else {}),
    }


def _clip(top: dict[str, Any], text: dict[str, Any], image: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return open_clip's description of a CLIPModel."""
    vision_cfg, text_cfg = _tower(image, f"{path}: vision_config."), _tower(text, f"{path}: text_config.")
    is_quick = image["hidden_act"] == "quick_gelu"
    if is_quick != (text["hidden_act"] == "quick_gelu"):
        _require(f"{path}: text_config.", text, hidden_act=image["hidden_act"])
    vision_cfg["head_width"] = vision_cfg["width"] // vision_cfg.pop("heads")
    if (end := text["eos_token_id"]) != 2:  # in old files, with which transformers takes the feature at the highest id
        text_cfg |= {"pool_type": "eos", "eos_id": end}
    return {
        "embed_dim": top["projection_dim"],
        "quick_gelu": is_quick,
        "init_logit_scale": float(top["logit_scale_init_value"]),
        "vision_cfg": vision_cfg,
        "text_cfg": text_cfg,
    }


def _siglip(text: dict[str, Any], image: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return open_clip's description of a SiglipModel, or of a Siglip2Model at the resolution of its positions."""
    prefix, width = f"{path}: vision_config.", image["hidden_size"]
    _require(prefix, image, vision_use_head=True, layer_norm_eps=1e-6)
    if "quick_gelu" in (image["hidden_act"], text["hidden_act"]):
        raise ConfigError(f"{path}: hidden_act 'quick_gelu': {_EXACT} in SigLIP; expected gelu or gelu_pytorch_tanh")
    if (text["projection_size"] or text["hidden_size"]) != width:
        raise ConfigError(f"{path}: the text tower's features do not have the {width} channels of the image tower's")
    if (patches := image.get("num_patches")) is not None:
        _require(prefix, image, num_patches=math.isqrt(patches) ** 2)
        image = {**image, "image_size": math.isqrt(patches) * image["patch_size"]}
    return {
        "embed_dim": width,
        "init_logit_scale": math.log(10),
        "init_logit_bias": -10.0,
        "custom_text": True,
        "vision_cfg": _timm_tower(_tower(image, prefix)),
        "text_cfg": {**_tower(text, f"{path}: text_config."), **_SIGLIP_TEXT},
    }


def _timm_tower(tower: dict[str, Any]) -> dict[str, Any]:
    """Return the `vision_cfg` of a SigLIP tower: that of timm's equal tower, or one with `timm_model_kwargs`."""
    arguments = {
        "img_size": tower["image_size"],
        "patch_size": tower["patch_size"],
        "embed_dim": tower["width"],
        "depth": tower["layers"],
        "num_heads": tower["heads"],
        "mlp_ratio": tower["mlp_ratio"],
        "act_layer": "gelu_tanh" if "act_kwargs" in tower else "gelu",
    }
    shared = {"image_size": tower["image_size"], **_SIGLIP_IMAGE}
    named = [{**shared, "timm_model_name": name} for name in FIELDS["siglip_towers"]]
    described = {**named[0], "timm_model_kwargs": arguments}
    settings = _with_hidden_widths(timm_settings(described))
    return next((one for one in named if _with_hidden_widths(timm_settings(one)) == settings), described)


def _with_hidden_widths(settings: Any) -> Any:
    """Return settings of a tower with the hidden widths of MLPs in place of their ratios, which are rounded."""
    if not isinstance(settings, dict):  # the reason why there are none
        return settings
    ratios = {name: value for name, value in settings.items() if name.endswith("mlp_ratio")}
    return settings | {name: int(settings["width"] * ratio) for name, ratio in ratios.items()}


def _has_clip_vocabulary(directory: Path, kind: str, rows: int) -> bool:
    """Return whether a directory has a tokenizer with CLIP's vocabulary, or none and a CLIP with as many ids."""
    if kind != "clip" or rows != 49408:
        return False
    for name in ("tokenizer.json", "vocab.json"):
        if (directory / name).is_file():
            content = read_json_object(directory / name)
            model = {"vocab": content} if name == "vocab.json" else content.get("model")
            words = model.get("vocab") if isinstance(model, dict) else None
            pairs = words.items() if isinstance(words, dict) else ()
            numbered = {number: word for word, number in pairs if isinstance(number, int)}
            ordered = [str(numbered.get(number)) for number in range(49408 - 2)]
            return hashlib.sha256("\n".join(ordered).encode()).hexdigest() == FIELDS["clip_vocabulary"]
    return not (directory / "tokenizer_config.json").is_file()


def _preprocessing(directory: Path, kind: str, image_size: int) -> dict[str, Any]:
    """Return open_clip's preprocessing for the image processor in a directory, else for its class's defaults."""
    path, given = directory / PROCESSOR_NAME, {}
    if path.is_file():
        given = read_json_object(path)
    elif (directory / "processor_config.json").is_file():
        path = directory / "processor_config.json"
        given = read_json_object(path).get("image_processor") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: image_processor is not a JSON object")
    if "max_num_patches" in given or "Siglip2" in str(given.get("image_processor_type")):
        raise ConfigError(
            f"{path} keeps the aspect ratio of images (NaFlex), so that they have several shapes, and the loader makes "
            "one shape; use a model of a fixed resolution"
        )
    defaults = FIELDS["processors"]["clip" if kind == "clip" else "siglip"]
    _refuse_unknown(given, defaults.keys() | FIELDS["neutral_of_processors"], f"{path}: ")
    square = {"height": image_size, "width": image_size}
    sizes = {"size": {"shortest_edge": image_size}, "crop_size": square} if kind == "clip" else {"size": square}
    used = {**defaults, **(given or sizes)}
    size, crop = _side(used["size"]), _side(used["crop_size"])
    _require(f"{path}: ", used, do_resize=True, do_rescale=True)
    if not isinstance(used["rescale_factor"], float) or abs(used["rescale_factor"] - 1 / 255) > 1e-9:
        _require(f"{path}: ", used, rescale_factor=1 / 255)
    if str(used["resample"]) not in _RESAMPLING:
        raise ConfigError(f"{path}: resample {used['resample']!r}; expected 2 (bilinear) or 3 (bicubic)")
    squash = isinstance(size, int) and isinstance(used["size"], dict)
    cropped = crop if used["do_center_crop"] else (image_size if squash else None)
    if size not in (image_size, {"shortest_edge": image_size}) or cropped != image_size:
        raise ConfigError(
            f"{path}: size {json.dumps(used['size'])} with the crop {json.dumps(crop)} does not give the model's "
            f"{image_size} x {image_size} pixels in one step; expected both to be {image_size}"
        )
    mean, std = (used["image_mean"], used["image_std"]) if used["do_normalize"] else ([0.0] * 3, [1.0] * 3)
    for name, value in {"image_mean": mean, "image_std": std}.items():
        if not _has_three_numbers(value):
            raise ConfigError(f"{path}: {name} is {shortened(json.dumps(value))}; expected three numbers")
    return {
        "size": image_size,
        "mode": "RGB",
        "mean": mean,
        "std": std,
        "interpolation": _RESAMPLING[str(used["resample"])],
        "resize_mode": "squash" if squash else "shortest",
    }


def _has_three_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(type(one) in (int, float) for one in value)


def config_of(description: dict[str, Any], kind: str | None = None) -> dict[str, Any]:
    """Return the config.json of transformers' model that computes the same features as open_clip's `description`.

    kind: "siglip2" for a Siglip2Model instead of a SiglipModel. Raises ConfigError, which names the setting, if
    transformers has no such model.
    """
    if (name := description["vision_cfg"].get("timm_model_name")) not in (None, *FIELDS["siglip_towers"]):
        raise _inexpressible(f"vision_cfg.timm_model_name {name}")
    if (foreign := reason_not_own(description)) is not None:
        raise _inexpressible(foreign)
    model = ModelConfig.from_dict(description)
    vision, text, width = model.vision_cfg, model.text_cfg, model.embed_dim
    kind = "clip" if name is None else "siglip2" if kind == "siglip2" else "siglip"  # a card may have any value
    if (model.init_logit_bias is None) != (kind == "clip"):
        raise _inexpressible(f"init_logit_bias {json.dumps(model.init_logit_bias)}")
    config: dict[str, Any] = {
        "architectures": [f"{CLASSES[kind]}Model"],
        "model_type": kind,
        "torch_dtype": "float32",
        "text_config": _section(text, model.quick_gelu) | {"model_type": f"{kind}_text_model"},
        "vision_config": _section(vision, model.quick_gelu and kind == "clip") | {"model_type": f"{kind}_vision_model"},
    }
    if kind == "clip":
        end = text.eos_id if text.pool_type == "eos" else 2
        if end == 2 and text.pool_type == "eos":
            raise _inexpressible("text_cfg.eos_id 2, which CLIPModel reads as the highest id")
        config["text_config"] |= {"eos_token_id": end, "projection_dim": width}
        config["vision_config"] |= {"projection_dim": width}
        config |= {"projection_dim": width, "logit_scale_init_value": model.init_logit_scale}
    else:
        config["text_config"]["projection_size"] = width
    if kind == "siglip2":
        config["vision_config"]["num_patches"] = vision.grid_size**2
        del config["vision_config"]["image_size"]
    again = ModelConfig.from_dict(_description(config, Path(CONFIG_NAME)))
    for section in ("", "vision_cfg", "text_cfg"):
        own, found = getattr(model, section, model), _computed(getattr(again, section, again))
        for key, value in _computed(own).items():
            if value != found[key]:
                given = json.dumps(getattr(own, key), default=str)
                raise _inexpressible(f"{section}.{key} {given}".removeprefix("."))
    return config


def _section(tower: VisionConfig | TextConfig, quick: bool) -> dict[str, Any]:
    """Return the fields of a transformer in config.json."""
    return {
        **{theirs: getattr(tower, own) for own, theirs in _NAMES.items() if hasattr(tower, own)},
        "intermediate_size": int(tower.width * tower.mlp_ratio),
        "hidden_act": "quick_gelu" if quick else "gelu_pytorch_tanh" if tower.gelu == "tanh" else "gelu",
        "layer_norm_eps": tower.norm_eps,
    }


def _computed(part: ModelConfig | VisionConfig | TextConfig) -> dict[str, Any]:
    """Return the settings of a model or tower that change its features, equal ones in one form."""
    free = {*FIELDS["neutral_settings"], *(["eos_id"] if getattr(part, "pool_type", "eos") != "eos" else [])}
    values = {key: getattr(part, key) for key in type(part).model_fields if key not in free and key[:5] != "timm_"}
    if isinstance(part, ModelConfig):
        return values
    return _with_hidden_widths(values | {"norm_kwargs": part.norm_eps, "act_kwargs": part.gelu})


def processor_of(preprocess: dict[str, Any], image_size: int, kind: str) -> dict[str, Any]:
    """Return the preprocessor_config.json of an image processor that gives the pixels of open_clip's preprocessing.

    kind: model_type of the model. Raises ConfigError if transformers has no such preprocessing.
    """
    square, squash = {"height": image_size, "width": image_size}, preprocess["resize_mode"] == "squash"
    resampling = {name: int(number) for number, name in _RESAMPLING.items()}.get(str(preprocess["interpolation"]))
    is_known = resampling is not None and preprocess["resize_mode"] in ("squash", "shortest")
    if not is_known or not all(_has_three_numbers(preprocess[name]) for name in ("mean", "std")):
        raise _inexpressible(f"preprocess_cfg {json.dumps(preprocess)}")
    return {
        "image_processor_type": "CLIPImageProcessor" if kind == "clip" else "SiglipImageProcessor",
        "processor_class": f"{CLASSES[kind].removesuffix('2')}Processor",
        "do_convert_rgb": True,
        **FIELDS["processors"][kind.removesuffix("2")],
        "size": square if squash else {"shortest_edge": image_size},
        "do_center_crop": not squash,
        "crop_size": None if squash else square,
        "resample": resampling,
        "image_mean": list(preprocess["mean"]),
        "image_std": list(preprocess["std"]),
    }


def _inexpressible(setting: str) -> ConfigError:
    return ConfigError(
        f"{shortened(setting)}: transformers' CLIPModel and SiglipModel have no such setting; use --format open_clip"
    )
