"""A run replaces bad samples and reports their number over all ranks."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.training_runs import Finished, copy_shard, flags, run_in_ranks, scalars, write_config

PLACES = ("cpu", "reread")
# No bad sample is the first substitute for another one, because it would then be counted twice.
DAMAGED = (3, 17, 18, 40, 62)
BLANK = (7, 44)
EXPECTED = {"undecodable image": len(DAMAGED), "empty caption": len(BLANK)}


def spoilt(first: int, number: int, extension: str, content: bytes) -> bytes:
    """Return the content of a member: some images cannot be decoded, and some captions are blank."""
    if extension == "jpg" and first + number in DAMAGED:
        return bytes(len(content))
    return b" " * len(content) if extension == "txt" and first + number in BLANK else content


@dataclass(frozen=True)
class Runs:
    folder: Path
    ends: dict[str, list[Finished]]
    """How each rank ended, by megaclip.data_offload."""


@pytest.fixture(scope="module")
def runs(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps of 32 samples are one epoch of 64, so each sample is used once. It may be read twice, or in advance."""
    folder = tmp_path_factory.mktemp("bad_samples")
    for shard in (0, 1):
        copy_shard(tiny_run / f"train/0000{shard}.tar", folder / f"spoilt{shard}.tar", partial(spoilt, 32 * shard))
    data = {"train_data": folder / "*.tar", "val_data": folder / "*.tar"}
    configs = {place: write_config(folder / f"{place}.json", megaclip={"data_offload": place}) for place in PLACES}
    locks = ["--lock-image", "--lock-text"]  # which give a warning
    commands = [[*flags(tiny_run, path, folder, name=place, **data), *locks] for place, path in configs.items()]
    return Runs(folder, dict(zip(PLACES, run_in_ranks(commands), strict=True)))


@pytest.mark.parametrize("place", PLACES)
def test_bad_samples_are_counted_over_all_ranks_and_the_log_names_the_first_of_each_kind(
    runs: Runs, place: str
) -> None:
    first, second = runs.ends[place]
    assert first.exit_code == second.exit_code == 0, first.output
    assert json.loads((runs.folder / place / "metrics.json").read_text())["bad_samples"] == EXPECTED
    assert scalars(runs.folder / place)["train/bad_samples"] == {2: sum(EXPECTED.values())}
    listed = ", ".join(f"{count} {kind}" for kind, count in EXPECTED.items())
    assert f"bad samples until step 2, bad substitutes included: {listed}" in first.output
    assert f"bad samples left out of the evaluation: {listed}" in first.output
    assert "undecodable image: spoilt" in second.output
    common = "WARNING --lock-image and --lock-text"
    assert common in first.output and common not in second.output
