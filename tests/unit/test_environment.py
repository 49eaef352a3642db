"""Environment variables are refused in one line, or PyTorch and DeepSpeed can use them."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaclip.environment import check_environment
from megaclip.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT", "DEEPSPEED_TIMEOUT")
NUMBERS = st.sampled_from(["0", "1", "2", "7", "29500", "65536", "-1", "", " ", "x", "1.5", "9" * 20, "٣", "4_0"])
OTHERS = {
    "DS_ACCELERATOR": st.sampled_from(["cpu", "gpu", "", "CPU", "cuda:0", "mps", "xpu"]),
    "MASTER_ADDR": st.sampled_from(["127.0.0.1", "localhost", "", "no-such-host.invalid", "a..b", "x" * 80]),
    "TMPDIR": st.sampled_from(["/tmp", "", "/dev/null", "/proc/nowhere", "relative/nowhere"]),
    "CUDA_VISIBLE_DEVICES": st.sampled_from(["", "0", "-1", "x"]),
}


def refusal(variables: dict[str, str], *, joins_ranks: bool) -> str:
    """Return the message of the error, "" if the variables are accepted."""
    try:
        check_environment(joins_ranks=joins_ranks, variables=variables)
    except ConfigError as error:
        assert error.exit_code == 78
        return str(error)
    return ""


# `python -m megaclip`, which reports at its end whether it has imported PyTorch.
MEGACLIP = """
import atexit, runpy, sys
atexit.register(lambda: print("torch" in sys.modules))
runpy.run_module("megaclip", run_name="__main__")
"""


def run(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in RANKS} | variables
    command = [sys.executable, "-c", MEGACLIP, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(RANKS, NUMBERS) | OTHERS),  # type: ignore[arg-type]
    st.booleans(),
)
def test_variables_are_refused_in_one_line_or_fit_together(variables: dict[str, str], joins_ranks: bool) -> None:
    message = refusal(variables, joins_ranks=joins_ranks)
    if message:
        named = message.split()[0]
        assert "\n" not in message and named in variables
        without = {name: value for name, value in variables.items() if name != named}
        assert not refusal(without, joins_ranks=joins_ranks).startswith(f"{named} ")  # unsetting it helps
        return
    timedelta(minutes=int(variables.get("DEEPSPEED_TIMEOUT", 10)))  # as DeepSpeed reads it
    assert variables.get("DS_ACCELERATOR", "cpu") == "cpu"
    ranks = {name: int(variables[name]) for name in RANKS if name in variables}  # as PyTorch reads them
    assert min(ranks.values(), default=0) >= 0 and ranks.get("MASTER_PORT", 0) < 65536
    size = ranks.get("WORLD_SIZE", 1)
    assert size > 0
    if joins_ranks:
        assert ranks.get("RANK", 0) < size and ranks.get("LOCAL_RANK", 0) < size
        assert size == 1 or ("RANK" in ranks and ranks.get("MASTER_PORT") != 0)


@given(st.integers(1, 64), st.data())
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_variables_of_launchers_are_accepted(ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    local = data.draw(st.integers(0, rank))
    address = {"MASTER_ADDR": "127.0.0.1" if ranks == 1 else "node-0", "MASTER_PORT": "29500"}
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local + 1}
    launched = {name: str(number) for name, number in numbers.items()} | address
    assert not refusal(launched, joins_ranks=True)
    pod = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "node-0.not-yet-known"}
    assert not refusal(pod, joins_ranks=False)


TRAIN = ["train", "--deepspeed_config", "zero3", "--model", "demo-tiny", "--train-data", "x", "--train-steps", "1"]


@pytest.mark.parametrize(
    ("command", "variables", "named"),
    [
        (TRAIN, {"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        (TRAIN, {"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4, but WORLD_SIZE is not set"),
        (TRAIN, {"SLURM_STEP_NUM_TASKS": "2"}, "every process of mpirun or srun would train alone"),
        (["plan"], {"DS_ACCELERATOR": "gpu"}, "DS_ACCELERATOR is 'gpu'"),
        (["launch", "train"], {"DEEPSPEED_TIMEOUT": "ten"}, "DEEPSPEED_TIMEOUT is 'ten'"),
        (["evaluate", "x", "--val-data", "x"], {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "finds no GPU"),
    ],
)
def test_a_command_ends_with_one_line_before_anything_is_started(command, variables, named) -> None:
    done = run(command, variables)
    asks_pytorch = variables.get("DS_ACCELERATOR") == "cuda"
    assert (done.returncode, done.stdout) == (78, f"{asks_pytorch}\n")
    assert done.stderr.count("\n") == 1 and named in done.stderr
