"""Training without the deepspeed launcher, on one host, with plain python and with torchrun."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.training_runs import DS_CONFIG, ROOT, flags, launcher_environment, scalars, wait_for_text
from tests.tolerances import RUN, assert_close

# Without "--", torchrun on Python 3.10 and 3.11 refuses --logs as an ambiguous form of its own --logs-specs.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--"]


def losses(start: list[str], tiny_run: Path, logs: Path, *, changes: dict[str, Any] | None = None) -> list[float]:
    """Start launch/train.py with a batch of 32 on any number of ranks. Return the loss of each step.

    changes: settings that --set replaces. The file then has others.
    """
    config = {**DS_CONFIG, "zero_optimization": {"stage": 1}}
    del config["gradient_accumulation_steps"]  # derived from the number of ranks
    logs.mkdir()
    (logs / "ds_config.json").write_text(json.dumps(DS_CONFIG if changes else config))
    words = [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()]
    command = [*start, str(ROOT / "launch/train.py")]
    command += flags(tiny_run, logs / "ds_config.json", logs, set=words or None)
    environment = {key: value for key, value in launcher_environment().items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=logs, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert json.loads((logs / "run" / "settings.json").read_text())["ds_config"] == config
    return [loss for _, loss in sorted(scalars(logs / "run")["train/loss"].items())]


@pytest.mark.long
def test_torchrun_has_the_losses_of_plain_python(tiny_run, tmp_path):
    """The batch can use two of torchrun's three ranks; the third one waits, and ends with the run."""
    one = losses([sys.executable], tiny_run, tmp_path / "python")
    changes = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": None}
    start = [part.replace("_node=2", "_node=3") for part in TORCHRUN]
    two = losses(start, tiny_run, tmp_path / "torchrun", changes=changes)
    assert one[0] != one[1]
    assert_close(two, one, RUN["loss"])


@pytest.mark.long
def test_ranks_save_and_end_after_their_torchrun_has_ended(tiny_run: Path, tmp_path: Path) -> None:
    """The torchrun process holds the store, so the watchdogs of the ranks lose the store."""
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({**DS_CONFIG, "zero_optimization": {"stage": 1}}))
    more = {"train_steps": 100_000, "save_every_steps": 100_000, "hang_timeout": 20}
    command = [*TORCHRUN, str(ROOT / "launch/train.py"), *flags(tiny_run, config, tmp_path, **more)]
    environment = {key: value for key, value in launcher_environment().items() if key not in ("RANK", "WORLD_SIZE")}
    with open(tmp_path / "log", "w") as log:
        torchrun = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            wait_for_text(tmp_path / "log", "step 5/", torchrun)
            ranks = psutil.Process(torchrun.pid).children()
            torchrun.kill()
            torchrun.wait(300)
            _, alive = psutil.wait_procs(ranks, timeout=300)
            assert not alive, (tmp_path / "log").read_text()[-3000:]
        finally:
            torchrun.kill()
            for rank in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if str(tmp_path) in rank.cmdline():
                        rank.kill()
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert int(latest.removeprefix("step_")) >= 5
    assert not (tmp_path / "run" / "lock.json").exists()
