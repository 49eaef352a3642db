"""A trained model with what turns files and words into its inputs: how tools read an export, or a run's checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from megaclip.checkpoint.consolidate import consolidated_weights
from megaclip.checkpoint.open_clip import (
    OPENAI_PREPROCESS,
    assigned_model,
    read_preprocess,
    read_weights,
    tokenizer_of,
)
from megaclip.checkpoint.store import MODEL_CARD, locate
from megaclip.data import ImageTransform, Tokenizer, load_tokenizer
from megaclip.errors import CheckpointError, ConfigError
from megaclip.models import ClipModel, load_model_config
from megaclip.models.config import CARD_NAME


@dataclass(frozen=True)
class SavedModel:
    """The model, float32 on the CPU in evaluation mode, the transform of its card and its tokenizer."""

    model: ClipModel
    transform: ImageTransform
    tokenizer: Tokenizer


def load_saved_model(source: Path, *, tag: str | None = None, tokenizer: str | None = None) -> SavedModel:
    """Read an exported open_clip directory, or what `store.locate` finds at `source` and `tag`.

    tokenizer: "clip" or the path of a sentencepiece .model; None: what lies with the model.

    Raises:
        ConfigError: a tag for an export, or a tokenizer that cannot be read.
        CheckpointError: no model there, or an incomplete one.
    """
    if (source / CARD_NAME).is_file():
        if tag is not None:
            raise ConfigError(f"--tag {tag} picks a checkpoint of a run, but {source} is an exported model")
        card, weights = source, read_weights(source)
    elif source.is_file():
        raise CheckpointError(
            f"{source} is a file, without a model card: make a directory of it with tools/import_open_clip.py"
        )
    else:
        folder, tag = locate(source, tag)
        card, weights = folder / MODEL_CARD, consolidated_weights(folder, tag)
    config, preprocess = load_model_config(card), read_preprocess(card)
    pixels = {name: preprocess[name] for name in OPENAI_PREPROCESS}
    transform = ImageTransform(config.vision_cfg.image_size, **pixels)
    words = load_tokenizer(tokenizer or tokenizer_of(card, config), config.text_cfg.context_length)
    return SavedModel(assigned_model(config, weights), transform, words)
