"""Planned and measured bytes on two ranks: the states at every ZeRO stage, and the parameters and gradients sent."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from megaclip.models import ModelConfig
from megaclip.planner.states import states_of
from megaclip.planner.traffic import feature_traffic, parameter_traffic
from megaclip.planner.workload import Workload
from megaclip.zero.gathered_tower import GatheredTower
from megaclip.zero.optimizers import update
from tests.distributed.engine_cases import (
    UNLOCKED_GROUPS,
    WORLD_SIZE,
    Case,
    backpropagate,
    start_engine,
    training_config,
)
from tests.distributed.harness import run_ranks
from tools.volume import bytes_sent

MODEL = ModelConfig.from_dict(
    {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 8, "layers": 4, "width": 64, "head_width": 16, "patch_size": 2},
        "text_cfg": {
            "context_length": 6,
            "vocab_size": 32,
            "width": 48,
            "heads": 4,
            "layers": 3,
            "eos_id": 2,
            "pool_type": "eos",
        },
    }
)
"""204,000 parameters in the image tower and 88,000 in the text tower, so that scalars and padding do not matter."""
ALL = 99
BUCKET = {"reduce_bucket_size": 50_000}
FEW = {"stage3_max_reuse_distance": 150_000}
"""Half of it covers one block of the image tower and a part of another one."""
AHEAD = {"stage3_prefetch_bucket_size": 20_000}
NOT_AHEAD = {"stage3_prefetch_bucket_size": 0}
ADAPTERS = (("lora", {"rank": 32}),)
CASES: dict[str, tuple[Case, dict[str, int]]] = {
    **{f"stage {stage}": (Case(stage, 2 if stage < 2 else 1), {}) for stage in range(4)},
    **{f"stage {stage}, bf16": (Case(stage, 2, bf16=True), {}) for stage in (2, 3)},
    "one chunk, few kept": (Case(3), FEW | AHEAD),
    "chunks, no prefetch": (Case(3, 2, keep=1), FEW | NOT_AHEAD),
    "chunks, few kept": (Case(3, 2, keep=3), FEW | AHEAD),
    "all graphs kept": (Case(3, 2, keep=ALL), AHEAD),
    "image chunks, one text chunk": (Case(3, 2, text_chunks=1), AHEAD),
    "coalesced": (Case(3, 2, bf16=True, coalesce=True), AHEAD),
    "checkpointing": (Case(3, 2, checkpointing="plain"), FEW | AHEAD),
    "offload": (Case(3, 2, offload="all"), AHEAD),
    "image locked": (Case(3, 2, locked="image", keep=1), AHEAD),
    "partly locked": (Case(3, 2, locked="below", keep=3), AHEAD),
    "adapters, stage 2": (Case(2, 2, section=ADAPTERS), {}),
    "adapters, few kept": (Case(3, 2, keep=1, section=ADAPTERS), FEW | AHEAD),
    "small parameters": (Case(3, 2, persistence_threshold=1_100), FEW | AHEAD),
}


@dataclass
class Bytes:
    """Bytes of one rank."""

    parameters: float
    masters: float
    optimizer_states: float
    all_states: float
    sent: float
    """Bytes of parameters and gradients sent in the second step."""


@dataclass
class Measured(Bytes):
    others: set[int]
    """Whole elements of the other tower, above the persistence threshold, when the passes over one tower begin."""
    left: int
    """Such elements of both towers after the step."""


def compare(case: Case, settings: dict[str, int]) -> tuple[Bytes, Measured]:
    """Return the planned bytes, and those of two steps."""
    config = training_config(case)
    config.deepspeed["zero_optimization"] |= settings | (BUCKET if case.stage else {})
    unlocked = UNLOCKED_GROUPS.get(case.locked, 0)
    locks = {f"{tower}_unlocked": unlocked for tower in ("image", "text") if case.locked in (tower, "below")}
    job = Workload.of(MODEL, config, WORLD_SIZE, **locks)
    job = job.with_batch(text_micro_batch=job.local_batch // (case.text_chunks or case.accumulation))
    job = job.with_megaclip(exchange=case.exchange, reduction=case.reduction)
    states = states_of(job)
    planned = Bytes(
        *((states.gpu | states.cpu).get(part, 0.0) for part in ("parameters", "master parameters", "optimizer states")),
        sum(states.gpu.values()) + sum(states.cpu.values()),
        parameter_traffic(job),
    )
    earlier = tensors()  # they stay alive, so that no storage has the address of one of them
    engine, others = start_engine(case, config, model=MODEL), set()
    parameters: list[Any] = list(engine.module.parameters())
    optimizer = engine.optimizer
    use = GatheredTower.use

    def whole(tower: torch.nn.Module) -> int:
        large = [each for each in tower.parameters() if case.stage == 3 and not each.ds_persist]
        assert not any(isinstance(user, str) for each in large for user in each.ds_active_sub_modules)
        return sum(each.ds_numel for each in large if each.ds_status == ZeroParamStatus.AVAILABLE)

    def watching(self, *towers: torch.nn.Module) -> None:
        use(self, *towers)
        others.update(whole(each) for each in (engine.module.visual, engine.module.text) if each not in towers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredTower, "use", watching)
        for step in range(2):
            sent = sum(bytes_sent(lambda step=step: (backpropagate(engine, case, step), update(engine))).values())
    before, after = storages(earlier), storages(tensors())
    own = storages(getattr(each, "ds_tensor", each) for each in parameters)
    attribute = "fp32_partitioned_groups_flat" if case.stage == 3 else "single_partition_of_fp32_groups"
    masters = storages(getattr(optimizer, attribute, ()))
    state = getattr(optimizer, "optimizer", optimizer).state.values()
    moments = storages(each for values in state for each in values.values() if isinstance(each, Tensor) and each.ndim)
    return planned, Measured(
        sum(own.values()),
        sum(size for key, size in masters.items() if key not in own),
        sum(moments.values()),
        sum(size for key, size in after.items() if key not in before),
        sent - feature_traffic(job).total,
        others,
        whole(engine.module),
    )


def tensors() -> list[Tensor]:
    """Return all tensors of this process."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors and their gradients, by its address."""
    found = [part for each in tensors for part in (each, each.grad if each.is_leaf else None) if part is not None]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}


def compare_all() -> dict[str, tuple[Bytes, Measured]]:
    return {name: compare(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def compared() -> dict[str, tuple[Bytes, Measured]]:
    return run_ranks(compare_all, WORLD_SIZE)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_planned_bytes_are_those_of_the_step(compared, name: str) -> None:
    planned, measured = compared[name]
    assert planned.sent == pytest.approx(measured.sent, rel=0.02)
    assert planned.parameters == pytest.approx(measured.parameters, rel=0.02)
    assert planned.optimizer_states == pytest.approx(measured.optimizer_states, rel=0.02)
    if not CASES[name][0].offload:  # the plan's masters include the step's copies in host memory
        assert planned.masters == pytest.approx(measured.masters, rel=0.02)
        assert planned.all_states == pytest.approx(measured.all_states, rel=0.02)
    # ZeRO-3 holds no parameters of a tower that does not run.
    assert measured.others <= {0} and measured.left == 0
