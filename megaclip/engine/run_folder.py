"""The folder of a run: created and locked by the first rank, and known to every rank.

Other modules write its files, which docs/run_folder.md lists.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed.comm as dist

from megaclip.checkpoint.durable import make_folders
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.config import TrainArguments
from megaclip.engine.resume import require_own_folder
from megaclip.errors import ConfigError, MegaclipError
from megaclip.guards.lock import RunLock


@contextlib.contextmanager
def run_folder(arguments: TrainArguments) -> Iterator[Path]:
    """Create the run's folder and its subfolder `checkpoints` on the first rank; return the path on every rank.

    The first rank holds the lock on the folder until the context ends.
    """
    folder, lock = Path(), None
    try:
        with report_write_errors():
            if dist.get_rank() == 0:
                name = arguments.name or f"{Path(arguments.model).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
                folder = Path(arguments.logs) / name
                checkpoints = folder / "checkpoints"
                make_folders(checkpoints)
                lock = RunLock(folder)
                lock.take()
                require_own_folder(folder, arguments.resume)
        yield gather_objects(folder)[0]
    finally:
        if lock is not None:
            lock.release()


@contextlib.contextmanager
def report_write_errors(*, has_trained: bool = False) -> Iterator[None]:
    """Raise errors of the body on all ranks; convert an OSError to an error for users.

    has_trained: whether the folder could be written when the run started. If so, the error is not a ConfigError,
    because --logs is valid. The same command resumes the run when the cause is removed.
    """
    with raise_on_all_ranks():
        try:
            yield
        except OSError as error:
            problem = f"cannot write to the run's folder: {error}"
            if has_trained:
                raise MegaclipError(f"{problem}; free space or fix permissions, then use --resume auto") from error
            raise ConfigError(f"{problem}; choose another --logs") from error
