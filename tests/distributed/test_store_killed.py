"""`latest` keeps the previous checkpoint if a rank is killed, or its disk is full, while DeepSpeed writes."""

import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch

from megaclip.checkpoint import manifest, search, store
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.comm.collectives import gather_objects
from megaclip.errors import CheckpointError
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.checks import Outcome, assert_passed, run_checks
from tests.distributed.engine_cases import WORLD_SIZE, Case
from tests.distributed.harness import RankFailure, run_ranks

CASE = Case(stage=2)


def step(engine, number: int) -> None:
    engine_cases.backpropagate(engine, CASE, number)
    engine_cases.set_learning_rate(engine, 0.1)
    engine_cases.update(engine)


def die_once_a_file_is_in(folder: Path) -> None:
    """Kill this process after another rank has started to write."""
    deadline = time.monotonic() + 60
    while not (folder.is_dir() and any(folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def save_then_die_saving(folder: Path) -> None:
    engine = engine_cases.start_engine(CASE)
    step(engine, 0)
    store.save(engine, store.Target(folder, 1, {"step": 1}, keep_last=1))
    step(engine, 1)
    if dist.get_rank() == WORLD_SIZE - 1:
        torch.save = lambda *_, **__: die_once_a_file_is_in(folder / "step_00000002")
    store.save(engine, store.Target(folder, 2, {"step": 2}, keep_last=1))


def check_full_disk(folder: Path, stage: int, full_rank: int) -> None:
    """Rank `full_rank` cannot write more than 2,000 bytes per file. Every rank must raise; a later save must work."""
    folder.mkdir(exist_ok=True)
    engine = engine_cases.start_engine(Case(stage=stage))
    step(engine, 0)
    store.save(engine, store.Target(folder, 1, {"step": 1}, keep_last=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .* GiB are free"):
        store.save(engine, store.Target(folder, 2, {"step": 2}, keep_last=1))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert search.find_latest(folder) == "step_00000001"
    store.save(engine, store.Target(folder, 3, {"step": 3}, keep_last=1))
    assert search.find_latest(folder) == "step_00000003"


def check_damaged_part(folder: Path) -> None:
    """The file of one rank is damaged. Every rank must raise, also at ZeRO-3, where loading ends in a collective."""
    folder.mkdir(exist_ok=True)
    engine = engine_cases.start_engine(Case(stage=3))
    step(engine, 0)
    store.save(engine, store.Target(folder, 3, {"step": 3}, keep_last=1))
    dist.barrier()
    if dist.get_rank() == 0:
        (damaged,) = (folder / "step_00000003").glob("*rank_1_*optim_states.pt")
        damaged.write_bytes(damaged.read_bytes()[:500])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt' cannot be read"):
        load_checkpoint(engine, folder / "step_00000003")


def check_order_of_writing(folder: Path, stage: int) -> None:
    """Every file of every rank must be on the disk before the manifest, and the manifest's folder before `latest`."""
    folder.mkdir(exist_ok=True)
    engine = engine_cases.start_engine(Case(stage=stage))
    step(engine, 0)
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
        tag = store.save(engine, store.Target(folder, 1, {"step": 1}, 1), {"rank": dist.get_rank()})
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


def parameters_after_loading(folder: Path, tag: str) -> tuple[dict, dict]:
    """Return the parameters of two engines: one that has loaded the checkpoint, and one that has trained one step."""
    trained = engine_cases.start_engine(CASE)
    step(trained, 0)
    loaded = engine_cases.start_engine(CASE)
    load_checkpoint(loaded, folder / tag)
    return engine_cases.whole_parameters(loaded), engine_cases.whole_parameters(trained)


def checks(root: Path) -> dict[str, Callable[[], None]]:
    """Return the checks of the launch by name."""
    result: dict[str, Callable[[], None]] = {}
    for stage, full_rank in ((2, 0), (3, 1), (3, 0)):  # rank 0 also copies DeepSpeed's scripts
        folder = root / f"stage{stage}_rank{full_rank}"
        result[f"full disk of rank {full_rank}, ZeRO-{stage}"] = partial(check_full_disk, folder, stage, full_rank)
    for stage in (0, 2, 3):
        folder = root / f"order_stage{stage}"
        result[f"order of writing, ZeRO-{stage}"] = partial(check_order_of_writing, folder, stage)
    return result | {"damaged file": partial(check_damaged_part, root / "damaged")}


def run_all_checks(root: Path) -> Outcome:
    return run_checks(checks(root))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    return run_ranks(run_all_checks, WORLD_SIZE, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("name", checks(Path()))
def test_all_ranks_save_and_fail_together(outcomes, name):
    assert_passed(outcomes, name)


def test_rank_killed_in_a_save_loses_only_that_checkpoint(tmp_path):
    with pytest.raises(RankFailure, match=f"exit code -{signal.SIGKILL:d}"):
        run_ranks(save_then_die_saving, WORLD_SIZE, tmp_path)
    assert any((tmp_path / "step_00000002").iterdir())  # the other rank has written its part
    tag = search.find_latest(tmp_path)
    assert tag == "step_00000001"
    for loaded, trained in run_ranks(parameters_after_loading, WORLD_SIZE, tmp_path, tag):
        assert all((loaded[name] == trained[name]).all() for name in trained)
