"""Run a function on n ranks of this machine: `run_ranks(function, world_size, *arguments)`.

Each rank is a process that joins the others through deepspeed.comm and a file store. Ranks are forked from a server
that has loaded `tests.distributed.preload`. A launch takes about a second, so run many cases in one launch. The
function must be at the top level of a test module, and its arguments and result must be picklable.

If a rank fails, the other ranks are ended, and `RankFailure` contains all tracebacks. If the ranks do not finish within
the time limit, `RankFailure` names the ranks that were still running. The caller never waits for ever.
"""

import datetime
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

_PRELOAD = "tests.distributed.preload"
_PASSED_ON = ["OMP_NUM_THREADS", "MEGACLIP_TEST_ERRORS", "PYTEST_CURRENT_TEST"]
"""Environment variables of the caller that are passed to every rank."""
_GRACE_S = 30.0
"""Seconds that the other ranks have to report their own failures after the first failure."""
_EXIT_CODE_S = 60.0
"""Seconds that the server has to report the exit code of a rank that has ended."""


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not finish."""


Result = TypeVar("Result")


def or_traceback(function: Callable[..., Result], *arguments: Any) -> Result | str:
    """Return `function(*arguments)`, or the traceback of its exception.

    Later cases still run. The test of this case reports the traceback.
    """
    try:
        return function(*arguments)
    except Exception:  # any error of the tested code
        return traceback.format_exc()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    time_limit_s: float = 600,
    environment: dict[str, str] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Return the results of `function(*arguments)` on ranks 0 to world_size-1, where deepspeed.comm is initialised.

    Args:
        time_limit_s: limit against hangs. It is far above the duration of any launch on a busy machine.
        environment: variables that are set in every rank before the function runs. Each rank uses OMP_NUM_THREADS
            threads. Default: 1.
        backend: "gloo", or "nccl", which gives every rank a GPU and starts it as a new process instead of a fork.

    Raises:
        RankFailure: a rank raised an exception, died, or did not finish.
    """
    context: Any = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload([_PRELOAD])
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads this variable when the server imports it
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The fork server keeps the environment of its start. Variables that may have changed later are passed to the ranks.
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | (environment or {})
    work = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        processes, reports = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            place = (rank, world_size, os.path.join(folder, "store"), variables, time_limit_s, backend)
            process = context.Process(target=_run_rank, args=(sender, work, *place), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            reports.append(receiver)
        try:
            return _collect(processes, reports, time_limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[BaseProcess], reports: list[Connection], time_limit_s: float) -> list[Any]:
    """Wait for one report (succeeded, value or traceback) from each rank; stop early after a failure."""
    deadline = time.monotonic() + time_limit_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    running = dict(enumerate(reports))
    while running and time.monotonic() < deadline:
        for report in wait(list(running.values()), timeout=max(0.0, deadline - time.monotonic())):
            rank = next(rank for rank, connection in running.items() if connection is report)
            del running[rank]
            try:
                succeeded, value = pickle.loads(report.recv_bytes())
            except EOFError:
                processes[rank].join(_EXIT_CODE_S)  # until the server has reported the exit code
                succeeded, value = False, f"ended without a report, exit code {processes[rank].exitcode}"
            (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if running and not failures:
        raise RankFailure(f"ranks {sorted(running)} did not finish within {time_limit_s} s")
    if failures:
        texts = [f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures)]
        raise RankFailure("\n".join([f"{len(failures)} of {len(processes)} ranks failed", *texts]))
    return [results[rank] for rank in range(len(processes))]


def _run_rank(
    report: Connection,
    work: bytes,
    rank: int,
    world_size: int,
    store: str,
    environment: dict[str, str],
    time_limit_s: float,
    backend: str,
) -> None:
    """Run one rank: set the launcher's variables, join the other ranks, call the function, and report the result."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **environment})
    try:
        _join(rank, world_size, store, time_limit_s, backend)
        if backend == "gloo":  # a fork of the server
            importlib.import_module(_PRELOAD).log_as_rank()
        function, arguments = pickle.loads(work)  # imports the test module
        # Bytes: with `report.send`, a thread of this process would serve a tensor's memory, and this process ends at
        # once.
        report.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:  # also SystemExit and KeyboardInterrupt: the test must see them
        report.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        report.close()
        os._exit(0)  # skips gloo's destructors, which may wait for a rank that has failed


def _join(rank: int, world_size: int, store: str, time_limit_s: float, backend: str) -> None:
    import deepspeed.comm as dist
    import torch

    from megaclip.comm.groups import init_distributed

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        # Longer than the time limit of the caller, which names the ranks that hang.
        timeout=datetime.timedelta(seconds=time_limit_s + _GRACE_S),
    )
    init_distributed(backend)
    dist.barrier()  # if a rank ended now, it would break the connection of a peer that is still connecting
