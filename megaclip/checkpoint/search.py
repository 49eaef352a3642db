"""Find the checkpoints of a run, and check that they are whole.

A checkpoint is *complete* if it has a manifest, which is written last. It is *whole* if every file still has the size
and the checksum of the manifest. `latest` names the newest complete checkpoint.
"""

import re
import shlex
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.durable import read_text
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.comm.groups import group_rank
from megaclip.errors import CheckpointError, ConfigError
from megaclip.logging import get_logger
from megaclip.models.config import CARD_NAME
from megaclip.models.transformers_config import card_path

logger = get_logger(__name__)

LATEST = "latest"
STATE = "state.json"
MODEL_CARD = "model"
LOCKED_WEIGHTS = "locked_weights.safetensors"
"""File in the folder `MODEL_CARD` with the float32 values of locked parameters, of which bf16 checkpoints have rounded
copies."""
TAG_PATTERN = r"step_\d{8,}"
"""Regular expression of a checkpoint's name, which `tag_of` writes."""
_TAG = re.compile(TAG_PATTERN)


def all_tags(folder: Path) -> list[str]:
    """Return the names of all step_N folders, complete or not, oldest first."""
    return sorted(path.name for path in folder.iterdir() if _TAG.fullmatch(path.name))


def tag_of(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"step_{step:08d}"


def step_of(tag: str) -> int:
    """Return the number of optimizer steps of checkpoint `tag`."""
    return int(tag.removeprefix("step_"))


def is_complete(folder: Path, tag: str) -> bool:
    """Return whether checkpoint `tag` was written completely. `manifest.find_damage` checks whether it is whole."""
    return bool(_TAG.fullmatch(tag)) and (folder / tag / MANIFEST).is_file()


def newest_first(folder: Path) -> list[str]:
    """Return the tags of all complete checkpoints in `folder`, the last saved first."""

    def saved(tag: str) -> tuple[str, str]:
        try:
            return manifest.read(folder / tag).saved_at, tag
        except CheckpointError:
            return "", tag

    if not folder.is_dir():
        return []
    return sorted((tag for tag in all_tags(folder) if is_complete(folder, tag)), key=saved, reverse=True)


def run_of(folder: Path, tag: str) -> str | None:
    """Return the identifier of the run that wrote a checkpoint, None if it cannot be read or has none."""
    try:
        return manifest.read(folder / tag).run
    except CheckpointError:
        return None


def holds_checkpoints(folder: Path) -> bool:
    """Return whether `folder` holds a complete checkpoint, or a file `latest`."""
    return (folder / LATEST).exists() or bool(newest_first(folder))


def find_latest(folder: Path) -> str | None:
    """Return the first of `candidates`, None if there is none. Raises CheckpointError if it is not complete.

    Manifests are read only if `latest` names no checkpoint: those of many checkpoints take seconds to read.
    """
    tag = latest_tag(folder) or next(iter(candidates(folder)), None)
    if tag is not None:
        require_complete(folder, tag)
    return tag


def candidates(folder: Path) -> list[str]:
    """Return the checkpoints that --resume auto tries, in this order.

    They are the checkpoint that `latest` names and the earlier ones of the same run, the last saved first. Checkpoints
    with another run identifier are left out: a run that resumed from an earlier checkpoint does not continue them.
    Without the file `latest`, they are all complete checkpoints, with a warning.
    """
    tag, complete = latest_tag(folder), newest_first(folder)
    if tag is None:
        if complete and group_rank() == 0:
            logger.warning("%s is missing or damaged; using the checkpoint that was saved last", folder / LATEST)
        return complete
    earlier, run = [one for one in complete if step_of(one) < step_of(tag)], run_of(folder, tag)
    return [tag, *(one for one in earlier if run is None or run_of(folder, one) == run)]


def read_latest(folder: Path) -> str | None:
    """Return the content of `latest`, None if there is no such file or it cannot be read."""
    try:
        return read_text(folder / LATEST).strip()
    except (OSError, ValueError):
        return None


def latest_tag(folder: Path) -> str | None:
    """Return the tag that `latest` names, None if there is no such file or its content is not a tag."""
    content = read_latest(folder)
    return content if content is not None and _TAG.fullmatch(content) else None


def locate(path: Path, tag: str | None = None) -> tuple[Path, str]:
    """Return the checkpoints folder and the tag of a checkpoint that a user gave.

    path: a step's folder, a checkpoints folder, or the folder of a run. tag: name of a checkpoint, such as
    "step_00000100"; None selects the latest. Raises CheckpointError if it does not exist or is incomplete.
    """
    if (path / CARD_NAME).is_file():
        raise CheckpointError(
            f"{str(path)!r} holds open_clip weights, not a checkpoint of a run; give the run's folder, or start a new "
            "run from these weights with --pretrained"
        )
    if _TAG.fullmatch(path.name) and path.is_dir():
        if tag not in (None, path.name):
            raise CheckpointError(
                f"{str(path)!r} is one checkpoint; give the run's folder to select {tag!r} by its tag"
            )
        require_complete(path.parent, path.name)
        return path.parent, path.name
    for folder in (path, path / "checkpoints"):
        if tag is None:
            latest = find_latest(folder)
            if latest is not None:
                return folder, latest
        elif folder.is_dir() and (tags := all_tags(folder)):
            if tag not in tags:
                raise CheckpointError(f"no checkpoint {tag!r} in {str(folder)!r}; it has {', '.join(tags[-5:])}")
            require_complete(folder, tag)
            return folder, tag
    raise CheckpointError(
        f"no checkpoint at {str(path)!r}; expected a step_N folder, or a folder with a file '{LATEST}'"
    )


def locate_model(source: Path, tag: str | None = None, *, ema: bool = False) -> tuple[Path, str | None]:
    """Return what `locate` returns, or `source` and None if it is a directory with a model card.

    ema: the moving average of the weights is wanted, which only a run has. Raises ConfigError if `tag` or `ema` was
    given for a model, and CheckpointError as `locate`.
    """
    if card_path(source) is not None:
        if tag is not None:
            raise ConfigError(f"--tag {tag} selects a checkpoint of a run, but {source} is a model; leave out --tag")
        if ema:
            raise ConfigError(
                f"--ema selects the moving average of a run, but {source} is a model; export the average with "
                "`megaclip export --ema`, and leave out --ema here"
            )
        return source, None
    if source.is_file():
        raise CheckpointError(
            f"{source} is a file without a model card; convert it to a directory with `megaclip import`"
        )
    if not source.exists():
        raise CheckpointError(
            f"{str(source)!r} contains no checkpoint and no exported model; give an exported directory, a run or one "
            "of its checkpoints"
        )
    return locate(source, tag)


def refuse_run(path: Path) -> None:
    """Raise CheckpointError if `path`, where open_clip's weights are expected, belongs to a run."""
    source = path.parent if path.name.endswith(("_model_states.pt", "_optim_states.pt")) else path
    is_export = (source / CARD_NAME).is_file()  # an export may also be in a folder named step_N
    is_step = _TAG.fullmatch(source.name) is not None and source.is_dir() and not is_export
    if is_step or any((folder / LATEST).is_file() for folder in (source, source / "checkpoints")):
        raise CheckpointError(
            f"{str(path)!r} holds DeepSpeed checkpoints of a run, not open_clip weights; write them with "
            f"`megaclip export {shlex.quote(str(source))} OUT_DIR` and give OUT_DIR"
        )


def require_complete(folder: Path, tag: str) -> None:
    """Raise CheckpointError unless checkpoint `tag` exists and is complete."""
    if not is_complete(folder, tag):
        raise CheckpointError(
            f"checkpoint {str(folder / tag)!r} does not exist or is incomplete: it has no {MANIFEST}; choose a whole "
            f"one, {how_to_list(folder)}"
        )


def require_whole(folder: Path, tag: str) -> None:
    """Raise CheckpointError unless checkpoint `tag` is whole. All ranks must call it."""
    if problems := manifest.find_damage_on_all_ranks(folder / tag):
        raise CheckpointError(
            f"checkpoint {str(folder / tag)!r} is damaged: {manifest.summary(problems)}; choose a whole one, "
            f"{how_to_list(folder)}"
        )


def require_whole_model(folder: Path, tag: str | None) -> None:
    """Raise CheckpointError unless every file is whole of what `locate_model` found. All ranks must call it."""
    if tag is not None:
        require_whole(folder, tag)
    manifest.require_whole(folder if tag is None else folder / MODEL_CARD)


def how_to_list(folder: Path) -> str:
    """Return advice on listing the checkpoints in `folder`, for an error message."""
    return f"run  megaclip check {shlex.quote(str(folder))}  to list them"
