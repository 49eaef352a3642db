"""Load a trained model with its image transform and tokenizer, from an exported directory or a run's checkpoint.

All checkpoints of a run share one folder with the model card and the tokenizer, which the run writes when it starts.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.model_card import remove_earlier_files, write_model_card
from megaclip.checkpoint.open_clip_weights import assigned_model, write_tensors
from megaclip.checkpoint.saved_states import SavedStates, read_model
from megaclip.checkpoint.search import LOCKED_WEIGHTS, MODEL_CARD, locate_model, require_whole_model
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.data import ImageTransform, Tokenizer
from megaclip.engine.inputs import Inputs
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder
from megaclip.models.config import CARD_NAME
from megaclip.models.open_clip_keys import StateDict


@dataclass(frozen=True)
class SavedModel:
    """Model with the preprocessing of its images and captions."""

    model: DualEncoder
    """The model, float32, on the CPU, in evaluation mode."""
    transform: ImageTransform
    """Image preprocessing of the model card."""
    tokenizer: Tokenizer
    tag: str | None
    """Name of the run's checkpoint, such as "step_00000100". None: an exported directory."""


def load_saved_model(
    source: Path, *, tag: str | None = None, tokenizer: str | None = None, ema: bool = False
) -> SavedModel:
    """Load a model for evaluation, after its files were checked. Every rank must call it.

    source, tag, ema: as `search.locate_model` takes them. tokenizer: as `load_tokenizer` takes it; None selects the
    tokenizer of the model card, and another one gives a warning.

    Raises:
        ConfigError: a tag or `ema` was given for an exported directory, the model card or tokenizer cannot be read, or
            the tokenizer has more ids than the model has embeddings.
        CheckpointError: `source` holds no model, or an incomplete or damaged one.
    """
    folder, name = source, tag
    with raise_on_all_ranks():
        folder, name = locate_model(source, tag, ema=ema)
    require_whole_model(folder, name)
    with raise_on_all_ranks():
        card, weights = read_model(folder, name, ema=ema)
        transform = ImageTransform(card.config.vision_cfg.image_size, **card.pixel_settings)
        chosen = choose_tokenizer(tokenizer, card, card.config)
        if chosen.owner is None:
            chosen.embeddings(card.config)  # refuses a tokenizer with more ids
        model = assigned_model(card.config, weights)
    return SavedModel(model, transform, chosen.tokenizer, name)


def locked_weights(step: Path, folder: Path, names: list[str], *, bf16: bool) -> StateDict | None:
    """Return the locked parameters in float32 that a resumed run must keep, without those that were saved rounded only.

    step: folder of the checkpoint. folder: the resumed run's folder `MODEL_CARD`; None is returned if it has their
    file. names: the locked parameters. bf16: whether the resumed run rounds its copies.

    Raises:
        CheckpointError: a file is damaged.
    """
    card = step.parent / MODEL_CARD
    if not names:
        return {}
    if (card / manifest.MANIFEST).exists() and (damaged := manifest.find_damage(card, only=LOCKED_WEIGHTS)):
        raise CheckpointError(f"{card} is damaged: {damaged[0]}; restore the file from a copy")
    if (card / LOCKED_WEIGHTS).is_file():
        return None if card.resolve() == folder.resolve() else read_tensors(card / LOCKED_WEIGHTS)
    if not bf16:
        return {}
    return SavedStates.open(step).float32_weights(names)


def write_model_folder(folder: Path, inputs: Inputs, locked: StateDict | None) -> None:
    """Write the model card and the tokenizer of a run into its folder `MODEL_CARD`, from which an export copies them.

    Files of an earlier tokenizer are deleted. locked: float32 values of locked parameters, for the exports of a run in
    bf16; None: the folder has their file, which stays as it is.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as written:
        inputs.tokenizer.write_open_clip(written)
        names = [CARD_NAME, *os.listdir(written), *(file.name for file in inputs.tokenizer.files)]
    remove_earlier_files(folder, kept=names if locked is not None else [*names, LOCKED_WEIGHTS])
    if locked:
        write_tensors(folder / LOCKED_WEIGHTS, {name: value.float() for name, value in locked.items()})
    inputs.tokenizer.write_open_clip(folder)
    write_model_card(folder, inputs.saved_config, inputs.preprocess_cfg, inputs.tokenizer.files)
    manifest.write(folder)
