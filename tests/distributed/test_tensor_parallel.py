"""Training with tensor-parallel towers equals one process on the whole batch.

Two AdamW steps are compared with `engine_cases.oracle` in float64: every pair of settings on two ranks as one replica,
and some cases on four ranks, as two replicas of two ranks and as one replica. All cases of one layout share one launch,
because DeepSpeed keeps the groups of a process. The last tests show that the comparison can fail.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch import Tensor

from megaclip.comm.collectives import gather_integers, gather_objects
from megaclip.comm.groups import RankGroup
from megaclip.models import layers
from megaclip.models.layers import LayerFactory, split_dim
from megaclip.zero import optimizers
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed import engine_cases
from tests.distributed.checks import covering_rows
from tests.distributed.engine_cases import Case, Outcome, oracle
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_engine import comparisons
from tests.tolerances import CAPTION_ENGINE, ENGINE, exceeded, unnoticed

pytestmark = MEGATRON

RANKS = 2


def is_possible(row: dict[str, Any]) -> bool:
    stage, offload = row.get("stage"), row.get("offload")
    return not (stage == 0 and (offload or row.get("coalesce"))) and (offload != "all" or stage in (3, None))


ROWS = covering_rows(
    is_possible,
    stage=(0, 1, 2, 3),
    text_chunks=(3, 1),
    clipping=(0.2, 0.0),
    offload=("", "optimizer", "all"),
    checkpointing=("", "plain"),
    coalesce=(False, True),
    patch_dropout=(0.0, 0.5),
    locked=("", "below", "most"),
    # The ranks of a replica have captions of different lengths, and must cut them to equal lengths.
    captions=("", "cut"),
    loss=("clip", "siglip"),
    exchange=("ring", "all_gather"),
    reduction=("feature", "scalar"),
)
LAUNCHES: dict[tuple[int, int], dict[str, Case]] = {
    (2, 2): {f"row {number} zero{row['stage']}": Case(accumulation=3, **row) for number, row in enumerate(ROWS)},
    (2, 4): {
        "zero0": Case(0, 3, patch_dropout=0.5, clipping=0.2, text_chunks=1, captions="cut"),
        "zero1 SigLIP": Case(1, 3, family="siglip", loss="siglip", patch_dropout=0.5, clipping=0.1),
        "zero2 coalesced": Case(2, 3, coalesce=True, exchange="all_gather", reduction="scalar", offload="optimizer"),
        "zero3 PE": Case(3, 3, family="pe", checkpointing="plain", persistence_threshold=100),
    },
    (4, 4): {
        "zero1 locked": Case(1, 3, locked="below", clipping=0.2, captions="cut", checkpointing="plain"),
        "zero3": Case(3, 3, patch_dropout=0.5, loss="siglip", offload="all"),
    },
}
"""(tensor-parallel size, ranks) -> cases."""
CLIPPED = Case(1, 3, clipping=0.1, text_chunks=1)


def train_all(size: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Return the outcome of every case on this rank, or its traceback. Two ranks also take the steps of later tests."""
    outcomes: dict[str, Any] = {name: or_traceback(engine_cases.train, split(c, size)) for name, c in cases.items()}
    if dist.get_world_size() == RANKS:
        outcomes |= train_with_faults() | {"twelve steps": twelve_steps()}
    return outcomes


def split(case: Case, size: int, ranks: int = 0) -> Case:
    """Return the case with tensor parallelism. ranks: size of a replica. Default: all ranks of the job."""
    return replace(case, tensor_parallel=size, ranks=ranks or dist.get_world_size())


@pytest.fixture(scope="module")
def trained() -> dict[tuple[int, int], list[dict[str, Any]]]:
    return {(size, ranks): run_ranks(train_all, ranks, size, cases) for (size, ranks), cases in LAUNCHES.items()}


@pytest.mark.parametrize(
    ("size", "ranks", "name"), [(*launch, name) for launch, cases in LAUNCHES.items() for name in cases]
)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, size, ranks, name):
    expected = oracle(split(LAUNCHES[size, ranks][name], size, ranks))
    bounds = CAPTION_ENGINE if LAUNCHES[size, ranks][name].captions else ENGINE
    for outcomes in trained[size, ranks]:
        assert exceeded(comparisons(outcomes[name], expected, bounds).values()) == []


# --- Faults: each is planted on every rank of a training run, and the comparison must detect it. ---


def _leave_weights_unmarked(patch: pytest.MonkeyPatch) -> None:
    # Megatron-core 0.19 sets the mark itself.
    patch.setattr(layers, "_mark_as_split", lambda weight, dim: setattr(weight, "tensor_model_parallel", False))


def _keep_the_factor_of_own_rows(patch: pytest.MonkeyPatch) -> None:
    exact = layers._OwnRows.backward

    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return exact(ctx, gradient)[0] * ctx.group.size, None

    patch.setattr(layers._OwnRows, "backward", staticmethod(backward))


def _leave_shared_inputs_unsummed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerFactory, "shared_input", lambda self, x: x)


def _take_the_local_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizers, "sum_over_ranks", lambda value, group: value)


def _seed_by_global_rank(patch: pytest.MonkeyPatch) -> None:
    exact = engine_cases.RandomState
    patch.setattr(engine_cases, "RandomState", lambda seed, step, replica: exact(seed, step, dist.get_rank()))


def _give_a_replica_equal_samples(patch: pytest.MonkeyPatch) -> None:
    exact = engine_cases.share_of
    patch.setattr(engine_cases, "share_of", lambda step, rank, *rest: exact(step, rank // 2 * 2, *rest))


FAULTS: dict[str, tuple[Case, Callable[[pytest.MonkeyPatch], None], str]] = {
    "weights unmarked": (CLIPPED, _leave_weights_unmarked, "norm"),
    "own rows without 1/T": (Case(1, 3), _keep_the_factor_of_own_rows, "norm"),
    "q, k, v without the gradient sum": (Case(1, 3), _leave_shared_inputs_unsummed, "parameters"),
    "ZeRO-0 norm of this rank only": (Case(0, 3, clipping=0.1), _take_the_local_norm, "norm"),
    "seeds by global rank": (Case(0, 3, patch_dropout=0.5), _seed_by_global_rank, "parameters"),
    "a loss over equal samples": (Case(1, 3), _give_a_replica_equal_samples, "loss"),
}
"""Name of a fault -> its case, the function that plants it, and the quantity that must exceed its bound."""


def train_with_faults() -> dict[str, Outcome]:
    outcomes = {}
    for name, (case, plant, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            outcomes[name] = engine_cases.train(split(case, 2))
    return outcomes


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_comparison(trained, name):
    case, _, quantity = FAULTS[name]
    expected = oracle(split(case, 2, RANKS))
    assert unnoticed([comparisons(outcomes[name], expected)[quantity] for outcomes in trained[2, RANKS]], name) == []


# --- Properties of a longer run. ---


def twelve_steps() -> dict[str, bool | int | list[str]]:
    """Train twelve steps at ZeRO-1. Return which values are equal on the ranks of a replica."""
    case = split(CLIPPED, 2)
    engine = engine_cases.start_engine(case)
    for step in range(12):
        engine_cases.backpropagate(engine, case, step)
        set_learning_rate(engine, 1e-2)
        update(engine)
    named = dict(engine.module.named_parameters())
    part = named["visual.transformer.resblocks.0.mlp.c_fc.weight"]
    whole = [name for name in named if split_dim(name) is None]
    bits = torch.cat([named[name].detach().flatten() for name in whole]).view(torch.int32)
    digest = [int(bits.long().sum()), int((bits.long() * torch.arange(len(bits))).sum())]
    return {
        "replicas equal": len(set(map(tuple, gather_integers(digest)))) == 1,
        "parts differ": len(set(gather_objects(part.sum().item()))) == 2,
        "state names": sorted(engine.module.state_dict()),
        "all-reduces": count_all_reduces(""),
        "all-reduces, checkpointed": count_all_reduces("plain"),
    }


def count_all_reduces(checkpointing: str) -> int:
    """Return the number of sums over the tensor-parallel group in one step. The text tower is locked."""
    case = split(Case(1, 3, locked="text", checkpointing=checkpointing), 2)
    engine = engine_cases.start_engine(case)
    group: RankGroup = engine.module.tensor
    calls, exact = [], torch.distributed.all_reduce

    def counting(*arguments, **options):
        calls.append(options.get("group") is group.handle)
        return exact(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", counting)
        engine_cases.backpropagate(engine, case, 0)
    return sum(calls)


@pytest.fixture(scope="module")
def after_twelve_steps(trained) -> list[dict]:
    return [outcomes["twelve steps"] for outcomes in trained[2, RANKS]]


def test_whole_parameters_stay_equal_on_all_ranks_bit_for_bit(after_twelve_steps):
    assert all(found["replicas equal"] and found["parts differ"] for found in after_twelve_steps)


def test_state_dicts_hold_no_extra_state(after_twelve_steps):
    assert not any("_extra_state" in name for found in after_twelve_steps for name in found["state names"])


@pytest.mark.parametrize(("kind", "per_block"), [("all-reduces", 6), ("all-reduces, checkpointed", 7)])
def test_a_block_requires_six_all_reduces_per_chunk(after_twelve_steps, kind, per_block):
    """Each forward pass of the gradient cache has two, and the backward pass two. Recomputation adds one."""
    image_blocks, text_blocks, chunks = 2, 1, 3
    expected = chunks * (image_blocks * per_block + text_blocks * 2)  # the locked tower has one forward pass
    assert [found[kind] for found in after_twelve_steps] == [expected] * RANKS
