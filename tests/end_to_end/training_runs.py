"""Two ways to train in a test: `launch` (the deepspeed launcher) and `run_in_ranks` (ranks of the harness).

A launch takes ten seconds. `run_in_ranks` and `run_by_name` call the same `main(argv)` for several runs, one after the
other, in ranks that have already loaded torch. They return what each run writes to standard error.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megaclip.data import workers
from tests.distributed.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 2
MODEL = {
    "embed_dim": 16,
    "vision_position_init": "sin_cos_2d",
    "vision_cfg": {"image_size": 24, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {
        "context_length": 24,
        "vocab_size": 128,
        "width": 32,
        "heads": 2,
        "layers": 2,
        "eos_id": 2,
        "pool_type": "eos",
    },
}
# Two ranks with two chunks of 8 pairs each: the contrastive batch is 32.
DS_CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        # torch's AdamW, because DeepSpeed's own would have to be compiled first
        "params": {"lr": 0.002, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
    },
    "megaclip": {"loss": "clip", "exchange": "ring", "reduction": "feature"},
}


def write_config(path: Path, stage: int = 1, megaclip: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write DS_CONFIG with this ZeRO stage to a file, and return the path.

    megaclip: changes of the section "megaclip". changes: other settings; None omits a setting.
    """
    section = DS_CONFIG["megaclip"] | (megaclip or {})
    config = DS_CONFIG | {"zero_optimization": {"stage": stage}, "megaclip": section} | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}, indent=1))
    return path


@dataclass
class Finished:
    """Exit code and output of one rank, or of a launcher with all its ranks."""

    exit_code: int
    output: str

    @property
    def errors(self) -> list[str]:
        """Return the lines that the logger has marked as errors, without their times."""
        return [line.split(" ", 1)[1] for line in self.output.splitlines() if " ERROR " in line]


def flags(folder: Path, deepspeed_config: Path, logs: Path, **changes: Any) -> list[str]:
    """Return the command line of a tiny run. changes: flags, named with underscores. None omits a flag."""
    values: dict[str, Any] = {
        "deepspeed_config": deepspeed_config,
        "model": folder / "model.json",
        "train_data": str(folder / "train" / "*.tar"),
        "tokenizer": folder / "tokenizer.model",
        "logs": logs,
        "name": "run",
        "warmup": 1,
        "train_steps": 2,
        "workers": 0,
        "log_every_n_steps": 1,
        **changes,
    }
    command: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}" if name != "deepspeed_config" else "--deepspeed_config"
        if value is not None:
            command += [flag, *map(str, value if isinstance(value, list) else [value])]
    return command


_given: set[int] = set()
"""Ports that `free_port` has returned."""


def free_port() -> int:
    """Return a free port that no other process takes before the launcher uses it. Each call returns another one.

    The port is below the range of outgoing connections and below the default port of launchers. Every parallel process
    of pytest chooses from a different set of ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(20_000 + worker, 29_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for port in random.SystemRandom().sample([port for port in own if port not in _given], 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise RuntimeError("no free port from 20000 to 29000")


def launcher_command(
    arguments: list[str], ranks: int = WORLD_SIZE, script: Path = ROOT / "launch" / "train.py"
) -> list[str]:
    """Return the command that runs `script` under the deepspeed launcher on this machine."""
    launcher = [shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))]
    return [*launcher, "--num_gpus", str(ranks), "--master_port", str(free_port()), str(script), *arguments]


def launcher_environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # contains ninja and the launcher's python
    return {"OMP_NUM_THREADS": "1", **os.environ, "PATH": path, "DS_ACCELERATOR": "cpu"}


def launch(arguments: list[str], ranks: int = WORLD_SIZE) -> Finished:
    """Train under the deepspeed launcher. Wait until it ends."""
    command = launcher_command(arguments, ranks)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=launcher_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return Finished(done.returncode, done.stdout)


def wait_for_text(log: Path, text: str, process: subprocess.Popen) -> None:
    """Wait until a process has written `text` to its log. The process must not end before that."""
    deadline = time.monotonic() + 600
    while text not in log.read_text():
        assert process.poll() is None or text in log.read_text(), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def data_workers(rank: int) -> list[psutil.Process]:
    """Return the data workers of a rank, by their name. Return none if the rank has ended."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(rank).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == workers.NAME:
                    found.append(child)
    return found


Prepare = Callable[[pytest.MonkeyPatch, str], Any]
"""Function that changes a rank before the run with a name, at the top level of a test. The patch ends with the run."""


def run_in_ranks(commands: list[list[str]], world_size: int = WORLD_SIZE) -> list[list[Finished]]:
    """Train with each command, in one launch of the harness. Return `result[command][rank]`."""
    return list(run_by_name({str(number): line for number, line in enumerate(commands)}, None, world_size).values())


def run_by_name(
    commands: dict[str, list[str]], prepare: Prepare | None, world_size: int = WORLD_SIZE
) -> dict[str, list[Finished]]:
    """Train with each command, in one launch of the harness. Return the ends of each run on each rank, by name."""
    with tempfile.TemporaryDirectory() as stores:
        per_rank = run_ranks(_run_all, world_size, commands, prepare, stores)
    return {name: [ends[name] for ends in per_rank] for name in commands}


def _run_all(commands: dict[str, list[str]], prepare: Prepare | None, stores: str) -> dict[str, Finished]:
    allow_data_workers()
    ends = {}
    for number, (name, command) in enumerate(commands.items()):
        with pytest.MonkeyPatch.context() as patch:
            if prepare is not None:
                prepare(patch, name)
            ends[name] = run_here(command, Path(stores) / str(number))
    return ends


def allow_data_workers() -> None:
    """Let this rank of the harness have child processes, which a daemon may not have."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # to have data workers


def run_here(command: list[str], store: Path) -> Finished:
    """Call `main(command)` in this rank. Then join the other ranks again through `store`, because main leaves them."""
    from megaclip.engine.run import main

    with standard_error_kept() as output:
        exit_code = main(command)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.distributed.barrier()  # the next command may exit at once, while another rank is still connecting
    return Finished(exit_code, output())


@contextlib.contextmanager
def standard_error_kept() -> Iterator[Callable[[], str]]:
    """Redirect file descriptor 2 to a file. Yield a function that returns its text after the context has ended."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        text: list[str] = []
        try:
            yield lambda: text[0]
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text.append(file.read())


def copy_shard(source: Path, target: Path, change: Callable[[int, str, bytes], bytes | None]) -> None:
    """Copy a tar shard. change: function of (number of the sample, extension, content) -> content, None to end."""
    names: list[str] = []
    with tarfile.open(source) as archive, tarfile.open(target, "w") as copy:
        for member in archive:
            name, _, extension = member.name.partition(".")
            names += [name] * (name not in names)
            file = archive.extractfile(member)
            assert file is not None
            if (content := change(len(names) - 1, extension, file.read())) is None:
                break
            member.size = len(content)
            copy.addfile(member, io.BytesIO(content))


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return the TensorBoard scalars of a run: name -> step -> value (float32)."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
