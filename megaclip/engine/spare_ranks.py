"""Ranks that the batch cannot use: they stay out of the process group, wait, and end with the run.

An elastic launcher (`torchrun`, `megaclip launch`) starts the ranks of all hosts that have come, however many they are.
The run uses the largest number of ranks that ds_config.json accepts, from rank 0 on. The others keep a connection to
the store of the process group, in which the first rank leaves its exit code. Other launchers start a fixed number of
ranks, and a number that does not fit the batch is refused.
"""

import contextlib
import os
import signal
import time
from datetime import timedelta

import torch
from torch.distributed import DistNetworkError, TCPStore

from megaclip.config import TrainingConfig
from megaclip.errors import ConfigError
from megaclip.logging import get_logger, rank_from_environment

logger = get_logger(__name__)

_SPARE_RANKS = "MEGACLIP_SPARE_RANKS"
"""Environment variable with the number of ranks that the run does not use, for `end_spare_ranks`."""
_EXIT_CODE, _HAVE_READ = "megaclip/exit_code", "megaclip/have_read"
_CONNECT_LIMIT_S = 1800.0
"""Seconds for which a spare rank waits for the first rank, which may read its inputs for a long time."""
_READ_LIMIT_S = 10.0
_END_LIMIT_S = 60.0
"""Seconds within which a launcher ends the spare ranks of a failed run."""


def wait_if_spare(config: TrainingConfig) -> int | None:
    """Leave the ranks that the batch cannot use out of the run. Every rank calls it before the process group exists.

    On a rank that takes part, set WORLD_SIZE to the number of such ranks and return None. On a spare rank, wait for the
    end of the run and return its exit code.

    Raises:
        ConfigError: torchrun would show the spare ranks of a restart the exit code of the attempt before.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # set by torch's elastic agent
        return None
    used = usable_ranks(config, ranks)
    if used in (0, ranks):  # 0: the run raises its own error
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        raise ConfigError(
            f"{config.path} can use {used} of {ranks} ranks, and torchrun keeps what the others read over a restart; "
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or use megaclip launch"
        )
    if rank_from_environment() >= used:
        return _wait_for_exit_code()
    if rank_from_environment() == 0:
        logger.warning("%s can use %d of %d ranks; the others wait for the end of the run", config.path, used, ranks)
    os.environ.update({"WORLD_SIZE": str(used), _SPARE_RANKS: str(ranks - used)})
    return None


def end_spare_ranks(exit_code: int) -> None:
    """Let spare ranks, if there are any, end with the exit code of the first rank. Every rank may call it."""
    spare = int(os.environ.get(_SPARE_RANKS, "0"))
    if not spare or rank_from_environment() != 0 or not torch.distributed.is_initialized():
        return
    store, deadline = _connect(), time.monotonic() + _READ_LIMIT_S
    store.set(_EXIT_CODE, str(exit_code))
    while store.add(_HAVE_READ, 0) < spare and time.monotonic() < deadline:
        time.sleep(0.05)  # the store ends with this process


def usable_ranks(config: TrainingConfig, ranks: int) -> int:
    """Return the largest number of ranks, up to `ranks`, that ds_config.json accepts; 0 if there is none."""
    for number in range(ranks, 0, -1):
        with contextlib.suppress(ConfigError):
            config.batch_layout(number)
            return number
    return 0


def _connect() -> TCPStore:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_LIMIT_S),
    )


def _wait_for_exit_code() -> int:
    """Wait until the first rank has left its exit code, and return it. Return 1 if the first rank is gone.

    SIGUSR1 has no effect meanwhile: Slurm sends it to every process, and the run ends after its step.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.suppress(DistNetworkError):
        store = _connect()
        while not store.check([_EXIT_CODE]):
            time.sleep(0.5)
        exit_code = int(store.get(_EXIT_CODE))
        store.add(_HAVE_READ, 1)
        return exit_code
    time.sleep(_END_LIMIT_S)
    return 1
