"""Checkpoints that are saved at once, and while training continues: their files, their order, and errors of one rank.

A background save equals a synchronous one of the same step, byte for byte. Its writing thread is delayed until training
has changed all parameters and optimizer states. If a rank cannot write or is killed, `latest` keeps the previous
checkpoint.
"""

import errno
import itertools
import os
import resource
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
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import deepspeed_files, manifest, search, store
from megaclip.checkpoint.background import BackgroundSaves
from megaclip.checkpoint.durable import save_tensors
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.store import Target
from megaclip.comm.collectives import gather_objects
from megaclip.errors import CheckpointError
from megaclip.planner import Workload
from megaclip.planner.states import checkpoint_bytes
from megaclip.zero.reshard import load_checkpoint
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
LIMIT_S = 60


def step(engine: DeepSpeedEngine, case: Case, number: int) -> None:
    engine_cases.backpropagate(engine, case, number % engine_cases.STEPS)
    engine_cases.set_learning_rate(engine, 0.1)
    engine_cases.update(engine)


def engine_after_a_step(folder: Path, case: Case) -> DeepSpeedEngine:
    """Create the folder of the checkpoints, and return an engine that has taken a step."""
    folder.mkdir(exist_ok=True)
    engine = engine_cases.start_engine(case)
    step(engine, case, 0)
    return engine


def save(engine: DeepSpeedEngine, target: Target, saves: BackgroundSaves | None) -> None:
    """Save at once, or with `saves` in the background."""
    if saves is None:
        store.save(engine, target)
    else:
        saves.start(engine, target, None)
        saves.finish()


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@contextmanager
def slow_writer() -> Iterator[threading.Event]:
    """Block all file writes until the event that this function yields is set."""
    released = threading.Event()

    def slow(content: Any, path: Path) -> Any:
        assert released.wait(LIMIT_S)
        return save_tensors(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_files, "save_tensors", slow)
        yield released


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
            assert not saves.poll() and saves.in_flight == tag
            dist.barrier()
            assert not search.is_complete(later.folder, tag)
            released.set()
            wait_until(saves.poll)
        assert saves.in_flight is None and not saves.poll()
        copied = sum(buffer.nbytes() for buffer in saves._copies._buffers)
        assert abs(copied - planned) <= 0.01 * planned + 100, (copied, planned)
        expected, found = contents(now.folder / tag), contents(later.folder / tag)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        assert (later.folder / search.LATEST).read_text() == tag
        assert manifest.find_damage(later.folder / tag) == []
        assert manifest.read(later.folder / tag).files == manifest.read(now.folder / tag).files
    assert contents(now.folder / "step_00000001") != contents(now.folder / "step_00000003")


@contextmanager
def full_disk(rank: int | None) -> Iterator[None]:
    """Let one rank write at most 2,000 bytes per file. None: the first rank cannot write the manifest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank is None:
            patch.setattr(manifest, "write_atomically", no_space)
        if rank == dist.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_full_disk(folder: Path, stage: int, rank: int | None, *, background: bool) -> None:
    """Check that every rank raises the error of one rank, and that a later save works. rank: see `full_disk`."""
    engine = engine_after_a_step(folder, Case(stage=stage))
    saves = BackgroundSaves() if background else None
    save(engine, Target(folder, 1, {}, keep_last=1), saves)
    with full_disk(rank), pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .* GiB are free"):
        save(engine, Target(folder, 2, {}, keep_last=1), saves)
    assert saves is None or saves.in_flight is None
    assert search.find_latest(folder) == "step_00000001"
    save(engine, Target(folder, 3, {}, keep_last=1), saves)
    assert search.find_latest(folder) == "step_00000003"


def check_damaged_part(folder: Path) -> None:
    """The file of one rank is damaged. Every rank must raise, also at ZeRO-3, where loading ends in a collective."""
    engine = engine_after_a_step(folder, Case(stage=3))
    store.save(engine, Target(folder, 3, {}, keep_last=1))
    dist.barrier()
    if dist.get_rank() == 0:
        (damaged,) = (folder / "step_00000003").glob("*rank_1_*optim_states.pt")
        damaged.write_bytes(damaged.read_bytes()[:500])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt' cannot be read"):
        load_checkpoint(engine, folder / "step_00000003")


def check_order_of_writing(folder: Path, stage: int) -> None:
    """Every file of every rank must be on the disk before the manifest, and the manifest's folder before `latest`."""
    engine = engine_after_a_step(folder, Case(stage=stage))
    events: list[tuple[float, str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append((time.monotonic(), "fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def recorded_replace(source: Path, target: Path) -> None:
        events.append((time.monotonic(), "replace", str(target)))
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recorded_fsync)
        patch.setattr(os, "replace", recorded_replace)
        tag = store.save(engine, Target(folder, 1, {}, 1), {"rank": dist.get_rank()})
    files = manifest.read(folder / tag).files
    ranks = range(WORLD_SIZE)
    assert {f"loss_rank_{rank:05d}.pt" for rank in ranks} | {"state.json"} < files.keys()
    assert len([name for name in files if name.endswith("optim_states.pt")]) == (WORLD_SIZE if stage else 0)
    assert files.keys() | {MANIFEST} == {path.name for path in (folder / tag).iterdir()}
    times: dict[tuple[str, str], float] = {}  # time of the last event of each kind on any rank; ranks share the clock
    for when, *event in sorted(event for events_of_rank in gather_objects(events) for event in events_of_rank):
        times[event[0], event[1]] = when
    written = times["replace", str(folder / tag / MANIFEST)]
    assert all(times["fsync", str(folder / tag / name)] < written for name in files if name != "state.json")
    assert times["replace", str(folder / tag / "state.json")] < written < times["fsync", str(folder / tag)]
    assert times["fsync", str(folder / tag)] < times["replace", str(folder / "latest")] < times["fsync", str(folder)]


def check_no_collective_in_threads(folder: Path) -> None:
    """Collectives of a second thread could interleave with those of training."""
    engine = engine_after_a_step(folder, Case(stage=3))
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
        save(engine, Target(folder, 1, {}, 1), BackgroundSaves())
    assert gather_objects(wrong) == [[]] * WORLD_SIZE


def checks(root: Path) -> dict[str, Callable[[], None]]:
    """Return the checks of the launch by name."""
    result: dict[str, Callable[[], None]] = {}
    for name, case in CASES.items():
        result[f"equal files, {name}"] = partial(check_equals_synchronous, root / name, case)
    for stage, rank, background in ((2, 0, False), (3, 1, False), (3, 0, False), (2, 0, True), (2, 1, True)):
        name = f"full disk of rank {rank}, ZeRO-{stage}{', background' * background}"
        result[name] = partial(check_full_disk, root / name, stage, rank, background=background)
    for stage in (0, 2, 3):
        result[f"order of writing, ZeRO-{stage}"] = partial(check_order_of_writing, root / f"order{stage}", stage)
    return result | {
        "no manifest": partial(check_full_disk, root / "manifest", 2, None, background=True),
        "damaged file": partial(check_damaged_part, root / "damaged"),
        "collectives": partial(check_no_collective_in_threads, root / "collectives"),
    }


def run_all_checks(root: Path) -> Outcome:
    return run_checks(checks(root))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    return run_ranks(run_all_checks, WORLD_SIZE, tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("name", checks(Path()))
def test_all_ranks_save_and_fail_together(outcomes, name):
    assert_passed(outcomes, name)


def die_while_saving(folder: Path, background: bool) -> None:
    """Save twice. The last rank is killed in the second save, when another rank has started to write."""
    case, saves = Case(stage=2), BackgroundSaves() if background else None
    engine = engine_after_a_step(folder, case)
    save(engine, Target(folder, 1, {}, keep_last=1), saves)
    step(engine, case, 1)

    def die(*_: Any) -> None:
        wait_until(lambda: list((folder / "step_00000002").glob("*")))
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == WORLD_SIZE - 1:
        deepspeed_files.save_tensors = die
    save(engine, Target(folder, 2, {}, keep_last=1), saves)


@pytest.mark.parametrize("background", [False, True])
def test_rank_killed_in_a_save_loses_only_that_checkpoint(tmp_path, background):
    with pytest.raises(RankFailure, match=f"exit code -{signal.SIGKILL:d}"):
        run_ranks(die_while_saving, WORLD_SIZE, tmp_path, background)
    assert any((tmp_path / "step_00000002").iterdir())  # the other rank has written its part
    assert search.find_latest(tmp_path) == "step_00000001"
    assert manifest.find_damage(tmp_path / "step_00000001") == []
