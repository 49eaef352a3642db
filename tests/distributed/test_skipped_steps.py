"""A step that is skipped because it is not finite changes nothing.

Two ranks take a good step, bad steps, and another good step. A second engine takes only the two good steps. Working
parameters, float32 masters, optimizer states, and the state and temperature of FastCLIP must be equal bit by bit.
"""

import math
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import numpy as np
import pytest
import torch

from megaclip.config import MegaclipSection
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.trainer import SkippedSteps
from megaclip.errors import NonFiniteError
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed import engine_cases
from tests.distributed.engine_cases import LEARNING_RATES, WORLD_SIZE, Case, batch_of, poisoned_batch_of
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine_fastclip import SAMPLES, ids_of

CASES = {
    **{f"zero{stage}": Case(stage, 3, clipping=0.1) for stage in (0, 2, 3)},
    "zero1 bf16 offloaded": Case(1, 3, bf16=True, offload="optimizer", clipping=0.1),
}
MORE_CASES = {
    "zero1 coalesced, locked": Case(1, 3, bf16=True, coalesce=True, locked="image", clipping=0.1),
    "zero2 kept graphs": Case(2, 3, bf16=True, keep=3, patch_dropout=0.5),
    "zero3 offloaded": Case(3, 3, bf16=True, grad_accum_dtype="fp32", offload="all"),
    "zero3 kept graphs, coalesced": Case(3, 3, bf16=True, keep=3, checkpointing="plain", coalesce=True),
}
FASTCLIP = {"fastclip_v2 zero3": Case(3, 3, loss="fastclip_v2", exchange="all_gather")}
MORE_FASTCLIP = {"fastclip_v3 zero1": Case(1, 3, loss="fastclip_v3")}
FAULTS = ("loss", "gradient", "loss")


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
    last_rank = dist.get_rank() == WORLD_SIZE - 1

    def trained(skips: bool) -> tuple[dict[str, np.ndarray], int]:
        engine = engine_cases.start_engine(case)
        skipped = SkippedSteps(limit=3)
        for step in (0, 1):
            for fault in FAULTS if skips and step == 1 else ():
                set_learning_rate(engine, 1.0)
                try:
                    if fault == "loss":
                        engine_cases.backpropagate(engine, case, 5, batch=poisoned_batch_of(case, step))
                    else:
                        faulty = replace(case, feature_fault=math.nan) if last_rank else case
                        engine_cases.backpropagate(engine, case, 6, engine_cases.loss_of(faulty), batch_of(case, step))
                    update(engine)
                except NonFiniteError as error:
                    skipped.skip(error)
            engine_cases.backpropagate(engine, case, step)
            set_learning_rate(engine, LEARNING_RATES[step])
            assert math.isfinite(update(engine))
        return state_of(engine), skipped.total

    (without, _), (after, count) = trained(skips=False), trained(skips=True)
    assert count == len(FAULTS), f"{count} steps were skipped"
    assert without.keys() == after.keys() and len(without) > 10
    return [name for name, value in without.items() if value.tobytes() != after[name].tobytes()]


def fastclip_differences(case: Case) -> list[str]:
    """Return `differences` for FastCLIP. In one bad step only a temperature's gradient is NaN, on the last rank."""

    def trained(skips: bool) -> tuple[dict[str, np.ndarray], int]:
        engine = engine_cases.start_engine(case)
        settings = {"temperature_learning_rate": 0.01, "rho": 6.5}
        section = MegaclipSection.model_validate({"loss": case.loss, "exchange": case.exchange, "fastclip": settings})
        loss = RunLoss(section, samples=SAMPLES, epochs=2.0, total_steps=4, warmup=0, device=engine.device)
        skipped = SkippedSteps(limit=3)
        for step in (0, 1):
            own_ids = ids_of(step)[dist.get_rank() :: WORLD_SIZE]
            for fault in ("loss", "gradient", "temperature") if skips and step == 1 else ():
                bound = loss.bind(lambda ids=own_ids: ids, 0.6)
                try:
                    batch = poisoned_batch_of(case, step) if fault == "loss" else batch_of(case, step)
                    take_step(engine, loss, case, bound, batch, 1.0, fault)
                except NonFiniteError as error:
                    skipped.skip(error)
            bound = loss.bind(lambda ids=own_ids: ids, 0.6 * step)
            take_step(engine, loss, case, bound, batch_of(case, step), LEARNING_RATES[step])
        own = {"u": loss._loss.state.values.numpy(), "log_scale": loss._loss.log_scale.numpy()}
        own |= {f"temperature {k}": np.array(v) for k, v in loss._loss.temperature.state_dict().items()}
        return state_of(engine) | own, skipped.total

    (without, _), (after, count) = trained(skips=False), trained(skips=True)
    assert count == 3, f"{count} steps were skipped"
    return [name for name, value in without.items() if value.tobytes() != after[name].tobytes()]


def take_step(
    engine: Any, loss: RunLoss, case: Case, bound: Any, batch: Any, learning_rate: float, fault: str = ""
) -> None:
    """Take a step as a run does. fault: the value that is NaN on the last rank."""
    fault = fault if dist.get_rank() == WORLD_SIZE - 1 else ""

    def function(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return bound(engine_cases._Scaled.apply(x, math.nan if fault == "gradient" else 1.0), y, scale)

    def check() -> None:
        pending = loss._loss._pending
        if fault == "temperature" and pending.temperature_gradient is not None:
            pending.temperature_gradient[0, 0] = math.nan
        elif fault == "temperature":
            pending.scale_gradient.fill_(math.nan)
        loss.own.check_step()

    engine_cases.accumulate_gradients(
        engine,
        function,
        batch,
        engine_cases.LogitScale(engine, 100.0).read(),
        engine_cases.RandomState(0, 0, dist.get_rank()),
        coalesce=case.coalesce,
        check_loss=check,
    )
    set_learning_rate(engine, learning_rate)
    update(engine)
    loss.own.step(0, 4)


def run_all(cases: dict[str, Case], fastclip: dict[str, Case]) -> dict[str, list[str] | str]:
    results: dict[str, list[str] | str] = {name: or_traceback(differences, case) for name, case in cases.items()}
    return results | {name: or_traceback(fastclip_differences, case) for name, case in fastclip.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, WORLD_SIZE, CASES, FASTCLIP)


@pytest.mark.parametrize("name", [*CASES, *FASTCLIP])
def test_a_skipped_step_changes_nothing(results, name):
    for rank_results in results:
        assert rank_results[name] == []


@pytest.mark.long
def test_a_skipped_step_changes_nothing_with_other_settings():
    for rank_results in run_ranks(run_all, WORLD_SIZE, MORE_CASES, MORE_FASTCLIP):
        assert {name: found for name, found in rank_results.items() if found} == {}
