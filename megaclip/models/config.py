"""What a model is: the typed form of open_clip's model JSON, read from a preset, a file or a model card.

`load_model_config("ViT-B-32")` reads `presets/ViT-B-32.json`; a path reads that JSON instead, either the bare model
description or a model card (`open_clip_config.json`, where the description is under "model_cfg"). Names, meanings and
defaults are open_clip's, so a description that loads here loads there and gives the same features. What open_clip can
do and MegaCLIP cannot is refused by name. The one key that is ours, `vision_position_init`, only says how training
starts and is left out of every exported card.
"""

import difflib
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megaclip.errors import ConfigError

CARD_NAME = "open_clip_config.json"

# open_clip's other keys, with the value that means "not used": that value is accepted, any other is refused.
_NOT_SUPPORTED: dict[str, dict[str, Any]] = {
    "": {"nonscalar_logit_scale": False, "multimodal_cfg": None},
    "vision_cfg": {
        "attentional_pool": False,
        "pos_embed_type": "learnable",
        "output_tokens": False,
        "act_kwargs": None,
        "norm_kwargs": None,
        "timm_model_name": None,
    },
    "text_cfg": {
        "embed_cls": False,
        "proj_bias": False,
        "proj_type": "linear",
        "output_tokens": False,
        "act_kwargs": None,
        "norm_kwargs": None,
        "hf_model_name": None,
    },
}
_BLOCK_VARIANTS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
for _section in ("vision_cfg", "text_cfg"):
    _NOT_SUPPORTED[_section].update(dict.fromkeys(_BLOCK_VARIANTS, False), block_type=None)

_HINTS = {"pos_embed_type": '; for sine-cosine starting values set "vision_position_init": "sin_cos_2d"'}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class VisionConfig(_Section):
    """The image tower: a pre-norm vision transformer (open_clip's `vision_cfg`)."""

    image_size: int = Field(224, gt=0)
    """Height and width of the square input, in pixels."""
    patch_size: int = Field(16, gt=0)
    """Height and width of one patch, in pixels."""
    layers: int = Field(12, gt=0)
    width: int = Field(768, gt=0)
    head_width: int = Field(64, gt=0)
    """Channels per attention head; the number of heads is width / head_width."""
    mlp_ratio: float = Field(4.0, gt=0)
    """Hidden width of the MLP is int(width * mlp_ratio)."""
    ls_init_value: float | None = None
    """Initial LayerScale; None: no LayerScale."""
    patch_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of patches left out of every training image."""
    no_ln_pre: bool = False
    pool_type: Literal["tok", "avg"] = "tok"
    """The class token, or the mean of the patches."""
    final_ln_after_pool: bool = False

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_width

    @property
    def grid_size(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size


class TextConfig(_Section):
    """The text tower and the tokenizer that belongs to it (open_clip's `text_cfg`)."""

    context_length: int = Field(77, gt=0)
    vocab_size: int = Field(49408, gt=0)
    hf_tokenizer_name: str | None = None
    tokenizer_mode: str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None
    width: int = Field(512, gt=0)
    heads: int = Field(8, gt=0)
    layers: int = Field(12, gt=0)
    mlp_ratio: float = Field(4.0, gt=0)
    ls_init_value: float | None = None
    pad_id: int = Field(0, ge=0)
    eos_id: int = Field(2, ge=0)
    """The token whose feature is taken when pool_type is "eos"; must be the tokenizer's end-of-text id."""
    no_causal_mask: bool = False
    pool_type: Literal["argmax", "eos", "last", "first"] = "argmax"
    """Which position is the text's feature; "argmax" (the highest id) is right only for CLIP's own vocabulary."""


class ModelConfig(_Section):
    """A dual encoder; `vision_cfg` and `text_cfg` as in open_clip's JSON."""

    embed_dim: int = Field(gt=0)
    """Width D of the shared embedding."""
    vision_cfg: VisionConfig
    text_cfg: TextConfig
    quick_gelu: bool = False
    """x * sigmoid(1.702 x) instead of GELU: OpenAI's weights need it."""
    init_logit_scale: float = math.log(1 / 0.07)
    """Initial natural logarithm of the logit scale."""
    init_logit_bias: float | None = None
    """Initial value of the bias that the sigmoid loss adds to its logits (SigLIP: -10); None: the model has none."""
    custom_text: bool = False
    """open_clip keeps the text tower under `text.`; changes the names in exported weights, not the model."""
    vision_position_init: Literal["normal", "sin_cos_2d"] = "normal"
    """Starting values of the image tower's learnable position embeddings. Ours; never exported."""

    @classmethod
    def from_dict(cls, description: dict[str, Any], source: str = "model config") -> "ModelConfig":
        """Check `description` (open_clip's schema) and return it typed.

        Raises:
            ConfigError: a key is unknown or not supported, or a value is wrong; names the key and `source`.
        """
        if not isinstance(description, dict):
            raise ConfigError(f"{source}: expected a JSON object, got {type(description).__name__}.")
        cleaned = _known_keys(cls, description, "", source)
        for name, section in (("vision_cfg", VisionConfig), ("text_cfg", TextConfig)):
            if isinstance(cleaned.get(name), dict):
                cleaned[name] = _known_keys(section, cleaned[name], name, source)
        try:
            config = cls.model_validate(cleaned)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{source}: {key}: {first['msg']} (got {_shown(first['input'])}).") from None
        _check_consistent(config, source)
        return config

    def replace(
        self, *, vision_cfg: dict[str, Any] | None = None, text_cfg: dict[str, Any] | None = None, **top: Any
    ) -> "ModelConfig":
        """A checked copy with some keys changed, for example `replace(text_cfg={"vocab_size": 512, "eos_id": 2})`."""
        description = self.model_dump()
        description["vision_cfg"].update(vision_cfg or {})
        description["text_cfg"].update(text_cfg or {})
        return ModelConfig.from_dict({**description, **top})

    def to_open_clip(self) -> dict[str, Any]:
        """The `model_cfg` of an exported card: every key open_clip needs and none it does not know."""
        return self.model_dump(exclude_none=True, exclude={"vision_position_init"})


def list_models() -> list[str]:
    """Names of the presets."""
    return sorted(entry.name[: -len(".json")] for entry in _presets().iterdir() if entry.name.endswith(".json"))


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """Read a preset by name, or a model JSON, model card or exported directory by path.

    Raises:
        ConfigError: there is no such preset or file, it is not JSON, or it describes a model MegaCLIP does not build.
    """
    name = str(name_or_path)
    if name in list_models():
        text = (_presets() / f"{name}.json").read_text(encoding="utf-8")
    else:
        text = _read_description(name)
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from None
    if isinstance(description, dict) and "model_cfg" in description:
        description = description["model_cfg"]
    return ModelConfig.from_dict(description, source=name)


def _presets() -> Any:
    return resources.files("megaclip.models") / "presets"


def _read_description(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        path = path / CARD_NAME
    if not path.is_file():
        nearest = difflib.get_close_matches(name, list_models(), n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown model {name!r}: neither a file nor a preset; the nearest preset is {nearest!r} "
            f"(all: {', '.join(list_models())})."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None


def _known_keys(section: type[BaseModel], given: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """`given` without keys that switch an unsupported feature off; raises for any other key the section lacks."""
    known = {}
    prefix = f"{name}." if name else ""
    for key, value in given.items():
        if key in section.model_fields:
            known[key] = value
        elif key in _NOT_SUPPORTED[name]:
            if value != _NOT_SUPPORTED[name][key]:
                raise ConfigError(
                    f"{source}: {prefix}{key} = {_shown(value)} is an open_clip feature that MegaCLIP does not have"
                    f"{_HINTS.get(key, '')}."
                )
        elif not _is_inert(key, given):
            nearest = difflib.get_close_matches(str(key), list(section.model_fields), n=1, cutoff=0.0)[0]
            raise ConfigError(f"{source}: unknown key {prefix}{key}; the nearest valid key is {prefix}{nearest}.")
    return known


def _is_inert(key: str, given: dict[str, Any]) -> bool:
    """open_clip ignores the details of a feature whose switch is off."""
    switches = {"timm_": "timm_model_name", "hf_": "hf_model_name", "attn_pooler_": "attentional_pool"}
    return any(str(key).startswith(prefix) and switch in given for prefix, switch in switches.items())


def _check_consistent(config: ModelConfig, source: str) -> None:
    vision, text = config.vision_cfg, config.text_cfg
    if vision.width % vision.head_width:
        raise ConfigError(
            f"{source}: vision_cfg.width {vision.width} must be a multiple of head_width {vision.head_width}."
        )
    if text.width % text.heads:
        raise ConfigError(f"{source}: text_cfg.width {text.width} must be a multiple of text_cfg.heads {text.heads}.")
    if vision.patch_size > vision.image_size:
        raise ConfigError(
            f"{source}: vision_cfg.patch_size {vision.patch_size} is larger than image_size {vision.image_size}."
        )
    if text.pool_type == "eos" and text.eos_id >= text.vocab_size:
        raise ConfigError(f"{source}: text_cfg.eos_id {text.eos_id} is outside text_cfg.vocab_size {text.vocab_size}.")
    if config.vision_position_init == "sin_cos_2d" and vision.width % 4:
        raise ConfigError(f"{source}: sin_cos_2d needs vision_cfg.width divisible by 4, got {vision.width}.")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
