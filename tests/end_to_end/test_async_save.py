"""Runs with --async-save have the checkpoints and losses of synchronous runs. A stop waits for the current save."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megaclip.checkpoint import deepspeed_files, manifest, search
from megaclip.checkpoint.durable import save_tensors
from megaclip.engine.metrics import Metrics
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_by_name, scalars

pytestmark = pytest.mark.long  # its one launch takes half a minute; tests/distributed/test_saves.py is quicker

SLOW_S = 0.3
SIGNALLED_AFTER = 5
STEPS, SAVED = 10, (4, 8, 10)


def slow_down(patch: pytest.MonkeyPatch, name: str) -> None:
    """Delay the writes of this rank, except in the run "synchronous", or let them fail.

    "background" does not finish the save of step 4 before step 8. "full" finds a full disk at step 4.
    """
    if name == "synchronous":
        return
    record, rank = Metrics.record_step, os.environ["RANK"]
    next_save_is_due = threading.Event()

    def slow(content: Any, path: Path) -> Any:
        if name == "background" and path.parent.name == "step_00000004":
            assert next_save_is_due.wait(120)
        time.sleep(SLOW_S)
        if name == "full" and path.parent.name == "step_00000004" and rank == "1":
            raise OSError(28, "No space left on device")
        return save_tensors(content, path)

    def signalling(metrics: Metrics, step: int, *arguments: Any) -> None:
        record(metrics, step, *arguments)
        if step == 8:
            next_save_is_due.set()
        if name == "signalled" and step == SIGNALLED_AFTER and rank == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(deepspeed_files, "save_tensors", slow)
    patch.setattr(Metrics, "record_step", signalling)


def command(tiny_run: Path, logs: Path, name: str, **changes: Any) -> list[str]:
    options = {"train_steps": STEPS, "save_every_steps": 4, "keep_last": 9, "name": name, **changes}
    words = flags(tiny_run, tiny_run / "zero1.json", logs, **options)
    return words if name == "synchronous" else [*words, "--async-save"]


@pytest.fixture(scope="module")
def runs(tiny_run, tmp_path_factory) -> tuple[Path, dict[str, list[Finished]]]:
    """Return the folder of the runs, and how each run ended on each rank."""
    logs = tmp_path_factory.mktemp("async")
    commands = {name: command(tiny_run, logs, name) for name in ("synchronous", "background", "signalled", "full")}
    commands["taken up"] = [*command(tiny_run, logs, "signalled"), "--resume", "auto"]
    return logs, run_by_name(commands, slow_down)


def files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.pt")}


@pytest.mark.parametrize("name", ["background", "taken up"])
def test_checkpoints_and_losses_are_those_of_synchronous_saves(runs, name):
    logs, ends = runs
    assert [end.exit_code for end in ends[name]] == [0] * WORLD_SIZE, ends[name][0].output
    folder = logs / ("signalled" if name == "taken up" else name)
    assert scalars(folder)["train/loss"] == scalars(logs / "synchronous")["train/loss"]
    for step in SAVED:
        tag = f"step_{step:08d}"
        assert files(folder / "checkpoints" / tag) == files(logs / "synchronous" / "checkpoints" / tag)
        assert manifest.find_damage(folder / "checkpoints" / tag) == []


def test_the_log_reports_pauses_and_saves_that_wait(runs):
    logs, ends = runs
    for step in SAVED:
        assert f"saved {logs}/synchronous/checkpoints/step_{step:08d}: training waited" in ends["synchronous"][0].output
    output = ends["background"][0].output
    assert f"saving {logs}/background/checkpoints/step_00000004 in the background: training waited" in output
    assert "saved step_00000004: complete" in output
    assert "step_00000004 is still being written; step_00000008 waits for it" in output
    assert "save less often" in output


def test_a_stop_waits_for_the_save_in_flight(runs):
    logs, ends = runs
    assert [end.exit_code for end in ends["signalled"]] == [128 + signal.SIGTERM] * WORLD_SIZE
    output = ends["signalled"][0].output
    assert output.index("saved step_00000004") < output.index(f"step_{SIGNALLED_AFTER:08d}: training waited")
    assert f"stopped by SIGTERM after step {SIGNALLED_AFTER}" in output
    assert search.is_complete(logs / "signalled" / "checkpoints", "step_00000004")


def test_an_error_ends_the_run_with_one_message_and_keeps_the_last_checkpoint(tiny_run, runs, tmp_path):
    logs, ends = runs
    first, second = ends["full"]
    assert first.exit_code == second.exit_code == 1
    (error,) = first.errors
    assert "cannot write the checkpoint: [Errno 28] No space left on device" in error
    assert not (logs / "full" / "checkpoints" / "latest").exists()
    assert "Traceback" not in first.output + second.output
    shown = scalars(logs / "full")["train/loss"]
    assert 4 < max(shown) <= 8  # training continued, and ended at the latest with the next save
