"""The place where a step's images are kept changes no bit of a run. Failing data end every rank and leave a checkpoint.

All runs share one launch of two ranks. Each pass over a step has more chunks than a window has slots. Bits are compared
on one machine with the same instruction set and number of threads.
"""

import errno
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaclip.data.reading import EvaluationReader, TrainReader
from megaclip.data.workers import shared_pixels
from megaclip.engine import preflight
from megaclip.errors import DataError
from megaclip.planner import Cluster
from megaclip.step import sample_store
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_by_name, scalars, write_config
from tests.tolerances import RUN, assert_close

pytestmark = (
    pytest.mark.long
)  # its one launch of all runs takes a minute; tests/unit/step/test_sample_store.py is quick

STEPS = 7
CHUNKS = 4
SECOND_PASS_OF_STEP_3 = 2 * 2 * CHUNKS + CHUNKS + 1
"""Number of the reader's call. Each step is read twice."""


@dataclass(frozen=True)
class Run:
    """A run of this test: its settings, and the fault on the last rank."""

    megaclip: dict[str, Any]
    flags: dict[str, Any]
    fault: str = ""


RUNS = {
    "cpu": Run({"data_offload": "cpu"}, {}),
    "disk": Run({"data_offload": "disk", "embeddings_offload": True}, {"data_offload_dir": "."}),
    "reread": Run({"data_offload": "reread"}, {"workers": 1}),
    "some kept": Run({"data_offload": "reread", "keep_graphs": 3}, {"workers": 1}),
    "all kept": Run({"keep_graphs": 6}, {}),
    "padded": Run({"data_offload": "reread", "cut_captions": False}, {}),
    "little memory": Run({}, {}, "little memory"),
    "second pass": Run({"data_offload": "reread"}, {}, "second pass"),
    "second pass, resumed": Run({}, {"name": "second pass", "resume": "auto"}),
    "evaluation": Run({}, {"eval_every_steps": 3}, "evaluation"),
    "evaluation, resumed": Run({}, {"name": "evaluation", "resume": "auto"}),
    "disk full": Run({"data_offload": "disk"}, {}, "disk full"),
    "no room": Run({}, {}, "no room"),
}


def misbehave(patch: pytest.MonkeyPatch, name: str) -> None:
    """Make the data or the memory fail on the last rank, or the memory on all ranks if there is "no room"."""
    fault = RUNS[name].fault
    if not fault or (fault != "no room" and os.environ["RANK"] != str(WORLD_SIZE - 1)):
        return
    calls, read = itertools.count(), TrainReader.read

    def failing(self: TrainReader, *arguments: Any, **options: Any) -> Any:
        if next(calls) == SECOND_PASS_OF_STEP_3:
            raise DataError("the archive is gone")
        return read(self, *arguments, **options)

    def unreadable(*_: Any) -> Any:
        raise DataError("the held-out archive is gone")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_memory(shape: tuple[int, ...], file: int = -1) -> Any:
        if file < 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return shared_pixels(shape, file)

    def little_memory() -> None:
        patch.setattr(preflight, "free_host_memory", lambda: 0)
        patch.setattr(sample_store, "shared_pixels", no_memory)

    def no_room() -> None:
        patch.setattr(Cluster, "usable_host_memory", 0.0)
        patch.setattr(Cluster, "usable_disk", 0.0)

    faults: dict[str, Callable[[], None]] = {
        "second pass": lambda: patch.setattr(TrainReader, "read", failing),
        "evaluation": lambda: patch.setattr(EvaluationReader, "read", unreadable),
        "disk full": lambda: patch.setattr(os, "posix_fallocate", full),
        "little memory": little_memory,
        "no room": no_room,
    }
    faults[fault]()


@dataclass
class Ended:
    logs: Path
    ends: dict[str, list[Finished]]
    """Ends of each run, by rank."""

    def error(self, name: str, exit_code: int = 1) -> str:
        """Return the run's error line. Check that every rank exited with `exit_code` and the first one logged it."""
        assert [end.exit_code for end in self.ends[name]] == [exit_code] * WORLD_SIZE, self.ends[name][0].output
        (line,) = self.ends[name][0].errors
        return line

    def losses(self, name: str) -> dict[int, float]:
        return scalars(self.logs / name)["train/loss"]


@pytest.fixture(scope="module")
def ended(tiny_run, tmp_path_factory) -> Ended:
    logs = tmp_path_factory.mktemp("data_offload")
    commands = {}
    for name, run in RUNS.items():
        chunks = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": CHUNKS}
        path = write_config(logs / f"{name}.json", 3, {"text_micro_batch_size": 8, **run.megaclip}, **chunks)
        changes = {"name": name, "train_steps": STEPS, "save_frequency": 0, "force_patch_dropout": 0.5, **run.flags}
        if run.fault == "evaluation":
            changes |= {"val_data": str(tiny_run / "held_out" / "*.tar"), "eval_batch_size": 16}
        commands[name] = flags(tiny_run, path, logs, **changes)
    return Ended(logs, run_by_name(commands, misbehave))


@pytest.mark.parametrize(
    ("name", "line", "plan"),
    [
        ("disk", "data offload: disk: .* of free disk in ", "images are kept on disk"),
        ("reread", "data offload: reread: images of chunks that are encoded twice are read twice", "are read twice"),
        ("some kept", "graphs of 3 of 4 image chunks and 0 of 2 text chunks are kept: megaclip.keep_graphs 3", "twice"),
        ("all kept", "data offload: once: images are read once", "images are read once"),
        # The last rank has no memory for images, so both ranks keep them on disk, and both plans state this.
        ("little memory", "data offload: disk: ", "images are kept on disk"),
    ],
)
def test_every_place_gives_the_same_bits(ended, name, line, plan):
    output = ended.ends[name][0].output
    assert [end.exit_code for end in ended.ends[name]] == [0, 0], output
    assert re.search(line, output) and plan in output
    assert len(ended.losses("cpu")) == STEPS
    assert ended.losses(name) == ended.losses("cpu")


def test_captions_are_cut_by_default_with_the_losses_of_padded_ones(ended):
    cut, padded = (ended.ends[name][0].output for name in ("cpu", "padded"))
    line = r"captions of \d+\.\d tokens on average, in \w+ cut at ([\d, ]+) of 24: (\d+)% of the text tower's"
    (figures,) = re.findall(line, cut)
    lengths, saved = [int(length) for length in figures[0].split(", ")], int(figures[1])
    assert lengths[0] <= 24 and lengths == sorted(lengths, reverse=True) and 0 < saved < 100 * (1 - lengths[-1] / 24)
    assert "captions are encoded with their padding, 24 tokens each: megaclip.cut_captions is false" in padded
    assert_close(
        *([ended.losses(name)[step] for step in range(1, STEPS + 1)] for name in ("cpu", "padded")), RUN["loss"]
    )
    recorded = scalars(ended.logs / "cpu")
    shares = recorded["train/text_positions_saved"]
    assert shares.keys() == set(range(1, STEPS + 1)) and 100 * shares[1] == pytest.approx(saved, abs=0.5)
    assert all(2 < tokens < 24 for tokens in recorded["train/tokens_per_caption"].values())
    assert "train/tokens_per_caption" not in scalars(ended.logs / "padded")


@pytest.mark.parametrize(
    ("name", "message", "saved"),
    [("second pass", "the archive is gone", 2), ("evaluation", "the held-out archive is gone", 3)],
)
def test_failing_data_end_in_a_message_and_a_checkpoint_that_resumes_exactly(ended, name, message, saved):
    assert message in ended.error(name)
    assert f"at step {saved}\n" in ended.ends[f"{name}, resumed"][0].output
    assert [end.exit_code for end in ended.ends[f"{name}, resumed"]] == [0, 0], ended.ends[f"{name}, resumed"][0].output
    assert ended.losses(name) == ended.losses("cpu")


def test_a_full_disk_and_a_batch_that_fits_nowhere_are_refused_before_the_start(ended):
    full, nowhere = ended.error("disk full", 78), ended.error("no room", 78)
    assert "cannot reserve 0.0 MiB in " in full and "No space left on device" in full and "--data-offload-dir" in full
    assert "of disk and has 0.0 MiB to use" in nowhere and '"reread"' in nowhere
    for name in ("disk full", "no room"):
        assert "step 1/" not in ended.ends[name][0].output
