"""A run on shards of a web server with faults has the losses of one on local files, bit for bit, also when resumed."""

from functools import partial
from pathlib import Path

import pytest

from megaclip.data import remote
from tests.end_to_end.training_runs import flags, run_by_name, scalars, write_config
from tests.unit.data.web_server import serving

STEPS, SAVED = 5, 3  # an epoch has 4 steps
SIGNATURE = "c0ffee"


def fault(path: str, number: int) -> int | str | None:
    """Every shard is unavailable, cut off and reset in turn, between answers. Those in "gone" are deleted later."""
    if path.startswith("/gone"):
        return 404 if number > 20 and path.endswith("1.tar") else None
    return (None, 503, None, "truncated", None, None, "reset")[number % 7]


def have_own_cache_and_short_pauses(folder: str, patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setenv("XDG_CACHE_HOME", folder)
    patch.setattr(remote, "_FIRST_PAUSE_S", 0.01)


def test_losses_are_those_of_local_files(tiny_run: Path, tmp_path: Path) -> None:
    prepare = partial(have_own_cache_and_short_pauses, str(tmp_path / "cache"))
    config = write_config(tmp_path / "config.json", stage=0, gradient_accumulation_steps=None)
    served, train, runs = tmp_path / "served", tiny_run / "train", tmp_path / "runs"
    served.mkdir()
    for name in ("train", "gone"):
        (served / name).symlink_to(train)

    def command(name: str, data: str, **changes) -> list[str]:
        shared = {"train_steps": STEPS, "save_every_steps": SAVED, "keep_last": 9, "train_data": data}
        return flags(tiny_run, config, runs, **{"name": name, **shared, **changes})

    with serving(served) as server:
        server.fault = fault
        local, remote = str(train / "*.tar"), f"{server.url}/train/*.tar?sig={SIGNATURE}"
        gone = command("gone", f"{server.url}/gone/*.tar?sig={SIGNATURE}", save_every_steps=99)
        # Two of four shards fit: samples of the others are read by ranges.
        cache = {"shard_cache": tmp_path / "shards", "shard_cache_gb": 2.5 * max(map(size_of, train.iterdir())) / 1e9}
        first = {
            "remote": command("remote", remote, workers=1, **cache),
            "local": command("local", local),
            "gone": gone,
        }
        ends = run_by_name(first, prepare)
        then = {}
        for name, origin, data in (("local", "local", local), ("remote", "remote", remote), ("moved", "remote", local)):
            checkpoint = runs / origin / "checkpoints" / f"step_{SAVED:08d}"
            then[f"{name} resumed"] = command(f"{name} resumed", data, resume=checkpoint)
        ends |= run_by_name(then, prepare, 1)
    stopped = ends.pop("gone")
    for run in ends.values():
        assert all(end.exit_code == 0 for end in run), run[0].output
    losses = {run.name: scalars(run)["train/loss"] for run in runs.iterdir()}
    assert losses["remote"] == losses["local"] and len(losses["local"]) == STEPS
    assert losses["remote resumed"] == losses["moved resumed"] == losses["local resumed"]
    assert len(losses["local resumed"]) == STEPS - SAVED

    assert all(end.exit_code == 1 for end in stopped), stopped[0].output
    assert any("1.tar: it does not exist" in error for end in stopped for error in end.errors), stopped[0].output
    assert list((runs / "gone" / "checkpoints").glob("step_*")), "the run ended without a checkpoint"
    recorded = [path.read_text() for path in runs.glob("*/*.json")]
    assert recorded and SIGNATURE not in "\n".join(
        (*recorded, *(end.output for run in (stopped, *ends.values()) for end in run))
    )


def size_of(path: Path) -> int:
    return path.stat().st_size
