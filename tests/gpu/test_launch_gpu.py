"""`megaclip launch` with two halves of this host as hosts: a rank is killed, and then one half is lost.

tests/end_to_end/test_two_hosts.py tests more faults, on CPUs. This test covers restarts with NCCL.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from tests.end_to_end.training_runs import DS_CONFIG, ROOT, free_port

pytestmark = pytest.mark.gpu

LIMIT_S = 240.0
RANKS = max(1, torch.cuda.device_count() // 2)
"""Ranks of a half."""


class Half:
    """A launcher with the ranks of one half."""

    def __init__(self, number: int, port: int, command: list[str], log: Path) -> None:
        self.log = log
        own = ["--nnodes", "1:2", "--nproc-per-node", str(RANKS), "--max-restarts", "3", "--local-addr", "127.0.0.1"]
        own += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={1 - number},last_call_timeout=3"]
        gpus = ",".join(str(number * RANKS + rank) for rank in range(RANKS))
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": f"{ROOT}:{os.getenv('PYTHONPATH', '')}"}
        with open(log, "w") as output:
            words = [sys.executable, "-m", "megaclip", "launch", *own, *command]
            self.process = psutil.Popen(words, env=variables, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.process.children() if "train" in child.cmdline()]

    def lose(self) -> None:
        """Kill the launcher and all its processes, as a power cut would."""
        for process in [self.process, *self.process.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def half(number: int, port: int, command: list[str], log: Path) -> Iterator[Half]:
    started = Half(number, port, command, log)
    try:
        yield started
    finally:
        if started.process.is_running():
            started.lose()


def starts(log: Path) -> list[tuple[int, int]]:
    """Return (steps done, number of ranks) of each start of the training."""
    found = re.findall(r"INFO training steps (\d+) to.* = (\d+) ranks?", log.read_text())
    return [(int(step), int(ranks)) for step, ranks in found]


def wait_for(condition: Callable[[], object], log: Path) -> float:
    """Return the seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIMIT_S, log.read_text()[-4000:]
        time.sleep(0.1)
    return time.monotonic() - began


def test_launch_resumes_after_a_killed_rank_and_on_the_other_half(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("requires 2 GPUs")
    (tmp_path / "pictures").mkdir()
    for number in range(512):
        Image.new("RGB", (32, 32), (number % 256, number // 2, 99)).save(tmp_path / f"pictures/{number:04}.png")
        (tmp_path / f"pictures/{number:04}.txt").write_text(f"picture {number}")
    config = {key: value for key, value in DS_CONFIG.items() if key != "gradient_accumulation_steps"}
    config |= {"train_micro_batch_size_per_gpu": 4, "megaclip": {"compile": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"deepspeed_config": "config.json", "model": "demo-tiny", "train-data": "pictures", "logs": "logs"}
    flags = {name: str(tmp_path / value) if (tmp_path / value).exists() else value for name, value in flags.items()}
    flags |= {"logs": str(tmp_path / "logs"), "name": "run", "resume": "auto", "train-steps": "100000"}
    flags |= {"save-every-steps": "5", "keep-last": "3", "workers": "1", "log-every-n-steps": "1", "warmup": "1"}
    command = ["train", *(word for name, value in flags.items() for word in (f"--{name}", value))]
    port = free_port()
    with ExitStack() as stack:
        first, second = (stack.enter_context(half(n, port, command, tmp_path / f"log{n}")) for n in (0, 1))
        log = first.log

        def steps_of_start(number: int) -> Callable[[], object]:
            def taken() -> object:
                begun = starts(log)
                return len(begun) >= number and f" step {begun[number - 1][0] + 12}/" in log.read_text()

            return taken

        wait_for(steps_of_start(1), log)
        second.ranks()[-1].send_signal(signal.SIGKILL)
        killed_s = wait_for(steps_of_start(2), log)
        second.lose()
        lost_s = wait_for(steps_of_start(3), log)
        assert [ranks for _, ranks in starts(log)] == [2 * RANKS, 2 * RANKS, RANKS]
        steps = [step for step, _ in starts(log)]
        assert 10 <= steps[1] < steps[2] and not any(step % 5 for step in steps)  # resumed from checkpoints
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(LIMIT_S) == 143, log.read_text()[-4000:]
    record_property("12 steps after a killed rank", f"{killed_s:.1f} s, resumed at step {steps[1]}")
    record_property("12 steps after a lost half", f"{lost_s:.1f} s, resumed at step {steps[2]}")
