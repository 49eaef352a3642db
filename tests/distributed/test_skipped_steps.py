"""A step that is skipped because it is not finite changes nothing.

Two ranks take a good step, bad steps, and another good step. A second engine takes only the two good steps. Working
parameters, float32 masters, optimizer states, and the state and temperature of FastCLIP must be equal bit by bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import numpy as np
import pytest
import torch

from megaclip.config import MegaclipSection
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength
from megaclip.engine.trainer import SkippedSteps
from megaclip.errors import NonFiniteError
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed import engine_cases
from tests.distributed.engine_cases import BATCH, LEARNING_RATES, WORLD_SIZE, Case, batch_of, poisoned_batch_of
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine_fastclip import SAMPLES, ids_of

CASES = {
    **{f"zero{stage}": Case(stage, 3, clipping=0.1) for stage in (0, 2, 3)},
    "zero1 bf16 offloaded": Case(1, 3, bf16=True, offload="optimizer", clipping=0.1),
    "fastclip_v2 zero3": Case(3, 3, loss="fastclip_v2", exchange="all_gather"),
}
MORE_CASES = {
    "zero1 coalesced, locked": Case(1, 3, bf16=True, coalesce=True, locked="image", clipping=0.1),
    "zero2 kept graphs": Case(2, 3, bf16=True, keep=3, patch_dropout=0.5),
    "zero3 offloaded": Case(3, 3, bf16=True, grad_accum_dtype="fp32", offload="all"),
    "zero3 kept graphs, coalesced": Case(3, 3, bf16=True, keep=3, checkpointing="plain", coalesce=True),
    "fastclip_v3 zero1": Case(1, 3, loss="fastclip_v3"),
}
FAULTS = ("loss", "gradient", "temperature")


def state_of(engine: Any) -> dict[str, np.ndarray]:
    """Return this rank's parameters, masters and optimizer states by name, as bytes that distinguish -0 and NaN."""
    state = {f"parameter {name}": value for name, value in engine_cases.whole_parameters(engine).items()}
    optimizer = engine.basic_optimizer
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in enumerate(tensors):
        state[f"master {number}"] = tensor.detach().cpu().clone().numpy()
        for name, value in optimizer.state[tensor].items():
            state[f"{name} {number}"] = torch.as_tensor(value).detach().cpu().clone().numpy()
    return state


def differences(case: Case) -> list[str]:
    """Return the names of the states that differ between a run with skipped steps and a run without these steps."""
    (without, _), (after, count) = trained(case, faults=()), trained(case, FAULTS)
    assert count == len(FAULTS), f"{count} steps were skipped"
    assert without.keys() == after.keys() and len(without) > 10
    return [name for name, value in without.items() if value.tobytes() != after[name].tobytes()]


def trained(case: Case, faults: Sequence[str]) -> tuple[dict[str, np.ndarray], int]:
    """Take two steps, with faulty attempts at the second one. Return all states and the number of skipped steps."""
    engine, loss, skipped = engine_cases.start_engine(case), None, SkippedSteps(limit=len(FAULTS))
    if case.loss.startswith("fastclip"):
        settings = {"temperature_learning_rate": 0.01, "rho": 6.5}
        section = MegaclipSection.model_validate({"loss": case.loss, "exchange": case.exchange, "fastclip": settings})
        loss = RunLoss(section, RunLength(SAMPLES, BATCH, total_steps=4), 0, engine.device)
    for step in (0, 1):
        for fault in faults if step == 1 else ():
            try:
                take_step(engine, loss, case, step, 1.0, fault)
            except NonFiniteError as error:
                skipped.skip(error)
        take_step(engine, loss, case, step, LEARNING_RATES[step])
    state = state_of(engine)
    if loss is not None:
        state |= {"u": loss._loss.state.values.numpy(), "log_scale": loss._loss.log_scale.numpy()}
        state |= {f"temperature {k}": np.array(v) for k, v in loss._loss.temperature.state_dict().items()}
    return state, skipped.total


def take_step(engine: Any, loss: RunLoss | None, case: Case, step: int, learning_rate: float, fault: str = "") -> None:
    """Take a step as a run does.

    fault: value that is NaN on the last rank: the loss, the gradients of the features, or that of a temperature, which
    FastCLIP has only. Without one, the gradients of the features are NaN.
    """
    is_last_rank = dist.get_rank() == WORLD_SIZE - 1
    spoils_features = fault == "gradient" or (fault == "temperature" and loss is None)
    factor = math.nan if is_last_rank and spoils_features else 1.0
    if loss is None:
        exact = engine_cases.loss_of(case)
    else:
        exact = loss.bind(lambda: ids_of(step)[dist.get_rank() :: WORLD_SIZE], 0.6 * step)

    def function(x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return exact(*(engine_cases._Scaled.apply(features, factor) for features in (x, y)), *others)

    def check() -> None:
        if loss is None:
            return
        if is_last_rank and fault == "temperature":
            pending = loss._loss._pending
            gradient = pending.scale_gradient if pending.temperature_gradient is None else pending.temperature_gradient
            gradient.view(-1)[0] = math.nan
        loss.own.check_step()

    batch = (poisoned_batch_of if fault == "loss" else batch_of)(case, step)
    engine_cases.backpropagate(engine, case, step, function, batch, check_loss=check)
    set_learning_rate(engine, learning_rate)
    assert math.isfinite(update(engine))
    if loss is not None:
        loss.own.step(0, 4)


def run_all(cases: dict[str, Case]) -> dict[str, list[str] | str]:
    return {name: or_traceback(differences, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, WORLD_SIZE, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_changes_nothing(results, name):
    for rank_results in results:
        assert rank_results[name] == []


@pytest.mark.long
def test_a_skipped_step_changes_nothing_with_other_settings():
    for rank_results in run_ranks(run_all, WORLD_SIZE, MORE_CASES):
        assert {name: found for name, found in rank_results.items() if found} == {}
