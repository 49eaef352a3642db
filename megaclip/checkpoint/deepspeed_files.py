"""Write and read DeepSpeed's checkpoint files: with checksums, and without executing anything from a file.

DeepSpeed's files are pickles, and DeepSpeed reads them without restriction. Here they are read with
`weights_only=True`, which builds tensors, plain Python values and the classes of `_ALLOWED` only. DeepSpeed writes them
with `CheckedFiles` in its engine (`save_with`). It never reads them: `megaclip.zero.reshard` loads checkpoints.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megaclip.checkpoint.durable import FileRecord, save_tensors
from megaclip.errors import CheckpointError, first_line


def _stage(enumeration: Any, name: str) -> ZeroStageEnum:
    """Return a ZeRO stage by its name. Python 3.11.0 to 3.11.3 writes it as `getattr(ZeroStageEnum, name)`."""
    if enumeration is not ZeroStageEnum:
        raise pickle.UnpicklingError("GLOBAL getattr of another class than ZeroStageEnum")
    return ZeroStageEnum[name]


_ALLOWED: list[Any] = [LossScaler, ZeroStageEnum, fragment_address, (_stage, "builtins.getattr")]
"""Accepted classes in DeepSpeed's files. They contain numbers, and creating or loading one calls no other code."""


def read_file(path: Path, advice: str = "use a checkpoint that MegaCLIP has written", **options: Any) -> dict[str, Any]:
    """Return the content of a file that `torch.save` or DeepSpeed has written.

    advice: what to do if the file contains other objects. options: `map_location` and `mmap` of torch.load. Raises
    CheckpointError if the file is damaged, or holds objects of other classes.
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{str(path)!r} contains objects other than tensors and numbers, or is damaged ({_reason(error)}); it was "
            f"not read, because reading it could run code; {advice}"
        ) from None
    except Exception as error:  # a damaged file can cause any exception inside torch.load
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {first_line(error)}; copy it again, or choose another one"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} does not hold a dictionary; choose another one")
    return content


@contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Raise what the files of a checkpoint cause in the body, inside torch.load or DeepSpeed, as CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as problem:  # a damaged file can cause any exception
        raise CheckpointError(
            f"cannot load checkpoint {str(checkpoint)!r}: {first_line(problem)}; choose another one"
        ) from problem


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the name that torch's message refuses, or the message without its advice to trust the file."""
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it uses {name[1]}"
    return first_line(Exception(str(error).split("WeightsUnpickler error:")[-1]))


class CheckedFiles(CheckpointEngine):
    """Checkpoint engine for DeepSpeed that records the files which this rank writes.

    `save` stores its first error instead of raising it: DeepSpeed's save contains collectives, so a rank that cannot
    write must still take part in all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.records: dict[Path, FileRecord] = {}
        """Files that this rank has written."""
        self.error: Exception | None = None
        """First error of `save`."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: a save needs no preparation."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file that survives a power cut."""
        try:
            self.records[Path(path)] = save_tensors(state_dict, Path(path))
        except (OSError, RuntimeError) as problem:
            self.error = self.error or problem

    def write(self) -> None:
        """Do nothing: `save` has written the files."""

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Read a file without executing anything from it. Raises CheckpointError."""
        return read_file(Path(path), map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True without doing anything: `megaclip.checkpoint.store` completes the checkpoint."""
        return True


def save_with(files: CheckedFiles, engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Save parameters and optimizer state as `tag` in `folder`. All ranks must call it: it contains collectives.

    Raises OSError if DeepSpeed could not copy its scripts. The collectives have run nevertheless.
    """
    own = engine.checkpoint_engine
    engine.checkpoint_engine = files
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=_has_adapters(engine))
    except OSError:  # run the collectives that it has skipped
        if engine.zero_optimization_stage() == 3:
            engine.optimizer.checkpoint_event_epilogue()
        dist.barrier()
        raise
    finally:
        engine.checkpoint_engine = own


def _has_adapters(engine: DeepSpeedEngine) -> bool:
    """Return whether checkpoints hold the trained parameters only: --pretrained has the weights below adapters."""
    return getattr(engine.module, "base_sha256", None) is not None
