"""The logger of the package, which knows its rank.

`get_logger(__name__)` returns a standard logger below "megaclip". Rank 0 logs INFO and above. The other ranks log only
WARNING and above, with their rank at the start of the line. The rank is read from the environment that the launcher
sets, so logging works before the process group exists. `format_bytes` and `format_count` write numbers in log lines and
errors.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ROOT = "megaclip"
_seen: set[str] = set()


def rank_from_environment() -> int:
    """Return the global rank that the launcher gave this process, or 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank_from_environment() -> int:
    """Return the rank on this host that the launcher gave this process, or 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _root_logger() -> logging.Logger:
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        rank = rank_from_environment()
        handler = logging.StreamHandler()
        prefix = "" if rank == 0 else f"[rank {rank}] "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        root.propagate = False
    return root


def get_logger(name: str) -> logging.Logger:
    """Return the logger of module `name` (pass `__name__`)."""
    _root_logger()
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def log_once(log: Callable[[str], None], message: str) -> None:
    """Call `log(message)` on rank 0, unless this process has done so before. log: a logger's `info` or `warning`."""
    if message not in _seen and rank_from_environment() == 0:
        _seen.add(message)
        log(message)


@contextmanager
def common_warnings() -> Iterator[None]:
    """Log the warnings of a body or function on rank 0 only, because all ranks have the same."""
    root = _root_logger()
    before = root.level
    if rank_from_environment() > 0:
        root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


def format_count(count: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_bytes(size: float) -> str:
    """Return bytes as text: in GiB, or in MiB below one GiB."""
    if abs(size) >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.{0 if abs(size) >= 10 * 2**20 else 1}f} MiB"
