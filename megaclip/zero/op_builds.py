"""DeepSpeed's ops: register MegaCLIP's, and watch those that DeepSpeed compiles at their first use in a process.

A compilation takes minutes, once per environment, and DeepSpeed compiles without a message. One process compiles, and
the others wait for its lock, a file `lock` in the op's folder. PyTorch before 2.14 deletes this file after the
compilation (torch/utils/file_baton.py). So a killed build leaves it, and every later process would wait for it for
ever. `_Lock` replaces it by a lock that ends with its process, as in later versions of PyTorch.
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
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, OpBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from filelock import FileLock, Timeout

from megaclip.errors import ConfigError, os_errors_as
from megaclip.logging import get_logger

logger = get_logger(__name__)

_REPORT_S = 10.0
"""Seconds until the first report of a compilation. Loading a compiled op takes less. Later intervals double."""

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
    """Report every compilation of an op in this process, which holds a lock that ends with its process.

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
    return bool(installed_ops.get(name)) or any(op_builds_root().glob(f"**/{name}/{name}*.so"))


def require_build_folder(names: list[str]) -> None:
    """Raise ConfigError if ops must be compiled or loaded from PyTorch's folder, and it cannot be written.

    names: names of the ops. Those that were installed with DeepSpeed need no folder.
    """
    if all(installed_ops.get(name) for name in names):
        return
    folder = op_builds_root()
    problem = f"DeepSpeed's op {names[0]} needs the folder {folder}, which cannot be written"
    with os_errors_as(ConfigError, problem, "set TORCH_EXTENSIONS_DIR to a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _load_and_report(builder: OpBuilder, verbose: bool = True) -> Any:
    from torch.utils import cpp_extension

    with _reported(builder.name):
        if hasattr(cpp_extension, "FileBaton"):  # PyTorch before 2.14
            cpp_extension.FileBaton = _Lock  # type: ignore[misc, assignment]
        return _jit_load(builder, verbose)


class _Lock(FileLock):
    """Lock of an op's build with the methods of PyTorch's `FileBaton`."""

    def __init__(self, path: str, **_: Any) -> None:
        super().__init__(path)

    def try_acquire(self) -> bool:
        """Take the lock, if no other process holds it; return whether it was taken."""
        try:
            self.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def wait(self) -> None:
        """Wait until no other process holds the lock."""
        self.acquire()
        self.release()

    def release(self, force: bool = False) -> None:
        """Release the lock and delete its file, for which programs with PyTorch's own lock wait."""
        if self.is_locked:  # it is also called when an object that does not hold the lock is deleted
            Path(self.lock_file).unlink(missing_ok=True)
        super().release(force)


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
