"""The folder of a run: created and locked by the first rank, and known to every rank; its settings and its summary.

Other modules write its other files, which docs/run_folder.md lists.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist

from megaclip.checkpoint.durable import make_folders, read_text
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.config import TrainArguments
from megaclip.engine.resume import differences, require_own_folder
from megaclip.errors import ConfigError, MegaclipError, os_errors_as, refused_before_training
from megaclip.files import write_atomically
from megaclip.guards.lock import RunLock
from megaclip.logging import get_logger

logger = get_logger(__name__)

SETTINGS = "settings.json"
SUMMARY = "metrics.json"

_NOT_OF_THE_TRAINING = {
    "deepspeed_config",
    "set",
    "name",
    "logs",
    "resume",
    "stop_after_steps",
    "no_plan",
    "debug_traceback",
    "local_rank",
}
"""Command-line settings that do not change any step: paths, and how a run starts and ends. ds_config has those of
--set."""


@contextlib.contextmanager
def run_folder(arguments: TrainArguments) -> Iterator[Path]:
    """Create the run's folder and its subfolder `checkpoints` on the first rank; return the path on every rank.

    The first rank holds the lock on the folder until the context ends.
    """
    folder = Path()
    with contextlib.ExitStack() as at_end:
        with refused_before_training(), report_write_errors():
            if dist.get_rank() == 0:
                name = arguments.name or f"{Path(arguments.model).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
                folder = Path(arguments.logs) / name
                checkpoints = folder / "checkpoints"
                make_folders(checkpoints)
                lock = RunLock(folder)
                at_end.callback(lock.release)
                lock.take()
                require_own_folder(folder, arguments.resume)
        yield gather_objects(folder)[0]


@contextlib.contextmanager
def report_write_errors(*, has_trained: bool = False) -> Iterator[None]:
    """Raise errors of the body on all ranks; convert an OSError to an error for users.

    has_trained: whether the folder could be written when the run started. If so, the error is not a ConfigError,
    because --logs is valid. The same command resumes the run when the cause is removed.
    """
    kind, last = (MegaclipError, "then use --resume auto") if has_trained else (ConfigError, "or choose another --logs")
    advice = f"free space or fix permissions, {last}"
    with raise_on_all_ranks(), os_errors_as(kind, "cannot write to the run's folder", advice):
        yield


def write_settings(folder: Path, settings: dict[str, Any], resumed_from: Path | None) -> None:
    """Write settings.json on one rank.

    Log a warning with every setting that differs from those of the run that is resumed. A checkpoint refuses changes
    that break the run, such as another model (`megaclip.engine.resume`). Other changes, such as a new learning rate,
    take effect from the next step, and no other output shows them.

    settings: the command line ("arguments") and "ds_config". resumed_from: folder of the run that is resumed, or None.
    """
    if resumed_from is not None:
        changes = list(_changed_settings(_read_json(resumed_from / SETTINGS), json.loads(json.dumps(settings))))
        if changes:
            logger.warning("this run is resumed with changed settings: %s", ", ".join(changes))
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))


def write_summary(
    folder: Path, step: int, scores: dict[str, float], bad_samples: dict[str, int], samples_per_s: float
) -> None:
    """Write metrics.json on one rank, at the end of a run."""
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    summary = {**finite, "steps": step, "bad_samples": bad_samples}
    if samples_per_s:  # zero if the resumed run only had to evaluate
        summary["samples_per_s"] = samples_per_s
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1))


def summarised_step(folder: Path) -> Any:
    """Return the step in metrics.json, the last thing that a run writes, or None."""
    summary = _read_json(folder / SUMMARY)
    return summary.get("steps") if isinstance(summary, dict) else None


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it is missing or damaged. A run does not depend on it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(read_text(path))
    return None


def _changed_settings(old: Any, new: dict[str, Any]) -> Iterator[str]:
    """Yield each setting that differs, with both values."""
    for name, was, now in differences(old, new) if isinstance(old, dict) else ():
        section, _, key = name.partition(".")
        if key and key not in _NOT_OF_THE_TRAINING:
            flag = f"--{key.replace('_', '-')}" if section == "arguments" else key
            yield f"{flag} from {json.dumps(was)} to {json.dumps(now)}"
