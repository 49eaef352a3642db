"""Files of cached image features: which row and file a sample has, bad images, and incomplete caches."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from megaclip.data.batch import BadSample
from megaclip.data.feature_cache import CachedFeatures
from megaclip.engine.feature_cache import _complete


@pytest.mark.parametrize(("samples", "ranks"), [(7, 1), (7, 3), (2, 3), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_is_read_as_the_ranks_of_the_loader_wrote_it(tmp_path, samples, ranks, dtype):
    features = torch.randn(samples, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bad = samples - 1
    cache = CachedFeatures(tmp_path, samples, ranks, 5 * dtype.itemsize)
    for rank in range(ranks):
        rows = [*range(rank, samples, ranks)]  # as `EvaluationLoader` divides them
        content = [features[row].view(torch.uint8).numpy().tobytes() + bytes([row != bad]) for row in rows]
        cache.path(rank).write_bytes(b"".join(content))
    assert cache.is_whole() and cache.size == sum(file.stat().st_size for file in tmp_path.iterdir())
    read = np.stack([cache.read(row) for row in range(samples - 1)])
    assert torch.equal(cache.to_input(torch.from_numpy(read), dtype), features[:-1])
    with pytest.raises(BadSample, match=f"sample {bad} of"):
        cache.read(bad)


def test_only_a_whole_cache_is_used(tmp_path):
    """A killed run leaves no cache.json; a full disk or a power cut may leave short or missing files."""
    cache = CachedFeatures(tmp_path, 5, 2, 4)
    assert _complete(tmp_path, cache) is None
    for rank, rows in enumerate((3, 2)):
        cache.path(rank).write_bytes(bytes(5 * rows))
    assert _complete(tmp_path, cache) is None
    (tmp_path / "cache.json").write_text(json.dumps({"ranks": 2}))
    assert _complete(tmp_path, dataclasses.replace(cache, ranks=7)) == cache  # written by another number of ranks
    (tmp_path / "cache.json").write_text("{")
    assert _complete(tmp_path, cache) is None
    (tmp_path / "cache.json").write_text(json.dumps({"ranks": 2}))
    cache.path(1).write_bytes(bytes(9))
    assert _complete(tmp_path, cache) is None
    cache.path(1).unlink()
    assert _complete(tmp_path, cache) is None
