"""A run replaces bad samples and reports their number, over all ranks."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.end_to_end.training_runs import WORLD_SIZE, flags, run_in_ranks, scalars

# None of these is the first substitute of another, because it would then be counted twice.
DAMAGED = (3, 17, 18, 40, 62)
BLANK = (7, 44)
EXPECTED = {"undecodable image": len(DAMAGED), "empty caption": len(BLANK)}


def spoil(source: Path, target: Path) -> None:
    """Copy a shard of 64 scenes, with some images replaced by zeros and some captions by spaces."""
    names: list[str] = []
    with tarfile.open(source) as archive, tarfile.open(target, "w") as copy:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
            name, _, extension = member.name.partition(".")
            if name not in names:
                names.append(name)
            if extension == "jpg" and names.index(name) in DAMAGED:
                content = bytes(len(content))
            if extension == "txt" and names.index(name) in BLANK:
                content = b" " * len(content)
            copy.addfile(member, io.BytesIO(content))
    assert len(names) == 64


@pytest.mark.parametrize("data_offload", ["cpu", "reread"])
def test_bad_samples_are_counted_over_all_ranks(data_offload, tiny_run, tmp_path):
    """Two steps of 32 are one epoch of 64. Every sample counts once, even if it is read twice or ahead of time."""
    spoil(tiny_run / "train" / "00000.tar", tmp_path / "spoilt.tar")
    config = json.loads((tiny_run / "zero1.json").read_text())
    config["megaclip"]["data_offload"] = data_offload
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = {"train_data": tmp_path / "spoilt.tar", "val_data": tmp_path / "spoilt.tar"}
    (ends,) = run_in_ranks([flags(tiny_run, tmp_path / "config.json", tmp_path, **data)])
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
    run = tmp_path / "run"
    assert json.loads((run / "metrics.json").read_text())["bad_samples"] == EXPECTED
    assert scalars(run)["train/bad_samples"] == {2: sum(EXPECTED.values())}
    listed = ", ".join(f"{count} {kind}" for kind, count in EXPECTED.items())
    assert f"bad samples met and replaced until step 2: {listed}" in ends[0].output
    assert f"bad samples left out of the evaluation: {listed}" in ends[0].output
    assert "undecodable image: spoilt.tar/" in ends[1].output
