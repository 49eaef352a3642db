"""Ranks with different inputs, such as hosts with different copies of the data, end with one error and do not hang."""

import os
import shutil
from pathlib import Path

import pytest

from megaclip.data import open_labelled
from megaclip.engine.equal_inputs import data_text
from megaclip.errors import ConfigError
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, allow_data_workers, flags, run_here, write_config

CASES = {
    "fewer shards": ("--train-data differs", "128 samples", "96 samples"),
    "evaluation on one rank": ("--val-data differs", "32 samples", "no data"),
    "other ds_config": ("--deepspeed_config differs", "checksum"),
    "longer run": ("--train-steps differs", "2 on rank 0", "3 on rank 1"),
    "the same in another folder": (),
}


@pytest.fixture(scope="module")
def ends(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finished]]:
    folder = tmp_path_factory.mktemp("equal_inputs")
    shutil.copytree(tiny_run / "train", folder / "copy")
    (folder / "fewer").mkdir()
    for shard in sorted((tiny_run / "train").glob("*.tar"))[:3]:
        shutil.copy(shard, folder / "fewer")
    other = write_config(folder / "other.json", gradient_clipping=2.0)

    def command(name: str, config: Path = tiny_run / "zero1.json", **changes: object) -> list[str]:
        return flags(tiny_run, config, folder, name=name, **changes)

    of_rank_1 = {
        "fewer shards": command("0", train_data=str(folder / "fewer" / "*.tar")),
        "evaluation on one rank": command("1"),
        "other ds_config": command("2", other),
        "longer run": command("3", train_steps=3),
        "the same in another folder": command("4", train_data=str(folder / "copy" / "*.tar"), workers=1),
    }
    of_rank_0 = [command(str(number)) for number in range(len(CASES))]
    of_rank_0[1] = command("1", val_data=str(tiny_run / "held_out" / "*.tar"))
    pairs = list(zip(of_rank_0, of_rank_1.values(), strict=True))
    per_rank = run_ranks(run_own, WORLD_SIZE, pairs, str(folder))
    return dict(zip(of_rank_1, (list(of_case) for of_case in zip(*per_rank, strict=True)), strict=True))


def run_own(pairs: list[tuple[list[str], list[str]]], stores: str) -> list[Finished]:
    allow_data_workers()
    rank = int(os.environ["RANK"])
    return [run_here(pair[rank], Path(stores) / f"store_{number}") for number, pair in enumerate(pairs)]


@pytest.mark.parametrize("name", CASES)
def test_different_inputs_are_one_error_on_every_rank(ends, name):
    if not CASES[name]:
        assert [end.exit_code for end in ends[name]] == [0] * WORLD_SIZE, ends[name][0].output
        return
    assert [end.exit_code for end in ends[name]] == [ConfigError.exit_code] * WORLD_SIZE
    (error,) = ends[name][0].errors
    assert all(words in error for words in CASES[name]), error
    assert not any("Traceback" in end.output for end in ends[name])


def test_labelled_data_with_other_classes_are_different(tiny_run, tmp_path):
    other = shutil.copytree(tiny_run / "zero_shot", tmp_path / "zero_shot")
    own = data_text(open_labelled(tiny_run / "zero_shot"))
    assert data_text(open_labelled(other)) == own
    names = other / "classnames.txt"
    names.write_text("\n".join(["another", *names.read_text().splitlines()[1:]]) + "\n")
    assert data_text(open_labelled(other)) != own
