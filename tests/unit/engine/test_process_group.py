"""Start a process group without a launcher, and on a port that is in use."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaclip.engine.process_group import architectures

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import deepspeed.comm as dist
from megaclip.engine.process_group import start_process_group

start_process_group()
dist.barrier(group=dist.new_group([0]))
print("ranks", dist.get_world_size())
"""


@pytest.mark.parametrize("requested", ["9.0", "8.0;9.0", "7.5 8.0 10.0+PTX", "8.0; 9.0+PTX;"])
def test_architectures_that_deepspeed_can_read_stay(requested: str) -> None:
    assert architectures(requested, (9, 0)) == requested


@pytest.mark.parametrize("requested", ["", "9.0a", "8.0 9.0a", "10.0f", "Hopper", "9"])
def test_other_architectures_are_replaced_by_that_of_the_gpu(requested: str) -> None:
    assert architectures(requested, (12, 1)) == "12.1"


def test_a_port_in_use_is_an_error_that_names_the_launchers_flag():
    with socket.socket() as other_run:
        other_run.bind(("127.0.0.1", 0))
        other_run.listen()
        port = str(other_run.getsockname()[1])
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, **launched, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert f"BusyError: port {port} is in use" in done.stderr and "--master_port" in done.stderr


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
