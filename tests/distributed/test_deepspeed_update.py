"""The grouped optimizer step equals DeepSpeed's own step and a float64 norm, and uses few operations.

Each case takes its steps twice on the same ranks: with `megaclip.zero.update`, and with DeepSpeed's own
methods. tests/distributed/test_engine.py compares whole updates with one process for all features of the engine.
"""

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaclip.errors import NonFiniteError
from megaclip.zero import build
from megaclip.zero import update as deepspeed_update
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.update import GroupedStage3, GroupedStages1And2
from tests.distributed import engine_cases
from tests.distributed.engine_cases import LEARNING_RATES, Case, largest_move
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.tolerances import ENGINE, SAME_NORM, assert_close, assert_far

ACTIVE, INACTIVE = 0.05, 50.0
"""Values of gradient_clipping below and above every norm of these cases."""
CASES = {f"zero{stage} clipped": Case(stage, 2, clipping=ACTIVE) for stage in (0, 2, 3)}
# ZeRO-1 and 2 run the same class, so they share these features.
for _stage, _name, _changes in (
    *((stage, "clipped", {}) for stage in (2, 3)),
    (1, "below the limit", {"clipping": INACTIVE}),
    (2, "without limit", {"clipping": 0.0}),
    (3, "offloaded", {"offload": "optimizer"}),
    (1, "SGD", {"optimizer": "SGD"}),
    (2, "Lion", {"optimizer": "Lion"}),
):
    CASES[f"zero{_stage} bf16 {_name}"] = replace(Case(_stage, 2, bf16=True, clipping=ACTIVE), **_changes)
CASES["zero2 bf16 summed in fp32"] = Case(2, 2, bf16=True, clipping=ACTIVE, grad_accum_dtype="fp32", text_chunks=1)
CASES["zero3 bf16 summed in fp32"] = replace(CASES["zero2 bf16 summed in fp32"], stage=3)
CASES["zero1 bf16 coalesced"] = Case(1, 2, bf16=True, clipping=ACTIVE, coalesce=True)
CASES["zero3 bf16 persistent"] = Case(3, 2, bf16=True, clipping=ACTIVE, persistence_threshold=100)
CASES["zero0 Lamb"] = Case(0, 2, clipping=ACTIVE, optimizer="Lamb")


@dataclass
class Steps:
    """Results of some steps on one rank."""

    kind: str
    """Name of the optimizer's class."""
    norms: list[float]
    true_norms: list[float]
    """Norms of the same gradients in float64. Empty with tensor parallelism."""
    masters: dict[str, np.ndarray]
    """Float32 masters after the last step."""


def take_steps(case: Case, *, grouped: bool) -> Steps:
    """Train with the grouped step, or with DeepSpeed's own step if not `grouped`.

    AdamW in float32 takes two steps, the others one. In bfloat16, masters that differ by a rounding may round to
    different values.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not grouped:
            patch.setattr(build, "group_kernels", lambda engine: None)
        engine = engine_cases.start_engine(case)
    steps = Steps(type(engine.optimizer).__name__, [], [], {})
    for step in range(2 if case.optimizer == "AdamW" and not case.bf16 else 1):
        engine_cases.backpropagate(engine, case, step)
        if case.tensor_parallel == 1:
            steps.true_norms.append(norm_in_float64(engine))
        set_learning_rate(engine, LEARNING_RATES[step])
        steps.norms.append(update(engine))
    steps.masters = engine_cases.masters(engine)
    return steps


def norm_in_float64(engine: DeepSpeedEngine) -> float:
    gradients = [safe_get_full_grad(p) for p in engine.module.parameters() if p.requires_grad]
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def both_ways(cases: dict[str, Case]) -> dict[str, tuple[Steps, Steps] | str]:
    """Return the results of the grouped steps and of DeepSpeed's own steps, or a traceback, for each case."""
    return {
        name: or_traceback(lambda case=case: (take_steps(case, grouped=True), take_steps(case, grouped=False)))
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple[Steps, Steps] | str]]:
    """Results by the name of the case, one dictionary per rank."""
    return run_ranks(both_ways, 2, CASES)


def assert_equal_steps(result: tuple[Steps, Steps] | str) -> None:
    """Compare norms relative to their own size, and masters relative to the largest move of a parameter."""
    assert isinstance(result, tuple), result
    ours, own = result
    first, *later = [norm / wanted for norm, wanted in zip(ours.norms, own.norms, strict=True)]
    assert_close(first, 1.0, SAME_NORM, "norm against DeepSpeed's")
    assert_close(later, [1.0] * len(later), ENGINE["norm"], "second norm against DeepSpeed's")
    size = largest_move(initial_values(), own.masters)
    for name, value in own.masters.items():
        assert_close(ours.masters[name], value, ENGINE["parameters"], name, size=size)


def initial_values() -> dict[str, Tensor]:
    torch.manual_seed(engine_cases.SEED)
    return {name: p.detach() for name, p in engine_cases.build_model(engine_cases.MODEL).named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_the_grouped_step_equals_deepspeeds_own_and_has_the_norm_of_the_gradients_in_float64(trained, name):
    case = CASES[name]
    for outcomes in trained:
        assert_equal_steps(outcomes[name])
        ours, own = outcomes[name]
        ratios = [norm / wanted for norm, wanted in zip(ours.norms, ours.true_norms, strict=True)]
        assert_close(ratios, [1.0] * len(ratios), SAME_NORM, "norms against float64")
        assert not case.clipping or all((norm > case.clipping) == (case.clipping == ACTIVE) for norm in ours.norms)
    if case.stage == 0 or case.offload:
        assert ours.kind == own.kind
    else:
        grouped = {1: GroupedStages1And2, 2: GroupedStages1And2, 3: GroupedStage3}[case.stage]
        assert (ours.kind, own.kind) == (grouped.__name__, grouped.__base__.__name__)


def with_and_without_reduction(cases: dict[str, Case]) -> dict[str, Any]:
    def reduced(case: Case) -> Steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupedStages1And2, "leave_gradients", lambda self: None)
            return take_steps(case, grouped=True)

    return {
        name: or_traceback(lambda case=case: (take_steps(case, grouped=True), reduced(case)))
        for name, case in cases.items()
    }


def test_gradients_that_one_rank_leaves_where_they_are_have_the_bits_of_reduced_ones():
    names = ["zero1 bf16 coalesced", "zero2 bf16 clipped", "zero2 bf16 summed in fp32", "zero2 clipped"]
    (outcomes,) = run_ranks(with_and_without_reduction, 1, {name: CASES[name] for name in names})
    for result in outcomes.values():
        assert isinstance(result, tuple), result
        ours, reduced = result
        assert ours.norms == reduced.norms
        assert all(np.array_equal(value, reduced.masters[name]) for name, value in ours.masters.items())


# --- Tensor parallelism: parameters that every rank of a replica holds whole count once. ---

SPLIT = {
    f"zero{stage}{' bf16' * bf16}": Case(stage, 3, bf16=bf16, clipping=ACTIVE, tensor_parallel=2)
    for stage, bf16 in ((0, False), (1, False), (2, True), (3, False))
}


def split_both_ways() -> dict[str, tuple[Steps, Steps] | str]:
    results = both_ways(SPLIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_update, "is_model_parallel_parameter", lambda parameter: True)
        for stage in (1, 3):
            results[f"counted twice {stage}"] = (take_steps(SPLIT[f"zero{stage}"], grouped=True),) * 2
    return results


@pytest.fixture(scope="module")
def split_trained() -> list[dict[str, tuple[Steps, Steps] | str]]:
    return run_ranks(split_both_ways, 2)


@MEGATRON
@pytest.mark.parametrize("name", SPLIT)
def test_the_grouped_step_equals_deepspeeds_own_with_tensor_parallelism(split_trained, name):
    for outcomes in split_trained:
        assert_equal_steps(outcomes[name])


@MEGATRON
@pytest.mark.parametrize("stage", [1, 3])
def test_a_norm_that_counts_whole_parameters_twice_is_detected(split_trained, stage):
    for outcomes in split_trained:
        faulty, right = outcomes[f"counted twice {stage}"][0], outcomes[f"zero{stage}"][1]
        assert_far(faulty.norms[0] / right.norms[0], 1.0, SAME_NORM, "whole parameters counted twice")


# --- Operations. ---

_NOT_LAUNCHED = {"view", "narrow", "slice", "detach", "alias", "as_strided", "empty", "empty_like", "unsqueeze"}


class Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.__name__.split(".")[0]
        if name not in _NOT_LAUNCHED and function.namespace in ("aten", "c10d"):
            self.counts[name] += 1
        return function(*arguments, **(options or {}))


def operations_of_an_update(case: Case, layers: int, *, grouped: bool) -> Counter[str]:
    """Return the operations of the second update of a model with this number of layers per tower."""
    model = engine_cases.MODEL.replace(vision_cfg={"layers": layers}, text_cfg={"layers": layers})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_cases, "MODEL", model)
        if not grouped:
            patch.setattr(build, "group_kernels", lambda engine: None)
        engine = engine_cases.start_engine(case)
        for step in range(2):
            engine_cases.backpropagate(engine, case, step)
            with Operations() as operations:
                update(engine)
    return operations.counts


def count_operations() -> dict[str, Any]:
    counted: dict[str, Any] = {}
    for stage, layers in itertools.product(range(4), (1, 4)):
        case = Case(stage, 1, bf16=stage > 0, clipping=ACTIVE)
        counted[f"{stage} {layers}"] = operations_of_an_update(case, layers, grouped=True)
        if stage == 1:
            counted[f"own {layers}"] = operations_of_an_update(case, layers, grouped=False)
    return counted


@pytest.fixture(scope="module")
def counted() -> dict[str, Counter[str]]:
    return run_ranks(count_operations, 1)[0]


@pytest.mark.parametrize("stage", range(4))
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(counted, stage):
    small, large = (counted[f"{stage} {layers}"] for layers in (1, 4))
    assert small == large
    assert small.total() < 70
    # The host reads the norm once. At the other stages the count has reads of copies on the host.
    assert stage or small["_local_scalar_dense"] == 1


def test_the_counter_sees_deepspeeds_operations_per_tensor(counted):
    assert counted["own 4"].total() > counted["own 1"].total() + 2 * 3 * 2 * 10


# --- State around a step. ---


def move_a_weight() -> list[bool]:
    """Move a weight out of the flat buffer. Return whether it is inside the buffer before and after an update."""
    case = Case(1, 1, bf16=True)
    engine = engine_cases.start_engine(case)
    weight = engine.module.visual.proj
    flats = engine.optimizer.bit16_groups_flat
    weight.data = weight.data.clone()

    def is_inside() -> bool:
        return any(weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for flat in flats)

    before = is_inside()
    engine_cases.backpropagate(engine, case, 0)
    update(engine)
    return [before, is_inside()]


def test_a_weight_that_was_moved_is_put_back() -> None:
    assert run_ranks(move_a_weight, 1) == [[False, True]]


def joined_gradients(case: Case) -> tuple[list[bool], list[int]]:
    """Take an update that is refused and one that is made. Return whether gradients are copied when they are joined,
    and the number of joined gradients that are left after each update."""
    engine, joins = engine_cases.start_engine(case), GroupedStages1And2._flat_gradient
    copied: list[bool] = []
    left: list[int] = []

    def watched(optimizer: GroupedStages1And2, group: int) -> Tensor:
        flat = joins(optimizer, group)
        copied.append(flat.data_ptr() != optimizer.averaged_gradients[group][0].data_ptr())
        return flat

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedStages1And2, "_flat_gradient", watched)
        for step, factor in enumerate((math.nan, 1.0)):
            engine_cases.backpropagate(engine, case, step)
            engine.optimizer.averaged_gradients[0][0].mul_(factor)
            with pytest.raises(NonFiniteError) if math.isnan(factor) else nullcontext():
                update(engine)
            left.append(len(engine.optimizer._flat))
    return copied, left


@pytest.mark.parametrize("name", ["zero1 bf16 coalesced", "zero2 bf16 summed in fp32"])
def test_no_gradient_is_held_twice_without_need_or_after_an_update(name) -> None:
    for copied, left in run_ranks(joined_gradients, 2, CASES[name]):
        assert set(copied) == {CASES[name].grad_accum_dtype != "fp32"} and left == [0, 0]
