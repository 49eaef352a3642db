"""Write complete directories of a model: imports of weights, and exports in the formats of open_clip and transformers.

A directory holds the weights, their settings, the tokenizer's files and a manifest of checksums; an export also has a
README.md. Nothing is written before the weights have been checked, and the formats can express the model.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, split_torch_state_dict_into_shards

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
from megaclip.checkpoint.open_clip_weights import open_clip_tensors, read_weights, write_tensors, write_weights
from megaclip.checkpoint.output import writing
from megaclip.checkpoint.saved_states import OBJECTIVE, consolidated_weights, read_model
from megaclip.checkpoint.search import LOCKED_WEIGHTS, STATE, locate_model, refuse_run, require_whole_model
from megaclip.checkpoint.weight_files import INDEX, WEIGHTS_NAMES
from megaclip.errors import CheckpointError, ConfigError, os_errors_as
from megaclip.files import write_atomically
from megaclip.models import ModelConfig, ModelDescription, load_model_config, meta_model
from megaclip.models.config import CARD_NAME, read_json_object
from megaclip.models.open_clip_keys import StateDict, from_open_clip
from megaclip.models.transformers_config import (
    CONFIG_NAME,
    PROCESSOR_NAME,
    card_path,
    config_of,
    processor_of,
    read_card,
)
from megaclip.models.transformers_keys import to_transformers
from megaclip.models.weights import LoadReport, compare_weights, require_finite
from megaclip.open_clip_package import import_open_clip

README = "README.md"
OBJECTIVE_WEIGHTS = "objective.safetensors"
"""Weights of the run's objective beside those of the model, under the names of its attributes."""
MAX_PART = "5GB"
"""Largest file of weights, except for larger tensors."""
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
_MAX_TOKENIZER_BYTES = 256 << 20


def import_weights(source: Path, out_dir: Path, model: str | None, *, overwrite: bool = False) -> LoadReport:
    """Compare weights with a model, and write them to a directory if they fit.

    source: directory of open_clip or transformers, or a weights file. model: name or path of the model description.
    None: the model card of `source`. overwrite: `out_dir` may contain files; those of an earlier import are replaced.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; expected a model's directory or a weights file")
    refuse_run(source)
    has_card = card_path(source) is not None
    if model is None and not has_card:
        if (source / CONFIG_NAME).is_file():
            read_card(source / CONFIG_NAME)  # raises: it describes another model
        raise ConfigError(f"{source} has no {CARD_NAME}; name its model with --model")
    check_output(out_dir, source, overwrite=overwrite)
    manifest.require_whole(source)
    if model is None:
        card = read_model_card(source)
    else:
        config = load_model_config(model)
        card = read_model_card(source, config) if has_card else ModelCard(source, config, OPENAI_PREPROCESS)
        with suppress(ConfigError):  # no card, or one that is not read without --model
            read_model_card(source).warn_of_other_features(model, config)
    weights = read_weights(source, card.config)
    if (report := compare_weights(meta_model(card.config), weights)).complete:
        require_finite(weights, str(source))
        files = _tokenizer_files(source)
        with new_directory(out_dir, [CARD_NAME, *(path.name for path in files)]) as written:
            write_model_card(out_dir, card.config, card.preprocess_cfg, files, card.transformers)
            written.append(write_weights(out_dir, weights, card.config).name)
    return report


def export_checkpoint(
    source: Path,
    out_dir: Path,
    tag: str | None,
    *,
    overwrite: bool = False,
    ema: bool = False,
    formats: Collection[str] = ("open_clip",),
    write_tokenizer: Callable[[ModelCard, Path], None] | None = None,
    data_names: bool = False,
) -> tuple[ModelCard, StateDict]:
    """Write a checkpoint of a run, or an imported model, to a directory, after every file of it was checked.

    Args:
        source, tag, ema: as for `search.locate_model`.
        overwrite: `out_dir` may contain files; those of an earlier export are replaced.
        formats: "open_clip", "transformers" or both.
        write_tokenizer: writes the tokenizer's files for transformers into a directory.
        data_names: README.md names the training data.

    Returns the model card of `out_dir`, and the weights under MegaCLIP's names.

    Raises:
        ConfigError: one of the formats cannot express the model. Nothing was written.
        CheckpointError: the checkpoint is incomplete or damaged, or `out_dir` cannot be written.
    """
    folder, tag = locate_model(source, tag, ema=ema)
    check_output(out_dir, folder, overwrite=overwrite)
    require_whole_model(folder, tag)
    card, weights = read_model(folder, tag, ema=ema)
    compare_weights(meta_model(card.config), weights).require_complete(f"{folder} does not fit its model card")
    if "open_clip" in formats:
        _require_expressible(card.config)
    content: dict[str, Any] = {}
    if "transformers" in formats:
        config = config_of(card.config.to_open_clip(), card.transformers)
        processor = processor_of(card.preprocess_cfg, card.config.vision_cfg.image_size, config["model_type"])
        content = {CONFIG_NAME: config, PROCESSOR_NAME: processor}
    with tempfile.TemporaryDirectory() as temporary:
        if tag is None:  # a directory of unknown origin
            state, objective, files = None, {}, {path.name: path for path in _tokenizer_files(folder)}
        else:
            state = read_json_object(path) if (path := folder / tag / STATE).is_file() else None
            objective = consolidated_weights(folder, tag, ema=ema, of_objective=True)
            others = (manifest.MANIFEST, LOCKED_WEIGHTS, CARD_NAME)
            files = {path.name: path for path in card.directory.iterdir() if path.is_file() and path.name not in others}
        if content and write_tokenizer:
            write_tokenizer(card, Path(temporary))
            files |= {path.name: path for path in Path(temporary).iterdir()}
        with new_directory(out_dir, [*files, README]) as written:
            for name, path in files.items():
                shutil.copyfile(path, out_dir / name)
            write_atomically(out_dir / README, readme(sorted(formats), state, data_names=data_names))
            if objective:
                own = {name.removeprefix(OBJECTIVE): value for name, value in objective.items()}
                write_tensors(out_dir / OBJECTIVE_WEIGHTS, own)
                written.append(OBJECTIVE_WEIGHTS)
            if "open_clip" in formats:
                write_model_card(out_dir, card.config, card.preprocess_cfg, transformers=card.transformers)
                written += [CARD_NAME, write_weights(out_dir, weights, card.config).name]
            if content:
                written += _write_transformers(out_dir, card, content, weights)
    return replace(card, directory=out_dir), weights


def _require_expressible(config: ModelDescription) -> None:
    """Raise ConfigError for a model that open_clip cannot describe."""
    arguments = config.to_open_clip()["vision_cfg"].get("timm_model_kwargs")
    if arguments and not hasattr(import_open_clip().CLIPVisionCfg, "timm_model_kwargs"):
        raise ConfigError(
            f"vision_cfg.timm_model_kwargs {json.dumps(arguments)}: the installed open_clip has no such setting, so it "
            "cannot build this image tower; use --format transformers, or import the weights with --model and a name "
            "of open_clip, whose features differ slightly"
        )


def _write_transformers(
    directory: Path, card: ModelCard, content: dict[str, dict[str, Any]], weights: StateDict
) -> list[str]:
    """Write config.json, the image processor and the weights, float32, in parts of at most `MAX_PART`.

    content: of config.json and of the image processor. weights: by MegaCLIP's names. Returns the names of the files.
    """
    is_linear = content[CONFIG_NAME]["model_type"] == "siglip2"
    own = ModelConfig.from_dict(card.config.to_open_clip())
    own_weights = from_open_clip(open_clip_tensors(weights, card.config), own)
    tensors = to_transformers(own_weights, patches_are_linear=is_linear)
    parts = split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_PART)
    files: dict[str, Any] = dict(content)
    if parts.is_sharded:
        files[f"model.safetensors{INDEX}"] = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
    for name, names in parts.filename_to_tensors.items():
        write_tensors(directory / name, {one: tensors[one] for one in names})
    for name, value in files.items():
        write_atomically(directory / name, json.dumps(value, indent=2) + "\n")
    return [*parts.filename_to_tensors, *files]


def readme(formats: list[str], state: dict[str, Any] | None, *, data_names: bool) -> str:
    """Return the README.md of an export, which the Hugging Face hub shows.

    state: state.json of the checkpoint; None: the weights are not those of a run. data_names: list the sources of the
    training data.
    """
    library = "open_clip" if "open_clip" in formats else "transformers"
    header = ModelCardData(library_name=library, pipeline_tag="zero-shot-image-classification", tags=["clip"])
    lines = ["---", header.to_yaml(), "---", "", "# Model", ""]
    lines.append(f"Image-text model in the format of {' and '.join(formats)}, written by MegaCLIP.")
    if state is None:
        return "\n".join([*lines, ""])
    settings = state.get("settings", {})
    arguments, ds_config = settings.get("arguments", {}), settings.get("ds_config", {})
    optimizer = ds_config.get("optimizer", {}).get("params", {})
    facts = {
        "loss": ds_config.get("megaclip", {}).get("loss"),
        "steps": state.get("step"),
        "samples seen": state.get("samples_consumed"),
        "pairs in the training data": state.get("data", {}).get("samples"),
        "batch size": state.get("global_batch"),
        "optimizer": state.get("optimizer"),
        **{name: optimizer.get(name) for name in ("lr", "betas", "eps", "weight_decay")},
        "learning-rate schedule": arguments.get("lr_scheduler"),
        "warm-up steps": arguments.get("warmup"),
        "precision": state.get("precision"),
        "training data": " ".join(arguments.get("train_data", [])) if data_names else None,
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, "", "## Training", "", "| setting | value |", "| --- | --- |", *rows, ""])


@contextmanager
def new_directory(out_dir: Path, names: list[str]) -> Iterator[list[str]]:
    """Let the body of a `with` statement write the files `names` and those that it adds to this list; then write the
    manifest. Files of an earlier import or export are deleted first. Raises CheckpointError if files of another model
    are left, which no manifest lists."""
    with writing(out_dir, CheckpointError):
        make_folders(out_dir)
        remove_earlier_files(out_dir, kept=names)
        (out_dir / manifest.MANIFEST).unlink(missing_ok=True)  # removed until it describes the new files
        yield names
        others = [name for name in (CARD_NAME, CONFIG_NAME, *WEIGHTS_NAMES) if name not in names]
        if left := [name for name in others if (out_dir / name).exists()]:
            raise CheckpointError(
                f"{out_dir} also has {', '.join(left)} of another model, which could be read instead of the files just "
                "written; delete them and repeat the command, or choose an empty directory"
            )
        manifest.write(out_dir, sync_files(out_dir, names))


def _tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a directory that may belong to its tokenizer, by name and size; refuse links out of it."""
    others = (CARD_NAME, manifest.MANIFEST, CONFIG_NAME, PROCESSOR_NAME, "processor_config.json")
    files = [path for path in source.glob("*") if path.suffix in _TOKENIZER_SUFFIXES and path.name not in others]
    files = [path for path in files if not path.name.endswith(INDEX)]
    for path in files:
        check_inside(path, source)
    return sorted(path for path in files if path.is_file() and path.stat().st_size <= _MAX_TOKENIZER_BYTES)


def check_output(out_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError if `out_dir` cannot be written, contains files or a run, or belongs to `source`."""
    target, origin = out_dir.resolve(), source.resolve()
    if target == origin or origin in target.parents or (target / "checkpoints").is_dir():
        raise CheckpointError(f"{out_dir} belongs to {source}, or holds a run; choose another directory")
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a directory"
        raise CheckpointError(f"cannot write to {out_dir}: {existing} {reason}; choose another directory")
    with os_errors_as(CheckpointError, f"cannot write to {out_dir}", "choose another directory"):
        if out_dir.exists() and any(out_dir.iterdir()) and not overwrite:
            raise CheckpointError(f"{out_dir} is not empty; choose another directory, or add --overwrite")
