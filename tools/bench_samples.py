"""Synthetic samples for tools/bench_train.py: random pictures and captions in memory, in the shape of a data source."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.data import ImageTransform
from megaclip.data.batch import Captions, RawSample
from megaclip.data.source import Account
from megaclip.planner.text_chunks import assumed_length

POOL = 512
"""Number of distinct synthetic images and captions; a sample's id selects one."""
CAPTION_LENGTHS = ("realistic", "full")
"""Lengths of synthetic captions: the distribution of `megaclip.planner.text_chunks`, or the context length."""
WORDS = """a the red blue green small large old new dog cat bird tree house car road lake hill sky sun snow rain street
garden table chair book lamp door window boat horse"""
"""Words that are one token each for CLIP's tokenizer."""


class SyntheticSource:
    """Samples from memory, in the shape of a data source (`megaclip.data.source.Source`)."""

    kind = "synthetic"

    def __init__(self, samples: int, captions: list[str]) -> None:
        """captions: POOL captions."""
        self._captions = captions
        self.account = Account("rows", samples, samples)
        self.checksum = ""
        self.columns = {"image": "memory", "caption": "memory"}
        self.shard_sizes = np.array([samples], dtype=np.int64)
        self.manifest = [["memory", 0, samples]]
        self.image_files = list[str]()

    def __len__(self) -> int:
        return int(self.shard_sizes[0])

    def read(self, row: int) -> RawSample:
        return RawSample(row.to_bytes(8, "little"), self.captions(row), str(row))

    def captions(self, row: int) -> Captions:
        return Captions((self._captions[row % POOL],))

    def shard_name(self, row: int) -> str:
        return "memory"


def synthetic_captions(lengths: str, context_length: int) -> list[str]:
    """Return POOL captions of random words, in random order.

    lengths: one of CAPTION_LENGTHS. Captions that are longer than the context length are truncated by the tokenizer.
    """
    generator = random.Random(0)
    tokens = [context_length if lengths == "full" else assumed_length((row + 0.5) / POOL) for row in range(POOL)]
    generator.shuffle(tokens)
    return [
        " ".join(generator.choices(WORDS.split(), k=count - 2)) for count in tokens
    ]  # start and end of text are tokens too


class SyntheticTransform(ImageTransform):
    """Transform from a row's bytes, read as a number, to pixels (3, size, size) uint8 of a pool of random pictures."""

    def prepare(
        self, content: bytes, seeds: tuple[int, int, int], *, gpu_bytes: int, crop: np.ndarray | None = None
    ) -> Tensor:
        return _pool(self.size)[int.from_bytes(content, "little") % POOL]


_POOLS: dict[int, Tensor] = {}


def _pool(size: int) -> Tensor:
    if size not in _POOLS:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(POOL, 3, max(2, size // 8), max(2, size // 8), generator=generator)
        _POOLS[size] = F.interpolate(coarse, size=(size, size)).mul_(255).to(torch.uint8)
    return _POOLS[size]
