"""The project's one logger: rank-aware, quiet on every rank but the first.

`get_logger(__name__)` returns a standard logger below "megaclip". Rank 0 emits INFO and above; the others only WARNING
and above, with their rank in front, so that a line in a cluster's log says who wrote it. The rank is read from the
environment that the launcher sets, so logging works before any process group exists.
"""

import logging
import os
from collections.abc import Callable

_ROOT = "megaclip"
_seen: set[str] = set()


def rank_from_environment() -> int:
    """The global rank that the launcher gave this process; 0 when there is no launcher."""
    return int(os.environ.get("RANK", "0"))


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
    """A logger for module `name` (pass `__name__`)."""
    _root_logger()
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def log_once(log: Callable[[str], None], message: str) -> None:
    """`log(message)`, a logger's `info` or `warning`, the first time that this process says it."""
    if message not in _seen:
        _seen.add(message)
        log(message)
