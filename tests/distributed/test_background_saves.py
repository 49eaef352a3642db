"""A checkpoint that is written while training continues equals a synchronous one of the same step, byte for byte.

The writing thread is delayed until training has changed all parameters and optimizer states.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from megaclip.checkpoint import deepspeed_files, manifest, search, store
from megaclip.checkpoint.background import BackgroundSaves, Saved
from megaclip.checkpoint.durable import save_tensors
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.store import Target
from megaclip.comm.collectives import gather_objects
from megaclip.errors import CheckpointError
from megaclip.planner import Workload
from megaclip.planner.states import checkpoint_bytes
from tests.distributed import engine_cases
from tests.distributed.checks import Outcome, assert_passed, run_checks
from tests.distributed.engine_cases import WORLD_SIZE, Case
from tests.distributed.harness import RankFailure, run_ranks

COLLECTIVES = ("barrier", "broadcast", "all_reduce", "all_gather_into_tensor", "all_gather_object")
CASES = {
    "ZeRO-0": Case(stage=0),
    "ZeRO-2, bf16": Case(stage=2, bf16=True),
    "ZeRO-3, a locked tower, bf16": Case(stage=3, locked="image", bf16=True),
}


def step(engine, case: Case, number: int) -> None:
    engine_cases.backpropagate(engine, case, number % engine_cases.STEPS)
    engine_cases.set_learning_rate(engine, 0.1)
    engine_cases.update(engine)


@contextmanager
def slow_writer() -> Iterator[threading.Event]:
    """Block all file writes until the event that this function yields is set."""
    released = threading.Event()

    def slow(content: Any, path: Path) -> Any:
        assert released.wait(60)
        return save_tensors(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_files, "save_tensors", slow)
        yield released


def complete(saves: BackgroundSaves) -> Saved:
    """Poll as a training loop does, until the save is complete."""
    deadline = time.monotonic() + 60
    while (saved := saves.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return saved


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Return the content of all files but the manifest, which contains the time."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in files}


def check_equals_synchronous(folder: Path, case: Case) -> None:
    """Compare two background saves, the second in the memory of the first, with synchronous saves of the same steps."""
    for name in ("synchronous", "background"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    engine, saves = engine_cases.start_engine(case), BackgroundSaves()
    loss_state = {"rank": dist.get_rank()}
    towers = {"image_unlocked": 0 if case.locked else None}
    job = Workload.of(engine_cases.model_of(case), engine_cases.training_config(case), WORLD_SIZE, **towers)
    each, first = checkpoint_bytes(job)
    planned = each + (first if dist.get_rank() == 0 else 0.0)
    for number in (1, 3):
        step(engine, case, number)
        now, later = (Target(folder / name, number, {"step": number}, 9) for name in ("synchronous", "background"))
        tag = store.save(engine, now, loss_state)
        with slow_writer() as released:
            saves.start(engine, later, loss_state)
            step(engine, case, number + 1)
            assert saves.poll() is None and saves.in_flight == tag
            dist.barrier()
            assert not search.is_complete(later.folder, tag)
            released.set()
            assert complete(saves).tag == tag
        assert saves.in_flight is None and saves.poll() is None
        copied = sum(buffer.nbytes() for buffer in saves._copies._buffers)
        assert abs(copied - planned) <= 0.01 * planned + 100, (copied, planned)
        expected, found = contents(now.folder / tag), contents(later.folder / tag)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        assert (later.folder / search.LATEST).read_text() == tag
        assert manifest.find_damage(later.folder / tag) == []
        assert manifest.read(later.folder / tag).files == manifest.read(now.folder / tag).files
    assert contents(now.folder / "step_00000001") != contents(now.folder / "step_00000003")


def check_error(folder: Path, failing: int) -> None:
    """One rank cannot write. The next poll must raise on all ranks, `latest` must stay, and a later save must work."""
    folder.mkdir(exist_ok=True)
    case = Case(stage=2)
    engine, saves = engine_cases.start_engine(case), BackgroundSaves()
    step(engine, case, 0)
    store.save(engine, Target(folder, 1, {}, 1))

    def full(content: Any, path: Path) -> Any:
        if dist.get_rank() == failing:
            raise OSError(28, "No space left on device")
        time.sleep(0.5)  # the other rank is still writing when the error is found
        return save_tensors(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_files, "save_tensors", full)
        saves.start(engine, Target(folder, 2, {}, 1), None)
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .*No space left.* GiB are free"):
            complete(saves)
    assert saves.in_flight is None
    assert search.find_latest(folder) == "step_00000001"
    saves.start(engine, Target(folder, 3, {}, 1), None)
    saved = saves.finish()
    assert saved is not None and saved.tag == search.find_latest(folder) == "step_00000003"


def check_error_of_publishing(folder: Path) -> None:
    """The first rank cannot write the manifest, which no other rank writes. All ranks must raise."""
    folder.mkdir(exist_ok=True)
    case = Case(stage=2)
    engine, saves = engine_cases.start_engine(case), BackgroundSaves()
    step(engine, case, 0)
    store.save(engine, Target(folder, 1, {}, 1))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.manifest, "write", full)
        saves.start(engine, Target(folder, 2, {}, 1), None)
        with pytest.raises(CheckpointError, match=r"No space left"):
            saves.finish()
    assert search.find_latest(folder) == "step_00000001"


def check_no_collective_in_threads(folder: Path) -> None:
    """Collectives of a second thread could interleave with those of training."""
    folder.mkdir(exist_ok=True)
    case = Case(stage=3)
    engine, saves = engine_cases.start_engine(case), BackgroundSaves()
    step(engine, case, 0)
    wrong: list[str] = []

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                wrong.append(name)
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in itertools.product((dist, torch.distributed), COLLECTIVES):
            patch.setattr(module, name, guarded(name, getattr(module, name)))
        saves.start(engine, Target(folder, 1, {}, 1), None)
        saves.finish()
    assert gather_objects(wrong) == [[]] * WORLD_SIZE


def checks(root: Path) -> dict[str, Callable[[], None]]:
    """Return the checks of the launch by name."""
    result: dict[str, Callable[[], None]] = {}
    for name, case in CASES.items():
        result[f"equal files, {name}"] = partial(check_equals_synchronous, root / name, case)
    for rank in range(WORLD_SIZE):
        result[f"error of rank {rank}"] = partial(check_error, root / f"error{rank}", rank)
    return result | {
        "error of the manifest": partial(check_error_of_publishing, root / "manifest"),
        "collectives": partial(check_no_collective_in_threads, root / "collectives"),
    }


def run_all_checks(root: Path) -> Outcome:
    return run_checks(checks(root))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    return run_ranks(run_all_checks, WORLD_SIZE, tmp_path_factory.mktemp("background"))


@pytest.mark.parametrize("name", checks(Path()))
def test_background_saves(outcomes, name):
    assert_passed(outcomes, name)


def die_while_saving(folder: Path, files_of_the_other_rank: bool) -> None:
    """Save twice. The last rank is killed during the second save, while training continues."""
    case = Case(stage=2)
    engine, saves = engine_cases.start_engine(case), BackgroundSaves()
    step(engine, case, 0)
    saves.start(engine, Target(folder, 1, {"step": 1}, keep_last=1), None)
    saves.finish()
    step(engine, case, 1)
    is_last_rank = dist.get_rank() == WORLD_SIZE - 1
    with slow_writer() as released:
        if files_of_the_other_rank and not is_last_rank:
            released.set()
        saves.start(engine, Target(folder, 2, {"step": 2}, keep_last=1), None)
        step(engine, case, 2)
        saves.poll()
        if is_last_rank:
            deadline = time.monotonic() + 60
            while files_of_the_other_rank and not list((folder / "step_00000002").glob("*.pt")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        complete(saves)


@pytest.mark.parametrize("files_of_the_other_rank", [False, True])
def test_rank_killed_with_a_save_in_flight_loses_only_that_checkpoint(tmp_path, files_of_the_other_rank):
    with pytest.raises(RankFailure, match=f"exit code -{signal.SIGKILL:d}"):
        run_ranks(die_while_saving, WORLD_SIZE, tmp_path, files_of_the_other_rank)
    assert any((tmp_path / "step_00000002").glob("*.pt")) == files_of_the_other_rank
    assert search.find_latest(tmp_path) == "step_00000001"
    assert manifest.find_damage(tmp_path / "step_00000001") == []
