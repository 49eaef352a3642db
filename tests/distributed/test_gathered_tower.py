"""How often ZeRO-3 gathers parameters in a step of the gradient cache, and which it holds at a time, on two ranks.

The planner counts the same (`megaclip.planner.traffic`). `test_engine_kept_graphs` and others compare the gradients of
such steps with one process.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from megaclip.planner.traffic import _moved_elements
from megaclip.planner.workload import Workload
from megaclip.zero.gathered_tower import GatheredTower
from tests.distributed.engine_cases import (
    WORLD_SIZE,
    Case,
    backpropagate,
    model_of,
    start_engine,
    training_config,
)
from tests.distributed.harness import run_ranks

ALL = 99
THRESHOLD = 1_100
"""A persistence threshold above the sizes of projections of attention, and below those of the MLP."""
FEW = 2_000
"""A reuse distance of which half covers the parameters in KEPT_BY_FEW, and not the next one, a matrix of the MLP."""
TWICE = Case(3, 3)
CASES = {
    "encoded twice": (TWICE, 10**9),
    "one image graph kept": (Case(3, 3, keep=1), 10**9),
    "graphs of both towers kept": (Case(3, 3, keep=4), 10**9),
    "all graphs kept": (Case(3, 3, keep=ALL), 10**9),
    "image locked": (Case(3, 3, locked="image"), 10**9),
    "image locked, one text graph kept": (Case(3, 3, locked="image", keep=1), 10**9),
    "checkpointing": (Case(3, 3, checkpointing="plain"), 10**9),
    "few": (TWICE, FEW),
    "none": (TWICE, 0),
    "offload": (Case(3, 3, offload="all"), 10**9),
    "small parameters": (replace(TWICE, persistence_threshold=THRESHOLD), FEW),
}
# The passes over a tower begin once for all forward and once for all backward passes. If some texts are encoded again,
# their passes begin after those over the images. The first backward pass includes one blank row of the other tower, for
# which that tower is gathered forward and backward.
GATHERED = {
    "encoded twice": {"visual": 2, "text": 2 + 2},
    "one image graph kept": {"visual": 2, "text": 2 + 2},
    "graphs of both towers kept": {"visual": 2 + 2, "text": 3},
    "all graphs kept": {"visual": 2 + 2, "text": 2},
    "image locked": {"visual": 1, "text": 2},
    "image locked, one text graph kept": {"visual": 1, "text": 2},
    "checkpointing": {"visual": 2, "text": 2 + 2},
}
# Three chunks are encoded twice and back-propagated. With offload_optimizer the last backward pass has a blank row too.
EVERY_PASS = {
    "few": {"visual": 9, "text": 9 + 2},
    "none": {"visual": 9, "text": 9 + 2},
    "small parameters": {"visual": 9, "text": 9 + 2},
    "offload": {"visual": 9 + 2, "text": 9 + 2},
}
KEPT_BY_FEW = {
    "visual.ln_post.weight",
    "visual.ln_post.bias",
    "visual.transformer.resblocks.1.mlp.c_proj.bias",
    "text.ln_final.weight",
    "text.ln_final.bias",
    "text.transformer.resblocks.0.mlp.c_proj.bias",
}


def count_gathers(case: Case, reuse: int) -> tuple[Counter[str], list[int]]:
    """Return how often each parameter is gathered in the second step, and the numbers of the other tower's elements
    that are whole when a pass over a tower begins.
    """
    config = training_config(case)
    # Without prefetching, which depends on what DeepSpeed has recorded.
    config.deepspeed["zero_optimization"] |= {"stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 0}
    engine = start_engine(case, config)
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    counts: Counter[str] = Counter()
    others: list[int] = []
    attribute = "_PartitionedParameterCoordinator__all_gather_params_"
    gather, use = getattr(PartitionedParameterCoordinator, attribute), GatheredTower.use

    def counting(self, parameters, *arguments, **options) -> None:
        counts.update(names[each] for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE)
        gather(self, parameters, *arguments, **options)

    def watching(self, tower: torch.nn.Module) -> None:
        use(self, tower)
        other = engine.module.text if tower is engine.module.visual else engine.module.visual
        others.append(sum(p.ds_numel for p in other.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionedParameterCoordinator, attribute, counting)
        patch.setattr(GatheredTower, "use", watching)
        for step in range(2):
            counts.clear()
            others.clear()
            backpropagate(engine, case, step)
            assert not any(isinstance(user, str) for parameter in names for user in parameter.ds_active_sub_modules)
            engine.step()
    counts.pop("logit_scale", None)
    return counts, others


def count_all() -> dict[str, tuple[Counter[str], list[int], dict[str, int]]]:
    """Return `count_gathers` of each case, and the number of elements of each parameter."""
    sizes = {name: p.ds_numel for name, p in start_engine(TWICE).module.named_parameters()}
    return {name: (*count_gathers(case, reuse), sizes) for name, (case, reuse) in CASES.items()}


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[Counter[str], list[int], dict[str, int]]]:
    first, second = run_ranks(count_all, WORLD_SIZE)
    assert first == second
    return first


@pytest.mark.parametrize("name", GATHERED)
def test_parameters_are_gathered_once_for_all_passes_over_their_tower(counted, name: str) -> None:
    counts, others, sizes = counted[name]
    assert counts == {each: GATHERED[name][each.split(".")[0]] for each in sizes if each != "logit_scale"}
    assert set(others) == {0}  # the other tower's parameters have been released


@pytest.mark.parametrize("name", ["few", "none", "offload"])
def test_parameters_beyond_the_limit_are_gathered_in_every_pass(counted, name: str) -> None:
    counts, others, sizes = counted[name]
    expected = {each: EVERY_PASS[name][each.split(".")[0]] for each in sizes if each != "logit_scale"}
    if name == "few":
        expected |= {each: GATHERED["encoded twice"][each.split(".")[0]] for each in KEPT_BY_FEW}
    assert counts == expected
    assert set(others) == {0}


def test_parameters_below_the_persistence_threshold_stay_gathered(counted) -> None:
    counts, others, sizes = counted["small parameters"]
    assert counts == {
        each: EVERY_PASS["small parameters"][each.split(".")[0]] for each, size in sizes.items() if size > THRESHOLD
    }
    small = {"visual": 0, "text": 0}
    for each, size in sizes.items():
        if size <= THRESHOLD and each != "logit_scale":
            small[each.split(".")[0]] += size
    assert set(others) == set(small.values())


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("few", "small parameters")])
def test_the_plan_counts_the_same(counted, name: str) -> None:
    (case, reuse), (counts, _, sizes) = CASES[name], counted[name]
    config = training_config(case)
    config.deepspeed["zero_optimization"]["stage3_max_reuse_distance"] = reuse
    locked = 0 if case.locked == "image" else None
    job = Workload.of(model_of(case), config, WORLD_SIZE, image_unlocked=locked)
    planned = _moved_elements(job.with_batch(text_micro_batch=job.batch.micro_batch))
    assert planned.gathered == sum(sizes[each] * count for each, count in counts.items())
