"""Start a process group without a launcher, on a port that is in use, and with ranks that the batch cannot use."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from megaclip.engine import process_group
from megaclip.engine.process_group import architectures
from megaclip.errors import BusyError, ConfigError, MegaclipError

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import deepspeed.comm as dist
from megaclip.engine.process_group import start_process_group

start_process_group()
dist.barrier(group=dist.new_group([0]))
print("ranks", dist.get_world_size())
"""


def test_architectures_that_deepspeed_cannot_read_are_replaced_by_that_of_the_gpu() -> None:
    for readable in ("9.0", "8.0;9.0", "7.5 8.0 10.0+PTX", "8.0; 9.0+PTX;"):
        assert architectures(readable, (12, 1)) == readable
    for other in ("", "9.0a", "8.0 9.0a", "10.0f", "Hopper", "9"):
        assert architectures(other, (12, 1)) == "12.1"


def test_a_port_in_use_is_an_error_that_names_the_launchers_flag(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other_run:
        port = str(other_run.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(BusyError, match=f"port {port} is in use, .*--master_port"):
            process_group.connect(60.0)


@pytest.mark.parametrize(("ranks", "code"), [("2", 1), ("1", 78)])
def test_a_program_that_closes_its_connections_is_no_first_rank(monkeypatch, ranks, code):
    """The first rank of several may come later, so that a restart may succeed."""
    monkeypatch.setattr(process_group, "_REPORT_S", 0.5)

    def close_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                other.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=close_all, daemon=True).start()
        values = {"RANK": "1", "WORLD_SIZE": ranks, "MASTER_PORT": str(other.getsockname()[1])}
        for name, value in {**values, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MegaclipError, match=r"cannot reach the first rank, 127\.0\.0\.1 at") as error:
            process_group.connect(1.0 if ranks == "2" else 60.0)
        assert error.value.exit_code == code


def test_two_runs_without_a_launcher_can_run_on_one_host():
    variables = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "MASTER_PORT")}
    with socket.socket() as other_run:
        with contextlib.suppress(OSError):  # if another program uses the port already, it serves the test equally well
            other_run.bind(("127.0.0.1", 29500))
            other_run.listen()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**variables, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.stdout.endswith("ranks 1\n"), done.stderr


class Config:
    """A configuration whose batch of 32 is divided by 1, 2, 4 or 8 ranks."""

    path = "ds_config.json"

    def batch_layout(self, ranks):
        if ranks not in (1, 2, 4, 8):
            raise ConfigError("train_batch_size is not divisible")
        return SimpleNamespace()


def test_the_largest_number_of_ranks_that_divides_the_batch_takes_part():
    assert [process_group.usable_ranks(Config(), ranks) for ranks in (1, 3, 7, 8, 9)] == [1, 2, 4, 8, 8]


def set_ranks(monkeypatch, rank, **variables):
    monkeypatch.setattr(process_group, "_spare_ranks", 0)
    values = {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "3", "RANK": str(rank), **variables}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_takes_part_sees_the_smaller_world(monkeypatch):
    set_ranks(monkeypatch, 1)
    assert process_group.wait_if_spare(Config()) is None
    assert (process_group.os.environ["WORLD_SIZE"], process_group._spare_ranks) == ("2", 1)


def test_a_store_that_survives_restarts_is_refused(monkeypatch):
    set_ranks(monkeypatch, 2, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        process_group.wait_if_spare(Config())


def test_a_spare_rank_ends_with_the_exit_code_of_the_first_rank_and_not_with_sigusr1(monkeypatch):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    set_ranks(monkeypatch, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    monkeypatch.setattr(process_group, "_spare_ranks", 1)
    ended = []

    def end_the_run() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm does before the time limit
        monkeypatch.setattr(process_group, "rank_from_environment", lambda: 0)
        monkeypatch.setattr(process_group.torch.distributed, "is_initialized", lambda: True)
        ended.append(time.monotonic())
        process_group.end_spare_ranks(75)

    before = signal.getsignal(signal.SIGUSR1)
    first_rank = threading.Timer(1.0, end_the_run)
    first_rank.start()
    try:
        assert process_group.wait_if_spare(Config()) == 75
        assert ended and time.monotonic() >= ended[0]  # it has waited for the run
    finally:
        first_rank.join()
        signal.signal(signal.SIGUSR1, before)
