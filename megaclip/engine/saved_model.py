"""Load a trained model with its image transform and tokenizer, from an exported directory or a run's checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from megaclip.checkpoint.consolidate import consolidated_weights
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights
from megaclip.checkpoint.store import MODEL_CARD, locate
from megaclip.data import ImageTransform, Tokenizer, load_tokenizer
from megaclip.errors import CheckpointError, ConfigError
from megaclip.models import DualEncoder
from megaclip.models.config import CARD_NAME


@dataclass(frozen=True)
class SavedModel:
    """Model with the preprocessing of its images and captions."""

    model: DualEncoder
    """The model, float32, on the CPU, in evaluation mode."""
    transform: ImageTransform
    """Image preprocessing of the model card."""
    tokenizer: Tokenizer


def load_saved_model(source: Path, *, tag: str | None = None, tokenizer: str | None = None) -> SavedModel:
    """Load a model for evaluation.

    Args:
        source: an exported open_clip directory, or a path of a run that `store.locate` accepts.
        tag: name of a checkpoint of the run, such as "step_00000100"; None selects the latest.
        tokenizer: as `load_tokenizer` takes it; None selects the tokenizer of the model card.

    Raises:
        ConfigError: a tag was given for an exported directory, or the model card or the tokenizer cannot be read.
        CheckpointError: `source` holds no model, or an incomplete one.
    """
    if (source / CARD_NAME).is_file():
        if tag is not None:
            raise ConfigError(f"--tag {tag} selects a checkpoint of a run, but {source} is an exported model; omit it")
        card = read_model_card(source)
        weights = read_weights(source, card.config)
    elif source.is_file():
        raise CheckpointError(
            f"{source} is a file without a model card; convert it to a directory with tools/import_open_clip.py"
        )
    else:
        folder, tag = locate(source, tag)
        card, weights = read_model_card(folder / MODEL_CARD), consolidated_weights(folder, tag)
    transform = ImageTransform(card.config.vision_cfg.image_size, **card.pixel_settings)
    words = load_tokenizer(tokenizer or card.tokenizer(), **card.config.tokenizer_settings())
    return SavedModel(assigned_model(card.config, weights), transform, words)
