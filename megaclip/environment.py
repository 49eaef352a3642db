"""Environment variables that a launcher, PyTorch or DeepSpeed reads: checked before PyTorch and DeepSpeed are imported.

A wrong value would end a command with a traceback, or let its ranks wait for each other until a time-out.
`check_environment` is called at the start of every command. What depends on the number of GPUs is checked by
`megaclip.engine.process_group`, and the folder of compiled ops by `megaclip.zero.op_builds`.
"""

import os
import socket
import tempfile
from collections.abc import Mapping

from megaclip.errors import ConfigError, os_errors_as

ACCELERATOR = "DS_ACCELERATOR"
_ACCELERATORS = ("cuda", "cpu")
_MANY = 2**31 - 1
_NUMBERS = {
    "RANK": (0, _MANY),
    "LOCAL_RANK": (0, _MANY),
    "WORLD_SIZE": (1, _MANY),
    "LOCAL_WORLD_SIZE": (1, _MANY),
    "LOCAL_SIZE": (1, _MANY),
    "MASTER_PORT": (0, 65535),
    "DEEPSPEED_TIMEOUT": (1, 1_000_000),
}
"""Variables that are integers, with the smallest and the largest value. DEEPSPEED_TIMEOUT is in minutes."""
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which mpirun and srun set the number of their processes."""


def check_environment(*, joins_ranks: bool, variables: Mapping[str, str] = os.environ) -> None:
    """Check the variables of the process group, of DeepSpeed and of temporary files.

    Args:
        joins_ranks: this process is a rank. Otherwise the variables of ranks may describe the host, as those of a
            Kubernetes pod in which a launcher runs, and only their values are checked.
        variables: the environment.

    Raises:
        ConfigError: a variable is refused.
    """
    numbers = {name: _integer(name, variables[name]) for name in _NUMBERS if name in variables}
    accelerator = variables.get(ACCELERATOR)
    if accelerator is not None and accelerator not in _ACCELERATORS:
        raise ConfigError(f"{ACCELERATOR} is {accelerator!r}; use one of {', '.join(_ACCELERATORS)}, or unset it")
    _check_temporary_files(variables.get("TMPDIR"))
    if joins_ranks:
        _check_ranks(numbers, variables)
        if accelerator == "cuda":
            import torch  # only here, because it takes seconds

            if not torch.cuda.is_available():
                raise ConfigError(
                    f"{ACCELERATOR} is 'cuda', but PyTorch {torch.__version__} finds no GPU; check nvidia-smi and "
                    f"CUDA_VISIBLE_DEVICES, or set {ACCELERATOR} to cpu"
                )


def _integer(name: str, text: str) -> int:
    smallest, largest = _NUMBERS[name]
    try:
        number = int(text)
    except ValueError:
        number = smallest - 1
    if not smallest <= number <= largest:
        raise ConfigError(f"{name} is {text!r}; use an integer from {smallest} to {largest}, or unset it")
    return number


def _check_ranks(numbers: Mapping[str, int], variables: Mapping[str, str]) -> None:
    """Raise ConfigError if the numbers of ranks contradict each other."""
    ranks = numbers.get("WORLD_SIZE", 1)
    size = f"WORLD_SIZE is {ranks}" if "WORLD_SIZE" in numbers else "WORLD_SIZE is not set, which means one rank"
    for name in _OTHER_LAUNCHERS if "WORLD_SIZE" not in numbers else ():
        if variables.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {variables[name]}, but {size}: every process of mpirun or srun would train alone; start "
                "megaclip launch once per host, or unset the variable to train with one rank"
            )
    for name in ("RANK", "LOCAL_RANK"):
        if numbers.get(name, 0) >= ranks:
            raise ConfigError(
                f"{name} is {numbers[name]}, but {size}; unset the variables of an earlier launcher, or start all "
                "ranks with a launcher: deepspeed --module megaclip ..."
            )
    if ranks > 1 and "RANK" not in numbers:
        raise ConfigError(
            f"{size}, but RANK is not set; unset WORLD_SIZE, or set RANK in each of the {ranks} processes"
        )
    if ranks > 1 and numbers.get("MASTER_PORT") == 0:
        raise ConfigError(f"MASTER_PORT is 0, but {size}; use a port that all ranks know, such as 29500")
    address = variables.get("MASTER_ADDR", "127.0.0.1")
    if "WORLD_SIZE" in numbers and (not address or (ranks == 1 and not _is_known(address))):
        raise ConfigError(
            f"MASTER_ADDR is {address!r}, which is no known host; use the name or the address of the first rank's host"
        )


def _is_known(address: str) -> bool:
    """Return whether a host's name has an address. The name of another rank's host may get it later."""
    try:
        return bool(socket.getaddrinfo(address, None))
    except (OSError, UnicodeError):
        return False


def _check_temporary_files(folder: str | None) -> None:
    """Raise ConfigError if temporary files cannot be created."""
    with os_errors_as(ConfigError, f"TMPDIR is {folder!r}", "set it to a folder that can be written, or unset it"):
        tempfile.TemporaryFile(dir=folder or None).close()
