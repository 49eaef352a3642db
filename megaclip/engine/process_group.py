"""Start the process group. A run and every tool for several ranks do this first.

The ranks meet at the store of the first rank before the group exists, and the log names those that have not come.

An elastic launcher (`torchrun`, `megaclip launch`) starts the ranks of all hosts that have come, however many they are.
A run uses the largest number of ranks that ds_config.json accepts, from rank 0 on. The others stay out of the process
group, wait at its store, in which the first rank leaves its exit code, and end with the run. Other launchers start a
fixed number of ranks, and a number that does not fit the batch is refused.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import DistError, DistNetworkError, TCPStore

from megaclip import errors
from megaclip.comm.collectives import wait_for_all_ranks
from megaclip.comm.groups import init_distributed
from megaclip.config import TrainingConfig
from megaclip.environment import ACCELERATOR, check_environment
from megaclip.errors import BusyError, ConfigError, MegaclipError, first_line
from megaclip.logging import format_count, get_logger, local_rank_from_environment, log_once, rank_from_environment

logger = get_logger(__name__)

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable with the GPU architectures for which PyTorch and DeepSpeed build ops, such as "8.0;9.0"."""
_ARCHITECTURE = r"\d+\.\d+(\+PTX)?"
_REPORT_S = 10.0
"""Seconds between two reports of the ranks that have not come."""
_LAST_WORD_S = 1.5
"""Seconds in which the other ranks read the first rank's error."""
_spare_ranks = 0
"""Number of ranks that the run does not use, for `end_spare_ranks`."""
_EXIT_CODE, _HAVE_READ = "megaclip/exit_code", "megaclip/have_read"
_CONNECT_LIMIT_S = 1800.0
"""Seconds for which a spare rank waits for the first rank, which may read its inputs for a long time."""
_READ_LIMIT_S = 10.0
_END_LIMIT_S = 60.0
"""Seconds within which a launcher ends the spare ranks of a failed run."""


def start_process_group() -> None:
    """Join the process group of the launcher. Without WORLD_SIZE, create a group of one rank on a free port.

    Raises:
        ConfigError: an environment variable is refused.
        BusyError: another program uses the launcher's port.
        MegaclipError: a rank has not come in time, or the group cannot start.
    """
    quiet_deepspeed()
    is_met = torch.distributed.is_initialized()
    if not is_met:
        check_environment(joins_ranks=True)
    if "WORLD_SIZE" not in os.environ:  # an earlier shell may have left an address
        os.environ.update({"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    accelerator = get_accelerator()
    _check_devices(accelerator.device_name(), accelerator.device_count())
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank_from_environment())
    if accelerator.device_name() == "cuda":
        os.environ[ARCHITECTURES] = architectures(os.environ.get(ARCHITECTURES, ""), torch.cuda.get_device_capability())
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # record the last collectives (`megaclip.guards.watchdog`)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        text = "torchrun restarts ranks reliably only with  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        log_once(logger.warning, text)
    try:
        # Kept until the group exists, because it is the store of all ranks on the first one.
        store = None if is_met else meet_all_ranks(60.0 * int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
        init_distributed()
        wait_for_all_ranks()  # if a rank exited now, a peer that is still connecting would fail
    except RuntimeError as error:  # of PyTorch's backends
        raise MegaclipError(
            f"the process group does not start: {first_line(error)}; see the output of the first rank, and check the "
            "network between the hosts, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME if it is set"
        ) from error
    del store


def _check_devices(device: str, count: int) -> None:
    """Raise ConfigError if this rank has no GPU of its own, or would train on the CPU although GPUs are requested."""
    visible, rank = os.environ.get("CUDA_VISIBLE_DEVICES"), local_rank_from_environment()
    if device == "cuda" and rank >= count:
        raise ConfigError(
            f"LOCAL_RANK is {rank}, but this process sees {format_count(count, 'GPU')} (CUDA_VISIBLE_DEVICES is "
            f"{visible!r}); start at most {format_count(count, 'rank')} on this host, or let each rank see "
            "the GPUs of all"
        )
    hidden = visible in (None, "", "-1", "NoDevFiles")
    if device == "cpu" and not hidden and torch.version.cuda and ACCELERATOR not in os.environ:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, but PyTorch finds no GPU; check nvidia-smi, or set {ACCELERATOR} to "
            "cpu to train on CPUs"
        )


def connect(limit_s: float) -> TCPStore:
    """Return the store of the launcher's ranks, which the first rank creates if its launcher has not done so.

    A warning is logged at intervals while another rank cannot reach it.

    Raises:
        BusyError: the port is in use on the first rank.
        ConfigError: the store cannot be created, or cannot be reached by a run of one rank.
        MegaclipError: the store cannot be reached within `limit_s` seconds.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    is_master = rank_from_environment() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"is_master": is_master, "wait_for_workers": False, "multi_tenant": True}
    options["timeout"] = timedelta(seconds=limit_s)
    if is_master:
        try:
            listening = TCPStore("localhost", port, **options)
        except DistError as error:
            if "EADDRINUSE" not in str(error):
                raise ConfigError(f"MASTER_PORT {port} cannot be used: {first_line(error)}; use another one") from None
            raise BusyError(
                f"port {port} is in use, possibly by another run; pass a free port to the launcher: "
                "deepspeed --master_port 29501 ..."
            ) from None
        if port == 0:
            return listening
    deadline, is_alone = time.monotonic() + limit_s, os.environ.get("WORLD_SIZE", "1") == "1"
    options["timeout"] = timedelta(seconds=_REPORT_S)  # another program may use the port
    for is_due in _pauses():
        try:  # PyTorch would print its own stacks
            socket.create_connection((address, port), timeout=_REPORT_S).close()
            store = TCPStore(address, port, **options)
            store.set_timeout(timedelta(seconds=limit_s))
            return store
        except (DistError, OSError, UnicodeError) as error:
            reason = f"{address} at port {port} (MASTER_ADDR, MASTER_PORT): {first_line(error)}"
        if is_alone or time.monotonic() >= deadline:
            raise (ConfigError if is_alone else MegaclipError)(
                f"cannot reach the first rank, {reason}; open the firewall between the hosts, or pass an address of "
                "the first host to the launcher"
            )
        if is_due:
            logger.warning("waiting for the first rank, %s", reason)
    raise AssertionError("the loop has no end")


def meet_all_ranks(limit_s: float) -> TCPStore:
    """Return the store of all ranks when every rank has come. Meanwhile the log names those that have not come.

    Raises:
        ConfigError: two processes have the same rank, ranks disagree about their number, or as `connect`.
        BusyError: as `connect`.
        MegaclipError: a rank has not come within `limit_s` seconds. The error of another rank, with its class.
    """
    rank, ranks = rank_from_environment(), int(os.environ["WORLD_SIZE"])
    store, deadline = connect(limit_s), time.monotonic() + limit_s
    # Hosts count their own restarts. Only torchrun's store, which requires equal counts, outlives an attempt.
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = f"megaclip/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if outlives else 0}"
    come, failed = f"{attempt}/come", f"{attempt}/failed"

    def absent() -> str:
        missing = [other for other in range(ranks) if not store.check([f"{come}/{other}"])]
        names = ", ".join(map(str, missing[:20])) + ", ..." * (len(missing) > 20)
        return f"{len(missing)} of {ranks} ranks: {names}" if missing else ""

    def fail(error: MegaclipError) -> NoReturn:
        store.set(failed, f"{type(error).__name__} {error}")
        time.sleep(_LAST_WORD_S if rank == 0 else 0.0)  # the store of the others may be in this process
        raise error

    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torch's agent numbers ranks itself, and may keep its store
        if store.add(f"{attempt}/count/{rank}", 1) > 1:
            fail(ConfigError(f"RANK is {rank} in two processes; give each process, or each host, its own rank"))
        if (size := int(store.compare_set(f"{attempt}/size", "", str(ranks)))) != ranks:
            fail(ConfigError(f"WORLD_SIZE is {ranks} on rank {rank}, but {size} on another one; set the same on all"))
    store.set(f"{come}/{rank}", "")
    store.add(come, 1)
    for is_due in _pauses():
        if store.add(come, 0) >= ranks:
            break
        if store.check([failed]):
            kind, _, message = store.get(failed).decode().partition(" ")
            raise getattr(errors, kind)(message)
        if time.monotonic() >= deadline:
            fail(
                MegaclipError(
                    f"the run does not start: after {limit_s:.0f} s it still waits for {absent()}; see the output of "
                    "their launchers, or set DEEPSPEED_TIMEOUT to more minutes"
                )
            )
        if is_due and (missing := absent()):
            logger.warning("waiting for %s", missing)
    return store


def _pauses() -> Iterator[bool]:
    """Sleep between two iterations, shortly at first; yield whether this rank, the first of its host, is to report."""
    pause_s, reported = 0.02, time.monotonic()
    while True:
        is_due = time.monotonic() >= reported + _REPORT_S
        reported += _REPORT_S * is_due
        yield is_due and local_rank_from_environment() == 0
        time.sleep(pause_s)
        pause_s = min(0.5, 1.5 * pause_s)


def architectures(requested: str, capability: tuple[int, int]) -> str:
    """Return the GPU architectures for which DeepSpeed builds its ops: the requested ones, or that of this GPU.

    DeepSpeed cannot read names such as 9.0a. It would select 9.0a on Hopper GPUs if nothing were requested, and its ops
    do not compile for it.
    """
    if re.fullmatch(rf"\s*{_ARCHITECTURE}([\s;]+{_ARCHITECTURE})*[\s;]*", requested):
        return requested
    own = "{}.{}".format(*capability)
    if requested:
        logger.warning("%s is %r, which DeepSpeed cannot read; its ops are built for %s", ARCHITECTURES, requested, own)
    return own


def quiet_deepspeed() -> None:
    """Set DeepSpeed's log level to WARNING, and hide the deprecation warnings that DeepSpeed's own calls cause."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def wait_if_spare(config: TrainingConfig) -> int | None:
    """Leave the ranks that the batch cannot use out of the run. Every rank calls it before the process group exists.

    On a rank that takes part, set WORLD_SIZE to the number of such ranks and return None. On a spare rank, wait for the
    end of the run and return its exit code.

    Raises:
        ConfigError: torchrun would show the spare ranks of a restart the exit code of the attempt before.
    """
    global _spare_ranks
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
    os.environ["WORLD_SIZE"], _spare_ranks = str(used), ranks - used
    return None


def end_spare_ranks(exit_code: int) -> None:
    """Let spare ranks, if there are any, end with the exit code of the first rank. Every rank may call it."""
    if not _spare_ranks or rank_from_environment() != 0 or not torch.distributed.is_initialized():
        return
    with contextlib.suppress(DistError, MegaclipError):  # the run has ended, whether the store can be reached or not
        store, deadline = connect(_READ_LIMIT_S), time.monotonic() + _READ_LIMIT_S
        store.set(_EXIT_CODE, str(exit_code))
        while store.add(_HAVE_READ, 0) < _spare_ranks and time.monotonic() < deadline:
            time.sleep(0.05)  # the store ends with this process


def usable_ranks(config: TrainingConfig, ranks: int) -> int:
    """Return the largest number of ranks, up to `ranks`, that ds_config.json accepts; 0 if there is none."""
    for number in range(ranks, 0, -1):
        with contextlib.suppress(ConfigError):
            config.batch_layout(number)
            return number
    return 0


def _wait_for_exit_code() -> int:
    """Wait until the first rank has left its exit code, and return it. Return 1 if the first rank is gone.

    SIGUSR1 has no effect meanwhile: Slurm sends it to every process, and the run ends after its step.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.suppress(DistNetworkError, MegaclipError):
        store = connect(_CONNECT_LIMIT_S)
        while not store.check([_EXIT_CODE]):
            time.sleep(0.5)
        exit_code = int(store.get(_EXIT_CODE))
        store.add(_HAVE_READ, 1)
        return exit_code
    time.sleep(_END_LIMIT_S)
    return 1
