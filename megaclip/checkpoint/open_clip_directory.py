"""Write complete directories in open_clip's format: imports of weights, and exports of a run's checkpoint.

A directory holds the weights, the model card, the tokenizer's files and a manifest of their checksums. Nothing is
written before the weights have been checked.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.durable import make_folders, sync_files
from megaclip.checkpoint.model_card import (
    OPENAI_PREPROCESS,
    ModelCard,
    check_inside,
    read_model_card,
    remove_earlier_files,
    write_model_card,
)
from megaclip.checkpoint.open_clip_weights import read_weights, write_weights
from megaclip.checkpoint.output import writing
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import LOCKED_WEIGHTS, MODEL_CARD, locate, refuse_run, require_whole
from megaclip.errors import CheckpointError, ConfigError
from megaclip.models import ModelDescription, load_model_config, meta_model
from megaclip.models.config import CARD_NAME
from megaclip.models.open_clip_keys import StateDict
from megaclip.models.weights import LoadReport, compare_weights, require_finite

_TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
_MAX_TOKENIZER_BYTES = 256 << 20


def import_weights(source: Path, out_dir: Path, model: str | None, *, overwrite: bool = False) -> LoadReport:
    """Compare weights with a model, and write them to a directory if they fit.

    Args:
        source: open_clip directory or weights file.
        out_dir: directory to write.
        model: name or path of the model description. None: the model card of `source`.
        overwrite: `out_dir` may contain files; those of an earlier import are replaced.

    Raises:
        MegaclipError: the source cannot be read or is damaged, or `out_dir` cannot be written.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; expected an open_clip directory or a weights file")
    refuse_run(source)
    if model is None and not (source / CARD_NAME).is_file():
        raise ConfigError(f"{source} has no {CARD_NAME}; name its model with --model")
    _check_output(out_dir, source, overwrite=overwrite)
    manifest.require_whole(source)
    config, preprocess = None if model is None else load_model_config(model), OPENAI_PREPROCESS
    if config is None or (source / CARD_NAME).is_file():
        card = read_model_card(source, config)
        config, preprocess = card.config, card.preprocess_cfg
    weights = read_weights(source, config)
    report = compare_weights(meta_model(config), weights)
    if report.complete:
        require_finite(weights, str(source))
        files, described = _tokenizer_files(source), config
        names = [CARD_NAME, *(path.name for path in files)]
        _write(out_dir, names, weights, config, lambda: write_model_card(out_dir, described, preprocess, files))
    return report


def export_checkpoint(
    source: Path, out_dir: Path, tag: str | None, *, overwrite: bool = False, ema: bool = False
) -> tuple[ModelCard, StateDict]:
    """Write a checkpoint of a run to a directory, after every file of it was checked.

    Args:
        source: run, its checkpoints folder or one checkpoint.
        out_dir: directory to write.
        tag: name of the checkpoint. None: the latest.
        overwrite: `out_dir` may contain files; those of an earlier export are replaced.
        ema: export the moving average of the weights.

    Returns:
        the model card of `out_dir`, and the checkpoint's weights under MegaCLIP's names.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or `out_dir` cannot be written.
    """
    folder, tag = locate(source, tag)
    _check_output(out_dir, folder, overwrite=overwrite)
    require_whole(folder, tag)
    manifest.require_whole(folder / MODEL_CARD)
    card = read_model_card(folder / MODEL_CARD)
    weights = consolidated_weights(folder, tag, ema=ema)
    others = (manifest.MANIFEST, LOCKED_WEIGHTS)
    names = [path.name for path in card.directory.iterdir() if path.is_file() and path.name not in others]

    def copy_files() -> None:
        for name in names:
            shutil.copyfile(card.directory / name, out_dir / name)

    _write(out_dir, names, weights, card.config, copy_files)
    return replace(card, directory=out_dir), weights


def _write(
    out_dir: Path, names: list[str], weights: StateDict, config: ModelDescription, write_others: Callable[[], None]
) -> None:
    """Write a directory. write_others: writes the files `names`, all except the weights and the manifest."""
    with writing(out_dir, CheckpointError):
        make_folders(out_dir)
        remove_earlier_files(out_dir, kept=names)
        (out_dir / manifest.MANIFEST).unlink(missing_ok=True)  # removed until it describes the new files
        write_others()
        path = write_weights(out_dir, weights, config)
        manifest.write(out_dir, sync_files(out_dir, [*names, path.name]))


def _tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a directory that may belong to its tokenizer, by name and size; refuse links out of it."""
    if not source.is_dir():
        return []
    others = (CARD_NAME, manifest.MANIFEST)
    files = [path for path in source.iterdir() if path.suffix in _TOKENIZER_SUFFIXES and path.name not in others]
    for path in files:
        check_inside(path, source)
    return sorted(path for path in files if path.is_file() and path.stat().st_size <= _MAX_TOKENIZER_BYTES)


def _check_output(out_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError if `out_dir` cannot be written, contains files or a run, or belongs to `source`."""
    target, origin = out_dir.resolve(), source.resolve()
    if target == origin or origin in target.parents or (target / "checkpoints").is_dir():
        raise CheckpointError(f"{out_dir} belongs to {source}, or holds a run; choose another directory")
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a directory"
        raise CheckpointError(f"cannot write to {out_dir}: {existing} {reason}; choose another directory")
    try:
        if out_dir.exists() and any(out_dir.iterdir()) and not overwrite:
            raise CheckpointError(f"{out_dir} is not empty; choose another directory, or add --overwrite")
    except OSError as error:
        raise CheckpointError(f"cannot write to {out_dir}: {error}; choose another directory") from None
