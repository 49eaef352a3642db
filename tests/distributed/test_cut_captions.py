"""Sorted and cut captions give the losses and gradients of the whole batch with its full padding.

Two AdamW steps with ZeRO-0 to 3 on one and two ranks are compared with `engine_cases.oracle`. The oracle encodes the
padding in one process in float64. In float64 the gradients of cut and padded captions are also compared with plain
PyTorch. Faults are planted in training runs, and the comparison must detect each of them.
"""

import itertools
from collections.abc import Callable

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import resolve
from megaclip.losses import ClipLoss
from megaclip.models import ClipModel, build_model
from megaclip.models.packing import Pieces
from megaclip.step import caption_chunks, gradient_cache
from megaclip.step.batch import DeviceFeed
from megaclip.step.caption_chunks import CaptionChunks
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed import engine_cases, test_engine
from tests.distributed.checks import covering_rows
from tests.distributed.engine_cases import BATCH, CAPTION_MODEL, SEED, TRANSFORM, Case, Outcome, oracle
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.memory_batch import MemoryBatch, PlainEngine
from tests.tolerances import CAPTION_ENGINE, TOWER_GRADIENT, Comparison, assert_close, exceeded, unnoticed

CUT = Case(accumulation=3, captions="cut")
WAYS: dict[str, dict] = {
    "plain": {},
    "padded": {"captions": "padded"},
    "checkpointed": {"checkpointing": "plain"},
    "offloaded": {"offload": "optimizer"},
    "coalesced": {"coalesce": True, "clipping": 0.1},
    "locked below": {"locked": "below"},
    "image locked": {"locked": "image"},
    "text locked": {"locked": "text"},
    "patch dropout": {"patch_dropout": 0.5},
    "siglip": {"loss": "siglip", "embeddings_on_cpu": True},
    "everything": {"offload": "all", "checkpointing": "cpu", "coalesce": True, "patch_dropout": 0.5, "clipping": 0.1},
}
LEAST_STAGE = {"offloaded": 1, "coalesced": 1, "everything": 3}
CHUNKS = ((3, 6), (1, 1), (3, 3), (1, 3), (3, 1))
"""Numbers of image chunks and of text chunks."""
ROWS = covering_rows(WAYS, CHUNKS, (3, 2, 1, 0), (2, 1), possible=lambda row: row[2] >= LEAST_STAGE.get(row[0], 0))
SHORT = {row for way in WAYS for row in [row for row in ROWS if row[0] == way][:2]}
"""The rows that `make test` runs: the first two of each way."""


def case_of(way: str, chunks: tuple[int, int], stage: int, ranks: int) -> Case:
    return Case(stage, chunks[0], text_chunks=chunks[1], ranks=ranks, **{"captions": "cut", **WAYS[way]})


def _one_token_short(patch: pytest.MonkeyPatch) -> None:
    exact = caption_chunks.caption_lengths
    patch.setattr(caption_chunks, "caption_lengths", lambda *given: exact(*given) - 1)


def _cut_one_token_too_early(patch: pytest.MonkeyPatch) -> None:
    exact = caption_chunks.cut_lengths

    def short(longest: list[int], *others) -> list[int]:
        return [min(length, most - 1) for length, most in zip(exact(longest, *others), longest, strict=True)]

    patch.setattr(caption_chunks, "cut_lengths", short)


def _leave_embeddings_sorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_cache, "_batch_order", lambda rows, order: rows)


def _leave_gradients_unsorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_cache, "_chunk_order", lambda rows, order: rows)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "lengths one token short": (_one_token_short, "loss"),
    "cut one token too early": (_cut_one_token_too_early, "loss"),
    "embeddings in the order of the chunks": (_leave_embeddings_sorted, "loss"),
    "gradients in the order of the batch": (_leave_gradients_unsorted, "parameters"),
}
"""Name of a fault -> function that plants it, and the quantity that must exceed its bound."""


def train_all(rows: list[tuple]) -> list[Outcome | str]:
    """Return the outcome of every row on this rank, or its traceback."""
    return [or_traceback(engine_cases.train, case_of(*row)) for row in rows]


def comparisons(got: Outcome | str, expected: Outcome) -> dict[str, Comparison]:
    return test_engine.comparisons(got, expected, CAPTION_ENGINE)


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_steps_equal_one_process_on_the_whole_padded_batch(ranks: int, is_short: bool) -> None:
    rows = [row for row in ROWS if row[-1] == ranks and (row in SHORT) == is_short]
    problems = {}
    for row, *outcomes in zip(rows, *run_ranks(train_all, ranks, rows), strict=True):
        expected = oracle(case_of(*row))
        lines = [line for got in outcomes for line in exceeded(comparisons(got, expected).values())]
        if lines:
            problems[row] = lines
    assert problems == {}


def train_with_faults() -> dict[str, Outcome]:
    outcomes = {}
    for name, (plant, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            outcomes[name] = engine_cases.train(CUT)
    return outcomes


@pytest.fixture(scope="module")
def faulty() -> list[dict[str, Outcome]]:
    return run_ranks(train_with_faults, 2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_comparison(faulty: list[dict[str, Outcome]], name: str) -> None:
    expected, (_, quantity) = oracle(CUT), FAULTS[name]
    assert unnoticed([comparisons(outcomes[name], expected)[quantity] for outcomes in faulty], name) == []


# --- float64, without DeepSpeed, which trains in float32 ---


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


def pieces_of_own_captions(lengths: list[list[int]]) -> list[Pieces]:
    """Return the pieces of one chunk and of two chunks. lengths: numbers of tokens of each rank's captions."""
    text, own = CAPTION_MODEL.text_cfg, lengths[dist.get_rank()]
    tokens = torch.full((len(own), text.context_length), 3)
    tokens[range(len(own)), [length - 1 for length in own]] = text.eos_id
    chunks = [CaptionChunks.cut(tokens, count, text, ranks=resolve()) for count in (1, 2)]
    return [pieces for of_count in chunks for pieces in of_count.pieces]


def test_ranks_cut_at_the_lengths_of_the_longest_captions_of_any_rank() -> None:
    """The ranks then compile the same shapes in the same step."""
    lengths = [[20, 1, 10, 1, 3, 1, 3, 1], [9, 1, 1, 9, 9, 1, 1, 1]]
    alone = [run_ranks(pieces_of_own_captions, 1, [own])[0] for own in lengths]
    assert alone == [
        [((1, 24), (1, 16), (6, 8)), ((4, 24),), ((4, 8),)],
        [((4, 16), (4, 8)), ((4, 16),), ((4, 8),)],
    ]
    for found in run_ranks(pieces_of_own_captions, 2, lengths):
        assert found == [((1, 24), (3, 16), (4, 8)), ((4, 24),), ((4, 8),)]


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
