"""Report the settings of a resumed run that differ from those recorded in its folder.

A checkpoint refuses changes that break the run, such as another model (resume.py). Other changes are allowed, such as a
new learning rate or warm-up, and take effect from the next step. They are logged because no other output shows them.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaclip.checkpoint.durable import read_text
from megaclip.config import TrainArguments
from megaclip.logging import get_logger

logger = get_logger(__name__)

_NOT_OF_THE_TRAINING = {
    "deepspeed_config",
    "name",
    "logs",
    "resume",
    "stop_after_steps",
    "no_plan",
    "debug_traceback",
    "local_rank",
}
"""Command-line settings that do not change any step: paths, and how a run starts and ends."""
_DEFAULTS: dict[str, Any] = {
    name: json.loads(json.dumps(field.default))
    for name, field in TrainArguments.model_fields.items()
    if not field.is_required()
}
"""Default of each optional flag, for flags that settings.json does not record because an earlier version wrote it."""


def report_changed_settings(before: Path, now: dict[str, Any]) -> None:
    """Log a warning with every setting that differs between the file settings.json of a run and `now`, its new content.

    A missing or damaged file is not reported: it has no effect on the run.
    """
    old: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        old = json.loads(read_text(before))
    if not isinstance(old, dict):
        return
    changes = list(_differences(old, json.loads(json.dumps(now))))
    if changes:
        logger.warning("this run is resumed with changed settings: %s", ", ".join(changes))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for section in ("arguments", "ds_config"):
        was, is_ = (_flat(settings.get(section, {})) for settings in (old, new))
        if section == "arguments":
            was = _DEFAULTS | was
        for key in sorted(is_.keys() | (was.keys() - _DEFAULTS.keys())):
            if was.get(key) != is_.get(key) and key not in _NOT_OF_THE_TRAINING:
                name = f"--{key.replace('_', '-')}" if section == "arguments" else key
                yield f"{name} from {json.dumps(was.get(key))} to {json.dumps(is_.get(key))}"


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings with dotted names. Lists are values."""
    if not isinstance(settings, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
