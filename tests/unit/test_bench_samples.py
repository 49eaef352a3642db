"""Synthetic captions of tools/bench_train.py: their numbers of tokens for CLIP's tokenizer."""

import statistics

import pytest
import torch

from megaclip.data import load_tokenizer
from megaclip.models import load_model_config
from megaclip.models.text import caption_lengths
from megaclip.planner.text_chunks import assumed_length, mean_positions
from megaclip.step.caption_chunks import CaptionChunks
from tools.bench_samples import POOL, synthetic_captions

TEXT = load_model_config("ViT-B-16").text_cfg


@pytest.fixture(scope="module")
def tokens() -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer("clip", TEXT.context_length)
    return {lengths: tokenizer(synthetic_captions(lengths, TEXT.context_length)) for lengths in ("realistic", "full")}


def test_captions_have_the_lengths_that_the_planner_assumes(tokens: dict[str, torch.Tensor]) -> None:
    counted = caption_lengths(tokens["realistic"], TEXT).tolist()
    assert sorted(counted) == sorted(assumed_length((row + 0.5) / POOL) for row in range(POOL))
    assert counted != sorted(counted) and statistics.mean(counted) == pytest.approx(23.5, abs=0.1)
    assert set(caption_lengths(tokens["full"], TEXT).tolist()) == {77}
    for captions in tokens.values():
        assert len(captions.unique(dim=0)) == POOL


@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_cutting_captions_saves_what_the_planner_assumes(tokens: dict[str, torch.Tensor], count: int) -> None:
    batch = tokens["realistic"].repeat(32, 1)
    chunks = CaptionChunks.cut(batch, count, TEXT)
    planned = 1 - mean_positions(len(batch) // count, count, TEXT) / TEXT.context_length
    assert chunks.saved_share == pytest.approx(planned, abs=0.01)
