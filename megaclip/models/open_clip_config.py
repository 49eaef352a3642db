"""Descriptions of open_clip's towers: open_clip's model JSON, with the settings that MegaCLIP reads typed.

All other settings are kept as they are and passed to open_clip, which has the meaning and the default of each. Models
that the loss or the engine cannot use are refused by name (`reason_refused`).
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import Self

from megaclip.errors import ConfigError
from megaclip.models.config import DescribedText, DescribedVision, Description, unknown_key
from megaclip.models.timm_towers import TimmArguments
from megaclip.open_clip_package import import_open_clip


class OpenClipVision(DescribedVision):
    """The image tower (open_clip's `vision_cfg`)."""

    model_config = ConfigDict(extra="allow")

    timm_model_kwargs: TimmArguments | None = None
    """Arguments of timm's function beside `timm_model_name`. open_clip 3.3 cannot read them."""


class OpenClipText(DescribedText):
    """The text tower and its tokenizer (open_clip's `text_cfg`)."""

    model_config = ConfigDict(extra="allow")

    hf_model_name: str | None = None
    """Hugging Face name or path of the text model; None: open_clip's text transformer."""
    embed_cls: bool = False
    """True: open_clip's text transformer has a class token behind the caption's tokens."""
    pool_type: str = "argmax"
    """Position of the caption's feature in open_clip's text transformer."""


class OpenClipConfig(Description):
    """A dual encoder of open_clip."""

    model_config = ConfigDict(extra="allow")

    vision_cfg: OpenClipVision
    """Image tower."""
    text_cfg: OpenClipText
    """Text tower and tokenizer."""
    multimodal_cfg: dict[str, Any] | None = None
    """Caption decoder (CoCa); None: the model has none."""
    nonscalar_logit_scale: bool = False
    """True: exported scalars have shape (1,) instead of ()."""

    @classmethod
    def from_dict(cls, description: dict[str, Any], source: str = "model config") -> Self:
        """Check `description` and return it typed, as `Description` documents it.

        Raises ConfigError also if the model is refused, CheckpointError if open_clip is not installed.
        """
        if (reason := reason_refused(description)) is not None:
            raise ConfigError(f"{source}: {reason}; choose another model (`megaclip show models` lists them)")
        _check_keys(description, source)
        config = cls._validated(description, f"{source}: ")
        if (problem := _contradiction(config)) is not None:
            raise ConfigError(f"{source}: {problem}")
        return config

    def to_open_clip(self) -> dict[str, Any]:
        """Return the `model_cfg` of an exported card: the settings of the description.

        Some settings that are null are left out. At the top level null turns a setting off, and open_clip takes the key
        `multimodal_cfg` alone for a CoCa. open_clip's `get_tokenizer` accepts no null `tokenizer_kwargs`. Others stay:
        `timm_proj` null is not its default.
        """
        settings = {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}
        for name in ("hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs"):
            if settings["text_cfg"].get(name) is None:
                settings["text_cfg"].pop(name, None)
        return settings

    @property
    def has_decoder(self) -> bool:
        return self.multimodal_cfg is not None

    @property
    def has_text_prefix(self) -> bool:
        """True if open_clip's parameter names have the text tower under `text.`."""
        return self.custom_text or self.text_cfg.hf_model_name is not None


def reason_refused(description: dict[str, Any]) -> str | None:
    """Return why no implementation trains the model, or None."""
    vision, text = (description.get(name) or {} for name in ("vision_cfg", "text_cfg"))
    for key, kind in {"audio_cfg": "an audio tower", "genlip_cfg": "a generative model (GenLIP)"}.items():
        if description.get(key) is not None:
            return f"{key} describes {kind}, and MegaCLIP trains image-text models with a contrastive loss"
    if not isinstance(vision, dict) or not isinstance(text, dict):
        return None
    if "naflex" in str(vision.get("timm_model_name", "")).lower():
        return "NaFlex image towers take images of several shapes in one batch, and the loader makes one shape"
    size = vision.get("image_size", 224)
    if isinstance(size, list) and len(set(map(str, size))) > 1:
        return f"vision_cfg.image_size {size} is not square, and the loader makes square images"
    for name, section in (("vision_cfg", vision), ("text_cfg", text)):
        if section.get("output_tokens") and description.get("multimodal_cfg") is None:
            return f"{name}.output_tokens true makes the tower return tokens, which only a caption decoder reads"
    return None


def open_clip_descriptions() -> dict[str, Path]:
    """Return the model descriptions of the installed open_clip, by name; none if it is not installed."""
    found = importlib.util.find_spec("open_clip")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "model_configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _check_keys(description: dict[str, Any], source: str) -> None:
    """Raise ConfigError for keys that open_clip does not have: it would fail, or ignore them."""
    package = import_open_clip()
    sections: dict[str, tuple[Any, set[str]]] = {
        "": (description, set(OpenClipConfig.model_fields)),
        "vision_cfg.": (description.get("vision_cfg"), _fields(package.CLIPVisionCfg) | {"timm_model_kwargs"}),
        "text_cfg.": (description.get("text_cfg"), _fields(package.CLIPTextCfg)),
        "multimodal_cfg.": (description.get("multimodal_cfg"), _fields(package.coca_model.MultimodalCfg)),
    }
    for prefix, (given, known) in sections.items():
        for key in given if isinstance(given, dict) else ():
            if key not in known:
                raise unknown_key(source, prefix, key, known)


def _contradiction(config: OpenClipConfig) -> str | None:
    """Return why open_clip could not build or load the model, or why a setting has no effect, or None."""
    vision, text = config.vision_cfg.model_dump(), config.text_cfg
    is_resnet = isinstance(vision.get("layers"), list)
    if is_resnet and vision["patch_dropout"]:
        return f"vision_cfg.patch_dropout {vision['patch_dropout']} has no effect on a ResNet; set it to 0"
    if text.embed_cls and not config.has_text_prefix:
        return (
            "text_cfg.embed_cls true requires custom_text true: without it open_clip's model has no class token, and "
            "cannot load an export; set it"
        )
    if config.multimodal_cfg is None:
        return None
    for name, section in (("vision_cfg", vision), ("text_cfg", text.model_dump())):
        if not section.get("output_tokens"):
            return (
                f"{name}.output_tokens false, and multimodal_cfg requires true: the decoder reads the tokens of both "
                "towers; set it"
            )
    if vision.get("timm_model_name") or is_resnet:
        return (
            "vision_cfg describes an image tower of timm or a ResNet, which return no tokens, and multimodal_cfg "
            "requires them; use open_clip's vision transformer"
        )
    length, limit = text.context_length, config.multimodal_cfg.get("context_length", 77)
    if not isinstance(limit, int) or length - 1 > limit:
        return (
            f"multimodal_cfg.context_length {json.dumps(limit)} is too short for text_cfg.context_length {length}; set "
            f"it to {length}"
        )
    if not config.has_text_prefix:
        return "custom_text false, and multimodal_cfg requires true: without it open_clip builds no decoder; set it"
    return None


def _fields(section: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}
