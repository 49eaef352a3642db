"""--feature-cache: runs are equal to those that encode all images in every step, and read images only once."""

import os
import shutil
import tarfile
from pathlib import Path

import torch

from megaclip.checkpoint.saved_states import consolidated_weights
from tests.end_to_end.conftest import TRAINING_SCENES
from tests.end_to_end.training_runs import flags, run_in_ranks, write_config

STEPS = 4


def damage_images(shard: Path, members: slice) -> int:
    """Overwrite images of a shard in place, so that names, sizes, places and time stay; return their number."""
    before = shard.stat()
    with tarfile.open(shard) as tar:
        images = [member for member in tar if member.name.endswith(".jpg")][members]
    with shard.open("r+b") as file:
        for member in images:
            file.seek(member.offset_data)
            file.write(b"x" * member.size)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    return len(images)


def weights(logs: Path, name: str) -> dict[str, torch.Tensor]:
    return consolidated_weights(logs / name / "checkpoints", f"step_{STEPS:08d}")


def test_cached_features_train_as_images_do(tiny_run, tmp_path):
    """One image is bad: its substitute must be the same with and without the cache.

    After the first runs all images are damaged. A run with another tower, which has no cache, then fails.
    """
    shutil.copytree(tiny_run / "train", tmp_path / "train")
    shards = sorted((tmp_path / "train").glob("*.tar"))
    assert damage_images(shards[0], slice(13, 14)) == 1  # of the first step
    path = write_config(tmp_path / "config.json", 3, bf16={"enabled": True})
    shared = {
        "train_data": tmp_path / "train/*.tar", "lock_image": [], "no_augmentation": [], "train_steps": STEPS,
        "max_bad_fraction": 0.5, "val_data": tiny_run / "held_out/*.tar", "eval_every_steps": 2,
    }  # fmt: skip
    cache = {"feature_cache": tmp_path / "cache"}
    first = [
        flags(tiny_run, path, tmp_path, name="images", **shared),
        flags(tiny_run, path, tmp_path, name="encoded", **shared, **cache),
    ]
    ends = run_in_ranks(first)
    assert all(end.exit_code == 0 for command in ends for end in command), [command[0].output for command in ends]
    assert "undecodable image: 00000.tar/" in "".join(end.output for end in ends[0])
    (folder,) = cache["feature_cache"].iterdir()
    files = {file.name: file.stat().st_size for file in folder.glob("rank*")}
    assert files == {f"rank{rank}-of-2.bin": TRAINING_SCENES // 2 * (16 * 2 + 1) for rank in range(2)}
    for shard in shards:
        damage_images(shard, slice(None))
    then = [
        flags(tiny_run, path, tmp_path, name="cached", **shared, **cache, stop_after_steps=2),
        flags(tiny_run, path, tmp_path, name="cached", **shared, **cache, resume="auto"),
        flags(tiny_run, path, tmp_path, name="other", **shared | {"seed": 1}, **cache),
    ]
    stopped, resumed, other = run_in_ranks(then)
    assert all(end.exit_code == 0 for end in stopped + resumed), resumed[0].output
    assert "encoding" in ends[1][0].output and "encoding" not in stopped[0].output
    assert "encoding" in other[0].output and "16 substitutes for it are bad" in other[0].output
    expected = weights(tmp_path, "images")
    for name in ("encoded", "cached"):
        for key, value in weights(tmp_path, name).items():
            assert torch.equal(value, expected[key]), (name, key, (value - expected[key]).abs().max())
