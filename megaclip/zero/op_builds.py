"""DeepSpeed's ops: register MegaCLIP's, and watch those that DeepSpeed compiles at their first use in a process.

A compilation takes minutes, once per environment, and DeepSpeed compiles without a message. PyTorch before 2.14 creates
a file `lock` in an op's folder (torch/utils/file_baton.py), keeps it open during the compilation and deletes it
afterwards. Every other process waits for the deletion, without a limit and without a message. A killed build does not
delete its lock. Later versions use a lock that ends with its process, and leave the file.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.ops
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, OpBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from filelock import FileLock

from megaclip.errors import ConfigError, os_reason
from megaclip.logging import get_logger

logger = get_logger(__name__)

PATIENCE_S = 120.0
"""Seconds after which a lock that no process of this host has open counts as left by a killed build, if nothing else
in its folder has changed. Where hosts share the folder, a build of another host changes it more often."""
_REPORT_S = 10.0
"""Seconds until the first report of a compilation. Loading a compiled op takes less. Later intervals double."""
_POLL_S = 0.2
_CHECK = "lock.check"
"""File in an op's folder that is locked while a rank deletes an abandoned lock."""

_jit_load = OpBuilder.jit_load
_created: set[int] = set()
"""Numbers of the optimizers that `_load_fused_adam_of_cpu` has created in DeepSpeed's op."""


def register_builder(builder: type[OpBuilder]) -> None:
    """Make DeepSpeed find, probe and report an op in this process, by the builder's class name and its NAME.

    DeepSpeed searches for builders in its own folders only and has no entry point for other packages.
    """
    name = builder.__name__
    accelerator = get_accelerator()
    if hasattr(accelerator, "_lazy_init_class_dict"):
        accelerator._lazy_init_class_dict()
        accelerator.class_dict[name] = builder
    else:  # the CPU accelerator has no table of builders
        look_up = accelerator.get_op_builder
        accelerator.get_op_builder = lambda class_name: builder if class_name == name else look_up(class_name)
    setattr(op_builder, name, builder)
    ALL_OPS[builder.NAME] = builder()


def leave_out_shared_memory() -> None:
    """Make deepspeed.init_distributed start no all-reduce through shared memory on CPUs.

    Only inference uses that op. It takes 25 s to compile and leaves 67 MB per rank in /dev/shm after every run, which
    is more than a Docker container has by default.
    """
    if get_accelerator().device_name() == "cpu":  # on other accelerators, reading the table would probe every op
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prepare_ops() -> None:
    """Report every compilation of an op in this process, and delete the lock that a killed build of the op left.

    On CPUs FusedAdam takes its update from the op of DeepSpeedCPUAdam, so that runs with and without offload_optimizer
    compile one op. The code and so the results are the same. PyTorch's AdamW rounds differently.
    """
    OpBuilder.jit_load = _load_and_report
    if get_accelerator().device_name() == "cpu":
        FusedAdamBuilder.load = _load_fused_adam_of_cpu


def op_builds_root() -> Path:
    """Return the folder in which, or in whose subfolders, PyTorch has one folder per op."""
    from torch.utils.cpp_extension import get_default_build_root  # takes a quarter of a second

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def is_built(name: str) -> bool:
    """Return whether an op is compiled in PyTorch's folder, or was installed with DeepSpeed."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(name)) or any(op_builds_root().glob(f"**/{name}/{name}*.so"))


def require_build_folder(names: list[str]) -> None:
    """Raise ConfigError if ops must be compiled or loaded from PyTorch's folder, and it cannot be written.

    names: names of the ops. Those that were installed with DeepSpeed need no folder.
    """
    from deepspeed.git_version_info import installed_ops

    if all(installed_ops.get(name) for name in names):
        return
    folder = op_builds_root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"DeepSpeed's op {names[0]} needs the folder {folder}, which cannot be written: {os_reason(error)}; set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from None


def _load_and_report(builder: OpBuilder, verbose: bool = True) -> Any:
    from torch.utils import cpp_extension

    with _reported(builder.name):
        if hasattr(cpp_extension, "FileBaton"):  # the lock of PyTorch before 2.14
            _wait_for_lock(builder.name)
        return _jit_load(builder, verbose)


def _load_fused_adam_of_cpu(builder: OpBuilder, verbose: bool = False) -> SimpleNamespace:
    """Return the module of FusedAdam's op. It updates each tensor with the op of DeepSpeedCPUAdam.

    An update depends on its arguments only (`megaclip.zero.optimizers.step_without_history`).
    """
    adam = CPUAdamBuilder().load(verbose)
    empty = [torch.empty(0)] * 4

    def multi_tensor_adam(
        chunk_size: int, overflow: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float,
        step: int, mode: int, bias_correction: int, weight_decay: float,
    ) -> None:  # fmt: skip
        optimizer = -1 - mode  # DeepSpeedCPUAdam numbers its own from 0
        if optimizer not in _created:
            _created.add(optimizer)
            adam.create_adam(optimizer, 0.0, 0.0, 0.0, 0.0, 0.0, mode == 1, False)  # each update sets the numbers
        numbers = (lr, beta1, beta2, eps, weight_decay, bias_correction)
        adam.adam_update(optimizer, 0, *numbers, *empty)
        for gradient, parameter, first, second in zip(*tensors, strict=True):
            adam.adam_update(optimizer, step, *numbers, parameter, gradient, first, second)

    return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Log at intervals that an op is being compiled, and the seconds at the end, if the body takes that long."""
    ended = threading.Event()
    started = time.monotonic()

    def report() -> None:
        wait = _REPORT_S
        while not ended.wait(wait):
            wait *= 2
            logger.info(
                "compiling DeepSpeed's op %s, by this process or another one: %.0f s so far; this takes minutes, once "
                "per environment (%s)",
                name,
                time.monotonic() - started,
                op_builds_root(),
            )

    reporter = threading.Thread(target=report, name=f"compilation of {name}", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
    seconds = time.monotonic() - started
    if seconds > _REPORT_S:
        logger.info("compiled DeepSpeed's op %s in %.0f s", name, seconds)


def _wait_for_lock(name: str) -> None:
    """Wait for the end of another program's build of an op, or delete the lock of a killed one."""
    root = op_builds_root()
    for lock in (*root.glob(f"{name}/lock"), *root.glob(f"*/{name}/lock")):
        while lock.exists() and not _delete_if_abandoned(lock):
            time.sleep(_POLL_S)


def _delete_if_abandoned(lock: Path) -> bool:
    if not _is_abandoned(lock):
        return False
    with FileLock(lock.with_name(_CHECK)):  # another rank may have deleted it meanwhile, and build under a new one
        if not _is_abandoned(lock):
            return False
        lock.unlink(missing_ok=True)
    logger.warning("deleted %s: a killed build left it, and every later run would have waited for it", lock)
    return True


def _is_abandoned(lock: Path) -> bool:
    """Return whether no process can still hold the lock."""
    return _is_quiet(lock) and not _is_open_here(lock) and _is_quiet(lock)  # a new build may have started meanwhile


def _is_quiet(lock: Path) -> bool:
    """Return whether the lock exists and nothing in its folder has changed for `PATIENCE_S` seconds."""
    try:
        changes = [path.stat().st_mtime for path in lock.parent.iterdir() if path.name != _CHECK]
    except FileNotFoundError:  # a file was deleted just now
        return False
    return lock.exists() and time.time() - max(changes, default=time.time()) >= PATIENCE_S


def _is_open_here(lock: Path) -> bool:
    """Return whether a process of this host, of the same user, has the file open."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == path for file in process.open_files()):
                return True
        except (psutil.Error, OSError):  # of another user, or gone
            continue
    return False
