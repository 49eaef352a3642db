"""The model card of an open_clip directory: model description, image preprocessing and tokenizer, read and written.

The card is `open_clip_config.json`. An exported model has it beside its weights, and a training run has it in
`RUN/checkpoints/model`. `read_model_card` parses it once into a `ModelCard`, which all readers use.
"""

import contextlib
import json
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclip.checkpoint import manifest
from megaclip.errors import CheckpointError
from megaclip.files import write_atomically
from megaclip.logging import get_logger
from megaclip.models import ModelDescription, OpenClipConfig
from megaclip.models.config import CARD_NAME
from megaclip.models.descriptions import TOWERS_KEY, Towers, describe
from megaclip.models.transformers_config import KIND_KEY, card_path, read_card

OPENAI_PREPROCESS: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}
"""Preprocessing of OpenAI's models. open_clip uses these values for every setting that is missing in a card."""


# Model settings that change the features, but not the shape of any parameter: loading weights cannot detect them.
_SETTINGS_WITHOUT_SHAPE = {
    "vision_cfg": ("head_width", "pool_type", "final_ln_after_pool", "act_kwargs", "norm_kwargs", "timm_model_kwargs"),
    "text_cfg": ("heads", "pool_type", "no_causal_mask", "act_kwargs", "norm_kwargs"),
}
_logger = get_logger(__name__)


@dataclass(frozen=True)
class ModelCard:
    """Content and location of a model card."""

    directory: Path
    """Directory of the card. It also holds the tokenizer's files and, for an exported model, the weights."""
    config: ModelDescription
    """Model description."""
    preprocess_cfg: dict[str, Any]
    """All preprocessing settings: those of the card, and open_clip's defaults for missing ones."""
    transformers: str | None = None
    """`model_type` of the folder of transformers from which the model was imported, or None."""

    @property
    def path(self) -> Path:
        """Path of the card's file."""
        return card_path(self.directory) or self.directory / CARD_NAME

    @property
    def pixel_settings(self) -> dict[str, Any]:
        """Settings of `preprocess_cfg` that determine pixel values: mean, std, interpolation and resize_mode."""
        return {name: self.preprocess_cfg[name] for name in OPENAI_PREPROCESS}

    def warn_of_other_features(self, model: str, config: ModelDescription, *sections: str) -> None:
        """Warn of each setting in `_SETTINGS_WITHOUT_SHAPE` that differs between --model and this card.

        sections: those that are compared. Default: all.
        """
        ours, theirs = config.model_dump(), self.config.model_dump()
        settings = [("quick_gelu", ours["quick_gelu"], theirs["quick_gelu"])]
        for section in sections or _SETTINGS_WITHOUT_SHAPE:
            names = _SETTINGS_WITHOUT_SHAPE[section]
            settings += [(f"{section}.{name}", ours[section].get(name), theirs[section].get(name)) for name in names]
        for name, here, there in settings:
            if here != there:
                text = "--model %s has %s %s, but the weights in %s were trained with %s"
                _logger.warning(text, model, name, here, self.directory, there)


def check_inside(path: Path, directory: Path) -> None:
    """Raise CheckpointError if `path` is a link that leads out of a directory of unknown origin.

    Its target would be copied to the run or the imported model. Links in the cache of Hugging Face's hub, from
    snapshots/COMMIT to blobs, are followed.
    """
    root, target = directory.resolve(), path.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise CheckpointError(
            f"{path} is a link to {target}, outside the directory; replace it with a copy of that file if it belongs "
            "to the model, or remove it"
        )


def read_model_card(
    directory: str | Path, config: ModelDescription | None = None, towers: Towers | None = None
) -> ModelCard:
    """Read the card in `directory`. Raises ConfigError or CheckpointError if it cannot be read or is not valid.

    config: replaces the card's own model description, which is then not checked.
    towers: implementation that runs the model. None: the implementation that the card names, whose parameter names a
    run's checkpoints have.
    """
    path = card_path(Path(directory)) or Path(directory) / CARD_NAME
    content = read_card(path)
    if config is None:
        recorded: Towers = "open_clip" if content.get(TOWERS_KEY) == "open_clip" else "auto"
        config = describe(content["model_cfg"], str(path), towers or recorded)
    preprocess = content.get("preprocess_cfg") or {}
    if not isinstance(preprocess, dict):
        raise CheckpointError(f"{path}: preprocess_cfg is a {type(preprocess).__name__}, expected a JSON object")
    settings = {**OPENAI_PREPROCESS, **preprocess}
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return ModelCard(Path(directory), config, tuples, content.get(KIND_KEY))


def remove_earlier_files(directory: Path, kept: Collection[str]) -> None:
    """Delete the files that the manifest beside an earlier model card lists, except those named `kept`.

    Files of another tokenizer would otherwise be read together with those of the new one.
    """
    with contextlib.suppress(CheckpointError):  # no manifest, or a damaged one
        listed = manifest.read(directory).files if card_path(directory) is not None else {}
        for name in listed.keys() - set(kept):
            if Path(name).name == name:  # no path that leads out of the directory
                (directory / name).unlink(missing_ok=True)


def write_model_card(
    directory: str | Path,
    config: ModelDescription,
    preprocess_cfg: dict[str, Any],
    tokenizer_files: Iterable[str | Path] = (),
    transformers: str | None = None,
) -> None:
    """Write `open_clip_config.json` into `directory`, and copy the tokenizer's files beside it.

    preprocess_cfg: mean, std, interpolation, resize_mode, as in `OPENAI_PREPROCESS`. tokenizer_files: those that are
    already in `directory` are left unchanged. transformers: `ModelCard.transformers`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for file in map(Path, tokenizer_files):
        if file.resolve().parent != directory.resolve():
            shutil.copyfile(file, directory / file.name)
    card: dict[str, Any] = {"model_cfg": config.to_open_clip(), "preprocess_cfg": preprocess_cfg}
    if isinstance(config, OpenClipConfig):
        card[TOWERS_KEY] = "open_clip"
    if transformers is not None:
        card[KIND_KEY] = transformers
    write_atomically(directory / CARD_NAME, json.dumps(card, indent=2) + "\n")
