"""Descriptions of MegaCLIP's own towers: the supported part of open_clip's model JSON, as typed fields.

Names, meanings and defaults are open_clip's, so open_clip loads the same description and computes the same features.
`reason_not_own` names the feature of open_clip that MegaCLIP's towers do not have. One key is MegaCLIP's own:
`vision_position_init` sets only the starting values of training, and is left out of every exported card.

Fields that pydantic excludes are no keys of a description. Other values than their defaults come from timm's model
(`TimmVisionConfig`).
"""

import abc
import json
import math
from importlib import resources
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)
from typing_extensions import Self

from megaclip.errors import ConfigError, closest, config_error, shortened
from megaclip.models.timm_towers import TimmArguments, timm_settings

CARD_NAME = "open_clip_config.json"

# Upper bounds, far above every published model. A model is built before weights are compared with it, so an untrusted
# card with a billion layers would occupy the program for hours.
_MAX_LAYERS = 1_000
_MAX_WIDTH = 1 << 17
_MAX_RATIO = 100
_MAX_PIXELS = 1 << 14
_MAX_TOKENS = 1 << 16
_MAX_VOCABULARY = 1 << 24

_TOKENIZER_ARGUMENTS = {"clean": str, "language": str, "strip_sep_token": bool}

_BLOCK_VARIANTS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
_OF_BOTH_TOWERS = {**dict.fromkeys(("output_tokens", *_BLOCK_VARIANTS), False), "block_type": None}
# open_clip's other keys, each with the value that turns its feature off. Only that value is accepted.
_NOT_SUPPORTED: dict[str, dict[str, Any]] = {
    "": {"nonscalar_logit_scale": False, "multimodal_cfg": None},
    "vision_cfg": {"attentional_pool": False, "pos_embed_type": "learnable", "timm_model_name": None} | _OF_BOTH_TOWERS,
    "text_cfg": {"embed_cls": False, "final_ln_after_pool": False, "hf_model_name": None} | _OF_BOTH_TOWERS,
}
_KNOWN_ARGUMENTS = {"norm_kwargs": {"eps"}, "act_kwargs": {"approximate"}}


def _side(size: Any) -> Any:
    """Return the side of a square that open_clip's schema describes as [height, width]; anything else unchanged."""
    if not isinstance(size, list | tuple):
        return size
    if len(size) != 2 or size[0] != size[1]:
        raise ValueError("only a square is supported, n or [n, n]")
    return size[0]


def _known_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of open_clip's tokenizer, which passes others on to transformers, where some load code."""
    for name, value in given.items():
        if not isinstance(value, _TOKENIZER_ARGUMENTS.get(name, ())):
            known = ", ".join(_TOKENIZER_ARGUMENTS)
            raise ValueError(f"{shortened(f'{name} {value!r}')} is refused; only {known} load no code or files")
    return given


_Side = Annotated[int, BeforeValidator(_side)]
_TokenizerArguments = Annotated[dict[str, Any], AfterValidator(_known_arguments)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __hash__(self) -> int:  # pydantic's own refuses fields with dictionaries
        return hash(self.model_dump_json())

    @classmethod
    def _validated(cls, given: dict[str, Any], prefix: str) -> Self:
        """Return the typed section. Raises ConfigError, with `prefix` before the key, for a value that is not valid."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise config_error(error, lambda key: f"{prefix}{key}") from None


class DescribedVision(_Section):
    """Settings of any image tower."""

    image_size: _Side = Field(224, gt=0, le=_MAX_PIXELS)
    """Height and width of the square input, in pixels."""
    patch_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of patches left out of every training image."""


class DescribedText(_Section):
    """Settings of any text tower and its tokenizer."""

    context_length: int = Field(77, gt=0, le=_MAX_TOKENS)
    """Number of tokens per caption, after truncation and padding."""
    vocab_size: int = Field(49408, gt=0, le=_MAX_VOCABULARY)
    """Number of embeddings, at least one per token id. Hugging Face models have their own, `DualEncoder.vocab_size`."""
    hf_tokenizer_name: str | None = None
    """Hugging Face name or path of the tokenizer; None: CLIP's own tokenizer."""
    tokenizer_mode: str | None = None
    """open_clip's tokenizer mode."""
    tokenizer_kwargs: _TokenizerArguments | None = None
    """Arguments of open_clip's tokenizer: clean, language, strip_sep_token."""
    pad_id: int = Field(0, ge=0)
    """Id of the padding token."""
    eos_id: int = Field(2, ge=0)
    """Id of the tokenizer's end-of-text token. With pool_type "eos", the feature is taken at this token."""
    no_causal_mask: bool = False
    """True: every token attends to all tokens of the caption, else to itself and those before it."""


class Description(_Section, abc.ABC):
    """Description of any dual encoder: what `ModelConfig` and `OpenClipConfig` have in common."""

    embed_dim: int = Field(gt=0, le=_MAX_WIDTH)
    """Number of channels D of the shared embedding."""
    quick_gelu: bool = False
    """True: the activation is x * sigmoid(1.702 x) instead of GELU. OpenAI's weights require it."""
    init_logit_scale: float = math.log(1 / 0.07)
    """Initial value of the natural logarithm of the logit scale."""
    init_logit_bias: float | None = None
    """Initial value of the bias that the sigmoid loss adds to its logits (SigLIP: -10); None: no bias."""
    custom_text: bool = False
    """True: exported weights have the text tower's names under `text.`. The model itself is the same."""

    @property
    def has_decoder(self) -> bool:
        """True if the model has a caption decoder, which reads the tokens of both towers (CoCa)."""
        return False

    @classmethod
    @abc.abstractmethod
    def from_dict(cls, description: dict[str, Any], source: str = "model config") -> Self:
        """Check `description` (open_clip's schema) and return it typed.

        source: name of the description for error messages. Raises ConfigError if a key is unknown or not supported, or
        a value is not valid.
        """

    def replace(
        self, *, vision_cfg: dict[str, Any] | None = None, text_cfg: dict[str, Any] | None = None, **top: Any
    ) -> Self:
        """Return a checked copy with some keys changed, such as `replace(text_cfg={"vocab_size": 512})`."""
        description = self.model_dump(exclude_unset=True)
        description["vision_cfg"].update(vision_cfg or {})
        description["text_cfg"].update(text_cfg or {})
        return self.from_dict({**description, **top})


class NormArguments(_Section):
    """Arguments of the layer norms."""

    eps: float = Field(1e-5, gt=0)
    """Number that is added to the variance."""


class ActivationArguments(_Section):
    """Arguments of GELU."""

    approximate: Literal["none", "tanh"] = "none"
    """"tanh": GELU is approximated by a hyperbolic tangent."""


class Rotary(_Section):
    """Rotary position embeddings of patches (`megaclip.models.rotary`)."""

    reference: int | None
    """Coordinates are scaled to a grid of this number of patches per side; None: they are not scaled."""
    offset: float
    """Coordinate of the first patch."""
    columns_first: bool
    """True: the first half of the channels turns with the column, else with the row."""


class _Blocks(_Section):
    """Settings that the transformer blocks of both towers have."""

    layers: int = Field(12, gt=0, le=_MAX_LAYERS)
    """Number of transformer blocks."""
    mlp_ratio: float = Field(4.0, gt=0, le=_MAX_RATIO)
    """Ratio of the MLP's hidden width to `width`; the hidden width is int(width * mlp_ratio)."""
    ls_init_value: float | None = None
    """Initial value of LayerScale; None: the blocks have no LayerScale."""
    norm_kwargs: NormArguments | None = None
    """Arguments of the tower's layer norms; None: the defaults."""
    act_kwargs: ActivationArguments | None = None
    """Arguments of the tower's GELU; None: the defaults."""
    key_bias: bool = Field(True, exclude=True)
    """False: the projections of keys have no bias."""
    gated: bool = Field(False, exclude=True)
    """True: the MLP is a SwiGLU, and layer norms precede the last projections of attention and MLP (EVA-02)."""
    norms_behind: bool = Field(False, exclude=True)
    """True: layer norms follow attention and MLP instead of preceding them."""

    @property
    def norm_eps(self) -> float:
        """Number that layer norms add to the variance."""
        return 1e-5 if self.norm_kwargs is None else self.norm_kwargs.eps

    @property
    def gelu(self) -> str:
        """Approximation of GELU, "none" or "tanh"."""
        return "none" if self.act_kwargs is None else self.act_kwargs.approximate


Projection = Literal["matrix", "linear", "none"]
"""Projection to the embedding: a product with a (C, D) parameter, a linear layer with a bias, or none."""


class VisionConfig(_Blocks, DescribedVision):
    """The image tower: a pre-norm vision transformer (open_clip's `vision_cfg`)."""

    patch_size: _Side = Field(16, gt=0)
    """Height and width of one patch, in pixels."""
    width: int = Field(768, gt=0, le=_MAX_WIDTH)
    """Number of channels C of every token."""
    head_width: int = Field(64, gt=0)
    """Number of channels per attention head; the number of heads is width / head_width."""
    no_ln_pre: bool = False
    """True: no layer norm before the first block."""
    pool_type: Literal["tok", "avg"] = "tok"
    """Feature of the image: the class token ("tok"), or the mean of the patches ("avg")."""
    final_ln_after_pool: bool = False
    """True: with pool_type "avg", the final layer norm follows the mean instead of preceding it."""
    class_token: bool = Field(True, exclude=True)
    """True: a class token precedes the patches."""
    patch_bias: bool = Field(False, exclude=True)
    """True: the embedding of the patches has a bias."""
    pool_heads: int = Field(0, exclude=True)
    """Heads of the attention pooling that replaces `pool_type`; 0: none."""
    pool_mlp_ratio: float = Field(4.0, exclude=True)
    """`mlp_ratio` of the attention pooling."""
    rotary: Rotary | None = Field(None, exclude=True)
    """Rotary position embeddings, besides the learnt ones; None: none."""
    eva: bool = Field(False, exclude=True)
    """True: the initial values are those of timm's class `Eva`."""
    projection: Projection = Field("matrix", exclude=True)
    """Projection to the embedding."""

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_width

    @property
    def grid_size(self) -> int:
        """Number of patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.grid_size**2 + self.class_token

    @property
    def has_head(self) -> bool:
        """True if parameters follow the last block and its norm."""
        return self.pool_heads > 0 or self.projection != "none"


class TimmVisionConfig(VisionConfig):
    """The image tower: a vision transformer of timm that MegaCLIP's own tower computes.

    All fields of `VisionConfig` except image size and patch dropout are those of the timm model, whatever the
    description has. Dumps hold the description's keys only.
    """

    timm_model_name: str
    """Name of the model in timm."""
    timm_model_pretrained: bool = False
    """Ignored: nothing is downloaded."""
    timm_pool: Literal["map", "token"] = "token"
    """Feature of the image: attention pooling ("map"), or the class token."""
    timm_proj: Literal["none"] | None = None
    """Projection to the embedding: "none", or None for the model's classifier."""
    timm_model_kwargs: TimmArguments | None = None
    """Arguments of timm's function. open_clip 3.3 cannot read them."""
    timm_proj_bias: bool = False
    """Ignored: a classifier always has a bias."""
    timm_drop: float = 0.0
    """Ignored: it applies to projections behind the model."""
    timm_drop_path: float | None = None
    """Stochastic depth; only 0 is supported."""

    @model_validator(mode="before")
    @classmethod
    def _read_timm(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "timm_model_name" not in given:
            return given
        settings = timm_settings(given)
        assert isinstance(settings, dict), f"reason_not_own has accepted {settings}"
        return {**given, **settings}

    @model_serializer(mode="wrap")
    def _only_keys_of_the_description(self, dump: Any) -> dict[str, Any]:
        keys = DescribedVision.model_fields.keys() | {name for name in type(self).model_fields if name[:5] == "timm_"}
        # null is not open_clip's default, and must stay in dumps without nulls
        return {name: value for name, value in dump(self).items() if name in keys} | {"timm_proj": self.timm_proj}


class TextConfig(_Blocks, DescribedText):
    """The text tower and its tokenizer (open_clip's `text_cfg`)."""

    width: int = Field(512, gt=0, le=_MAX_WIDTH)
    """Number of channels C of every token."""
    heads: int = Field(8, gt=0)
    """Number of attention heads."""
    pool_type: Literal["argmax", "eos", "last", "first"] = "argmax"
    """Position of the caption's feature. "argmax" (the highest id) is correct only for CLIP's own vocabulary."""
    proj_type: Literal["linear", "none"] = "linear"
    """"none": the tower's last layer norm returns the embedding."""
    proj_bias: bool = False
    """True: the projection to the embedding has a bias."""

    @property
    def projection(self) -> Projection:
        """Projection to the embedding."""
        return "none" if self.proj_type == "none" else "linear" if self.proj_bias else "matrix"

    @property
    def has_head(self) -> bool:
        """True if parameters follow the last block and its norm."""
        return self.projection != "none"


class ModelConfig(Description):
    """A dual encoder; `vision_cfg` and `text_cfg` as in open_clip's JSON."""

    vision_cfg: TimmVisionConfig | VisionConfig
    """Image tower."""
    text_cfg: TextConfig
    """Text tower and tokenizer."""
    vision_position_init: Literal["normal", "sin_cos_2d"] = "normal"
    """Starting values of the image tower's learnable position embeddings. MegaCLIP's own key; never exported."""

    @classmethod
    def from_dict(cls, description: dict[str, Any], source: str = "model config") -> Self:
        """Check `description` and return it typed, as `Description` documents it."""
        if not isinstance(description, dict):
            kind = type(description).__name__
            raise ConfigError(f"{source}: the model description is a {kind}, expected a JSON object")
        if (foreign := reason_not_own(description)) is not None:
            raise ConfigError(
                f"{source}: {foreign} is an open_clip feature, which MegaCLIP's own towers lack; set megaclip.towers "
                'to "auto" or "open_clip", which run open_clip\'s modules'
            )
        cleaned = _known_keys(cls, description, "", source)
        for name in ("vision_cfg", "text_cfg"):
            if isinstance(given := cleaned.get(name), dict):
                image: type[VisionConfig] = TimmVisionConfig if given.get("timm_model_name") else VisionConfig
                section = image if name == "vision_cfg" else TextConfig
                cleaned[name] = section._validated(_known_keys(section, given, name, source), f"{source}: {name}.")
        config = cls._validated(cleaned, f"{source}: ")
        if (problem := _contradiction(config)) is not None:
            raise ConfigError(f"{source}: {problem}")
        return config

    def to_open_clip(self) -> dict[str, Any]:
        """Return the `model_cfg` of an exported card: every key that open_clip requires, and no other key."""
        return self.model_dump(exclude_none=True, exclude={"vision_position_init"})


def reason_not_own(description: dict[str, Any]) -> str | None:
    """Return the setting of `description` that only open_clip's towers have, such as "vision_cfg.timm_model_name ..."

    None: MegaCLIP's own towers have all settings, or the description is not valid.
    """
    for name in _NOT_SUPPORTED:
        section = description.get(name) if name else description
        if not isinstance(section, dict):
            continue
        for key, off in _NOT_SUPPORTED[name].items():
            if key in section and section[key] != off and key != "timm_model_name":
                return f"{name}.{key}".lstrip(".") + " " + shortened(json.dumps(section[key], default=str))
        for key, known in _KNOWN_ARGUMENTS.items() if name else ():
            if (given := section.get(key)) and (not isinstance(given, dict) or not known >= given.keys()):
                return f"{name}.{key} {shortened(json.dumps(given, default=str))}"
    vision = description.get("vision_cfg")
    if isinstance(vision, dict) and vision.get("timm_model_name"):
        settings = timm_settings(vision)
        return f"vision_cfg.{settings}" if isinstance(settings, str) else None
    if isinstance(vision, dict) and isinstance(vision.get("layers"), list):
        return f"vision_cfg.layers {vision['layers']} (a ResNet)"
    return None


def list_models() -> list[str]:
    """Return the names of the presets."""
    return sorted(entry.name.removesuffix(".json") for entry in presets().iterdir() if entry.name.endswith(".json"))


def read_json_object(path: Any) -> dict[str, Any]:
    """Return the JSON object in a file. path: a `Path`, or an entry of `importlib.resources`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}, expected a JSON object")
    return content


def presets() -> Any:
    """Return the folder of the presets."""
    return resources.files("megaclip.models") / "presets"


def _known_keys(section: type[BaseModel], given: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return `given` without the keys of features that are turned off; raise ConfigError for unknown keys."""
    known = {}
    prefix = f"{name}." if name else ""
    fields = {key for key, field in section.model_fields.items() if not field.exclude}
    for key, value in given.items():
        if key in fields:
            known[key] = value
        elif key not in _NOT_SUPPORTED[name] and not _belongs_to_unused_feature(key, given):
            raise unknown_key(source, prefix, key, fields)
    return known


def unknown_key(source: str, prefix: str, key: Any, known: set[str]) -> ConfigError:
    """Return the error for a key that is not one of `known`. prefix: "vision_cfg." or the like."""
    nearest = closest(str(key), known, cutoff=0.0)
    return ConfigError(f"{source}: unknown key {prefix}{key}; the nearest valid key is {prefix}{nearest}")


def _belongs_to_unused_feature(key: str, given: dict[str, Any]) -> bool:
    """Return True for a setting of a feature that `given` turns off. open_clip ignores such settings."""
    switches = {"timm_": "timm_model_name", "hf_": "hf_model_name", "attn_pooler_": "attentional_pool"}
    return any(str(key).startswith(prefix) and switch in given for prefix, switch in switches.items())


def _contradiction(config: ModelConfig) -> str | None:
    """Return the first problem of settings that are valid one by one, or None."""
    vision, text = config.vision_cfg, config.text_cfg
    name = text.hf_tokenizer_name or ""
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts or not name.isprintable():
        return (
            f"text_cfg.hf_tokenizer_name {shortened(repr(name))} is a path to another folder; expected a name of "
            "Hugging Face's hub, and the tokenizer's files beside the card"
        )
    if vision.width % vision.head_width:
        return f"vision_cfg.width {vision.width} must be a multiple of vision_cfg.head_width {vision.head_width}"
    if text.width % text.heads:
        return f"text_cfg.width {text.width} must be a multiple of text_cfg.heads {text.heads}"
    if vision.patch_size > (size := vision.image_size):
        return f"vision_cfg.patch_size {vision.patch_size} must not be larger than vision_cfg.image_size {size}"
    for section, tower in (("vision_cfg", vision), ("text_cfg", text)):
        if tower.projection == "none" and tower.width != config.embed_dim:
            return (
                f"embed_dim {config.embed_dim}: the tower of {section} returns {tower.width} numbers per sample and "
                f"has no projection; set embed_dim to {tower.width}, or give the tower a projection"
            )
    if text.pool_type == "eos" and text.eos_id >= text.vocab_size:
        return f"text_cfg.eos_id {text.eos_id} must be smaller than text_cfg.vocab_size {text.vocab_size}"
    if config.vision_position_init == "sin_cos_2d" and vision.width % 4:
        return f"vision_cfg.width {vision.width} must be a multiple of 4 with vision_position_init 'sin_cos_2d'"
    return None
