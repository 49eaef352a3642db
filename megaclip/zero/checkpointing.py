"""Save and load through DeepSpeed's engine with a checkpoint engine of MegaCLIP, which writes and reads the files."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine


def save_with(files: Any, engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Save parameters and optimizer state as `tag` in `folder`. All ranks must call it: it contains collectives.

    files: DeepSpeed's `CheckpointEngine` that writes the files.

    Raises:
        OSError: DeepSpeed could not copy its scripts or offloaded tensors. The collectives have run nevertheless.
    """
    own = engine.checkpoint_engine
    engine.checkpoint_engine = files
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    except OSError:  # run the collectives that it has skipped
        getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()
        dist.barrier()
        raise
    finally:
        engine.checkpoint_engine = own


def load_with(files: Any, engine: DeepSpeedEngine, folder: Path, tag: str) -> bool:
    """Load what `save_with` saved on the same number of ranks. Return False if there are no such files."""
    engine.checkpoint_engine = files
    # DeepSpeed searches the files with a glob pattern: a run's name may contain "[", "*" or "?".
    search = partial(type(engine)._get_all_ckpt_names, engine)
    engine._get_all_ckpt_names = lambda folder, tag: search(glob.escape(folder), tag)
    loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    return loaded is not None


@contextmanager
def joint_epilogue(engine: DeepSpeedEngine) -> Iterator[None]:
    """Load in the body; the epilogue of ZeRO-3, which gathers parameters, runs after it.

    The body must raise its errors on all ranks: no rank may start the epilogue while another one has failed.
    """
    epilogue = getattr(engine.optimizer, "checkpoint_event_epilogue", None)
    if epilogue is None:
        yield
        return
    engine.optimizer.checkpoint_event_epilogue = lambda: None
    yield
    engine.optimizer.checkpoint_event_epilogue = epilogue
    epilogue()
