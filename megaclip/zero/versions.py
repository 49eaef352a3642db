"""The versions of DeepSpeed whose internals MegaCLIP knows; every other one is refused before they are touched."""

import re
from importlib import metadata

from megaclip.errors import VersionError

OLDEST, BELOW = "0.19.8", "0.20"
"""Supported versions, as in pyproject.toml. Older ones lack functions that this package calls or replaces."""


def require_deepspeed() -> None:
    """Raise VersionError unless a supported version of DeepSpeed is installed. It is not imported."""
    wanted = f"DeepSpeed >={OLDEST},<{BELOW}"
    cure = f"run  pip install 'deepspeed>={OLDEST},<{BELOW}'"
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise VersionError(f"MegaCLIP requires {wanted}, and DeepSpeed is not installed; {cure}") from None
    if not _numbers(OLDEST) <= _numbers(version) < _numbers(BELOW):
        raise VersionError(f"DeepSpeed {version} is not supported: MegaCLIP requires {wanted}; {cure}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
