"""Sorted and cut captions have the gradients of the whole padded batch, in float64 and without DeepSpeed.

tests/distributed/test_engine.py compares steps of DeepSpeed, which trains in float32.
"""

import itertools

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.losses import ClipLoss
from megaclip.models import ClipModel, build_model
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed import engine_cases
from tests.distributed.engine_cases import BATCH, CAPTION_MODEL, SEED, TRANSFORM
from tests.distributed.harness import run_ranks
from tests.distributed.memory_batch import MemoryBatch, PlainEngine
from tests.tolerances import TOWER_GRADIENT, assert_close


def float64_model(pool_type: str) -> ClipModel:
    torch.manual_seed(SEED)
    return build_model(CAPTION_MODEL.replace(text_cfg={"pool_type": pool_type})).double()


def captions_of(pool_type: str, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return pixels and tokens. For "argmax" the end of text is the highest id, 31. Random tokens follow it."""
    images, tokens = engine_cases.share_of(0, rank, ranks, True)
    if pool_type == "argmax":
        tokens = torch.where(tokens == 31, 30, tokens)
        tokens = torch.where(tokens == CAPTION_MODEL.text_cfg.eos_id, 31, tokens)
    return images, tokens


def float64_gradients(pool_type: str, cut: bool, text_chunks: int) -> tuple[dict[str, np.ndarray], int]:
    """Return the gradients of the mean loss over all ranks, and the token positions of this rank's text tower."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, tokens = captions_of(pool_type, rank, ranks)
    model = float64_model(pool_type)
    engine = PlainEngine(model)
    feed = DeviceFeed(engine.device, torch.float64, TRANSFORM.normalise)
    config = model.config.text_cfg if cut else None
    batch = MemoryBatch(images.chunk(3), tokens, feed, text_chunks=text_chunks, cut=config)
    log_scale = model.logit_scale.detach()
    accumulate_gradients(engine, ClipLoss(), batch, log_scale, RandomState(0, 0, rank), coalesce=False)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    means = {name: (sum_over_ranks(gradient) / ranks).numpy() for name, gradient in gradients.items()}
    return means, engine.text_positions


WAYS_IN_FLOAT64 = list(itertools.product(("eos", "argmax"), (False, True), (1, 3)))


def all_float64_gradients() -> list[tuple[dict[str, np.ndarray], int]]:
    return [float64_gradients(*way) for way in WAYS_IN_FLOAT64]


def plain_gradients(pool_type: str) -> dict[str, Tensor]:
    """Return the gradients of cross-entropy over the whole padded batch, computed by autograd."""
    model = float64_model(pool_type)
    images, tokens = captions_of(pool_type)
    x, y, log_scale = model(TRANSFORM.normalise(images, torch.float64), tokens)
    logits, labels = log_scale.exp() * x @ y.T, torch.arange(BATCH)
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_cut_and_padded_captions_equal_plain_pytorchs_in_float64(world_size: int) -> None:
    outcomes = run_ranks(all_float64_gradients, world_size)
    for number, (pool_type, cut, text_chunks) in enumerate(WAYS_IN_FLOAT64):
        expected = plain_gradients(pool_type)
        positions = 0
        for rank in outcomes:
            gradients, own_positions = rank[number]
            positions += own_positions
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_close(gradients[name], gradient, TOWER_GRADIENT, f"{name}, {pool_type}, cut {cut}")
        # Two passes. A chunk of 12 captions is divided into pieces. One chunk of 6 on each of two ranks is cut as a
        # whole, at the longest caption of the batch.
        full = 2 * BATCH * CAPTION_MODEL.text_cfg.context_length
        saves = cut and (world_size == 1 or text_chunks > 1)
        assert positions < 0.7 * full if saves else positions > 0.7 * full, (pool_type, cut, text_chunks, positions)
