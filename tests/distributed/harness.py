"""Run a function on n ranks of this machine: `run_ranks(function, world_size, *arguments)`.

Each rank is a process that joins the others through deepspeed.comm and a file store. Processes fork from a server that
has torch and deepspeed loaded, so a launch takes about a second; still put many cases into one. The function must be
importable (top level of a test module), its arguments and result picklable. If any rank fails, the others are ended and
`RankFailure` shows every traceback; if they do not finish in time, it says which ranks were still running. Nothing
hangs.
"""

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_PASSED_ON = ["OMP_NUM_THREADS", "MEGACLIP_TEST_ERRORS", "PYTEST_CURRENT_TEST"]
_PRELOADED = ["torch", "deepspeed", "pytest"]
# After the first failure: how long the other ranks may take to report their own, which is often the same one.
_GRACE_S = 30.0


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not finish."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    time_limit_s: float = 600,
    environment: dict[str, str] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Results of `function(*arguments)` on ranks 0 to world_size-1; deepspeed.comm is initialised there.

    time_limit_s: against hangs, far above what any launch takes on a loaded machine. environment: set in every rank
    before the function runs. Each rank uses OMP_NUM_THREADS threads, 1 by default. backend: "nccl" gives every rank a
    GPU of its own, and a process that starts from nothing. Raises `RankFailure`.
    """
    context: Any = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(_PRELOADED)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server loads torch
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The fork server keeps the environment of its start, so what may have changed since is passed to each rank.
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
    """Wait for one report (ok, value or traceback) of each rank; stop early once a rank has failed."""
    deadline = time.monotonic() + time_limit_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    running = dict(enumerate(reports))
    while running and time.monotonic() < deadline:
        for report in wait(list(running.values()), timeout=max(0.0, deadline - time.monotonic())):
            rank = next(rank for rank, connection in running.items() if connection is report)
            del running[rank]
            try:
                succeeded, value = report.recv()
            except EOFError:
                processes[rank].join(_GRACE_S)  # the server that forked it tells of its end
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
    """The life of one rank: set the launcher's variables, join the others, run, report."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **environment})
    try:
        _join(rank, world_size, store, time_limit_s, backend)
        function, arguments = pickle.loads(work)  # imports the test: only now, when the rank is known
        report.send((True, function(*arguments)))
    except BaseException:  # whatever ended this rank is the test's finding
        report.send((False, traceback.format_exc()))
    finally:
        report.close()
        os._exit(0)  # a failed peer must not hold this rank in gloo's destructors


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
        timeout=datetime.timedelta(seconds=time_limit_s),
    )
    init_distributed(backend)
    dist.barrier()  # a function that ends at once would break a peer that is still connecting
