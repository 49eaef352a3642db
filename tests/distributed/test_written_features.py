"""Writing and finding cached image features on two ranks, with a stand-in for the engine."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from megaclip.data import ImageTransform, open_pairs
from megaclip.data.feature_cache import CachedFeatures
from megaclip.engine import feature_cache
from megaclip.errors import ConfigError
from tests.distributed.engine_cases import MODEL
from tests.distributed.harness import run_ranks
from tests.unit.data.data_samples import CountingTokenizer, write_shards

SAMPLES = 11


class Engine(torch.nn.Module):
    """Stand-in for the engine; `calls` counts the batches that it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.device, self.calls = torch.nn.Module(), torch.device("cpu"), 0
        self.module.visual = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.module.visual.weight)
        torch.nn.init.ones_(self.module.visual.bias)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.float32, torch.float32

    def train_micro_batch_size_per_gpu(self) -> int:
        return 4

    def forward(self, images: torch.Tensor, tokens: None) -> tuple[torch.Tensor, None]:
        self.calls += 1
        return images.flatten(1)[:, : MODEL.embed_dim], tokens


def encoded_batches(folder: Path, model: Any = MODEL) -> int:
    """Return the number of batches that `cached_features` encodes on this rank."""
    engine = Engine()
    inputs = SimpleNamespace(
        train=open_pairs([str(folder / "*.tar")]),
        train_transform=ImageTransform(8),
        tokenizer=CountingTokenizer(),
        model_config=model,
    )
    arguments = SimpleNamespace(
        feature_cache=str(folder / "cache"), workers=0, max_bad_fraction=0, image_key=None, caption_key=None,
        image_root=None,
    )  # fmt: skip
    feature_cache.cached_features(engine, inputs, arguments)  # type: ignore[arg-type]  # stand-ins
    return engine.calls


def changed_file(folder: Path) -> Any:
    if dist.get_rank() == 0:
        os.utime(folder / "00000.tar", (1, 1))
    dist.barrier()
    return MODEL


def counts_after_changes(folder: Path) -> list[int]:
    first = [encoded_batches(folder), encoded_batches(folder)]
    models: list[Callable[[], Any]] = [
        lambda: MODEL.replace(text_cfg={"layers": 3}),
        lambda: MODEL.replace(quick_gelu=True),
        lambda: MODEL.replace(vision_cfg={"head_width": 16}),
        lambda: changed_file(folder),
    ]
    return first + [encoded_batches(folder, model()) for model in models]


def test_a_cache_is_used_only_for_the_same_tower_and_images(tmp_path: Path) -> None:
    """All towers have the same weights; only the text tower may be another. An image is changed in place."""
    write_shards(tmp_path, [5, SAMPLES - 5])
    assert run_ranks(counts_after_changes, 2, tmp_path) == [[2, 0, 0, 2, 2, 2]] * 2


def error_of_disk(folder: Path, name: str) -> str:
    """Return the error if the file of rank 1 is `name`, if this file is locked, or if rank 1 has an own folder."""
    path, gather = CachedFeatures.path, feature_cache.gather_objects
    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("/"):
            patch.setattr(CachedFeatures, "path", lambda self, rank: Path(name) if rank else path(self, rank))
        if name == "own folder" and dist.get_rank():
            own = lambda each: each.replace("/cache", "/own") if isinstance(each, str) else each  # noqa: E731
            patch.setattr(feature_cache, "gather_objects", lambda value: [own(each) for each in gather(value)])
        if name == "lock":
            encoded_batches(folder)
            (cache,) = folder.glob("cache/*")
            (cache / "cache.json").unlink(missing_ok=True)
            dist.barrier()
            lock = (cache / name).open()
            fcntl.flock(lock, fcntl.LOCK_SH)  # by both ranks, as by another run
        try:
            encoded_batches(folder)
        except ConfigError as error:
            return str(error)
    return ""


REASONS = {
    "/dev/full": "No space left on device; free space there, or use another folder",
    "/nowhere/file": "No such file",
    "lock": "another run is writing",
    "own folder": "this host does not see the other hosts' files; use a folder that all hosts share",
}


def errors_of_disk(root: Path) -> list[str]:
    return [error_of_disk(root / str(number), name) for number, name in enumerate(REASONS)]


def test_a_disk_error_of_one_rank_is_one_error_on_all(tmp_path: Path) -> None:
    for number in range(len(REASONS)):
        (tmp_path / str(number)).mkdir()
        write_shards(tmp_path / str(number), [SAMPLES])
    first, second = run_ranks(errors_of_disk, 2, tmp_path, time_limit_s=60)
    assert first == second
    assert [error for error, reason in zip(first, REASONS.values(), strict=True) if reason not in error] == []
    assert not list(tmp_path.glob("*/cache/*/cache.json"))
