"""FastCLIP through the engine equals one process on the whole batch: parameters, estimators and temperatures.

The runs take two AdamW steps with three gradient-cache chunks each, on two ranks, and on four ranks that form two
tensor-parallel replicas. There the loss's state is sharded over all ranks. The oracle runs the towers in float64 on the
whole batch. `fastclip_oracle.Oracle` computes the loss, its state and its temperatures,
and torch's AdamW updates the model. The second step has new samples, samples of the first step, and one sample twice.
"""

import functools
from dataclasses import dataclass, field, replace

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from torch import Tensor

from megaclip.config import MegaclipSection
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength
from megaclip.losses.settings import VARIANTS
from tests.distributed import fastclip_oracle as written
from tests.distributed.engine_cases import (
    BATCH,
    STEPS,
    Case,
    OracleTraining,
    Outcome,
    start_engine,
    take_step,
    whole_parameters,
)
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_engine import comparisons
from tests.tolerances import ENGINE, FASTCLIP_ENGINE, assert_close, exceeded, unnoticed

SAMPLES, TAU, GAMMA_MIN, GAMMA_EPOCHS = 20, 0.3, 0.4, 3.0
EPOCHS = (0.0, 0.6)
BOUNDS = {**FASTCLIP_ENGINE, "norm": ENGINE["norm"]}
CASES = {
    "fastclip_v3 zero1": Case(1, 3, loss="fastclip_v3", exchange="ring", reduction="feature"),
    "fastclip_v3 zero3": Case(3, 3, loss="fastclip_v3", exchange="all_gather", reduction="scalar"),
    "fastclip_v2 zero1": Case(1, 3, loss="fastclip_v2", exchange="all_gather", reduction="feature"),
    "fastclip_v2 zero3": Case(3, 3, loss="fastclip_v2", exchange="ring", reduction="scalar", text_chunks=2),
}
SPLIT = {
    "fastclip_v3 zero2 locked, clipped": Case(2, 3, loss="fastclip_v3", locked="below", text_chunks=1, clipping=0.1),
    "fastclip_v2 zero3 everything": Case(
        3,
        3,
        loss="fastclip_v2",
        text_chunks=1,
        offload="all",
        checkpointing="cpu",
        coalesce=True,
        patch_dropout=0.5,
        clipping=0.1,
    ),
}
SPLIT = {name: replace(case, tensor_parallel=2, ranks=4) for name, case in SPLIT.items()}


@dataclass
class Trained(Outcome):
    """Results of two steps. u and tau: (SAMPLES, 2), NaN for samples that were not used or belong to another rank."""

    log_scale: float = 0.0
    u: np.ndarray = field(default_factory=lambda: np.full((SAMPLES, 2), np.nan))
    tau: np.ndarray = field(default_factory=lambda: np.full((SAMPLES, 2), np.nan))


def ids_of(step: int) -> Tensor:
    """Return the sample ids of a step, (BATCH,)."""
    ids = (torch.arange(BATCH) * 7 + 8 * step) % SAMPLES
    if step:
        ids[-1] = ids[0]
    return ids


def one_process(case: Case) -> Trained:
    training = OracleTraining(case)
    loss, outcome = written.Oracle(case.loss, SAMPLES, TAU), Trained()
    for step, epoch in enumerate(EPOCHS):
        x, y = training.features(step)
        ids = torch.cat([ids_of(step)[rank :: case.ranks] for rank in range(case.ranks)])
        gamma = written.gamma_of(VARIANTS[case.loss].gamma_schedule, epoch, GAMMA_MIN, GAMMA_EPOCHS)
        found = loss.step(x, y, ids.tolist(), gamma)
        training.optimizer.zero_grad()
        torch.autograd.backward([x, y], [found.d_image, found.d_text])
        scale = training.model.logit_scale
        scale.grad = torch.zeros_like(scale)  # the loss does not use it
        outcome.norms.append(training.update(step))
        outcome.losses.append(found.loss.item())
    for (sample, side), value in loss.u.items():
        outcome.u[sample, side], outcome.tau[sample, side] = value, loss.tau[sample, side].item()
    outcome.parameters, outcome.largest_move = training.parameters()
    outcome.log_scale = loss.log_scale.item()
    return outcome


def through_the_engine(case: Case) -> Trained:
    engine = start_engine(case)
    settings = {
        "gamma_min": GAMMA_MIN,
        "gamma_epochs": GAMMA_EPOCHS,
        "gamma_per": "step",
        "rho": written.RHO,
        "eps": written.EPS,
        "temperature": TAU,
        "temperature_min": written.BOUNDS[0],
        "temperature_max": written.BOUNDS[1],
        "temperature_learning_rate": written.RATE,
        "temperature_betas": list(written.BETAS),
        "temperature_eps": written.ADAM_EPS,
    }
    section = MegaclipSection.model_validate(
        {"loss": case.loss, "exchange": case.exchange, "reduction": case.reduction, "fastclip": settings}
    )
    loss = RunLoss(section, RunLength(SAMPLES, BATCH, STEPS), 0, engine.device)
    outcome = Trained()
    for step, epoch in enumerate(EPOCHS):
        own_ids = ids_of(step)[dist.get_rank() :: dist.get_world_size()]
        bound = loss.bind(lambda ids=own_ids: ids, epoch)
        take_step(engine, case, step, outcome, bound)
        loss.own.step(step, STEPS)
    state = loss._loss.state
    mine = torch.arange(SAMPLES)[dist.get_rank() :: dist.get_world_size()]
    rows = state.values[mine // dist.get_world_size()].double().numpy()
    outcome.u[mine] = np.exp(rows[:, :2])
    if written.individual(case.loss):
        outcome.tau[mine] = np.where(np.isnan(rows[:, :2]), np.nan, rows[:, 2:4])
    outcome.parameters, outcome.log_scale = whole_parameters(engine), float(loss._loss.log_scale)
    return outcome


def train_all(cases: dict[str, Case]) -> dict[str, Trained]:
    return {name: through_the_engine(case) for name, case in cases.items()}


@functools.cache
def trained(ranks: int) -> list[dict[str, Trained]]:
    """Results of CASES on two ranks or of SPLIT on four, one dictionary per rank."""
    return run_ranks(train_all, ranks, SPLIT if ranks == 4 else CASES)


@pytest.mark.parametrize(
    ("name", "case"), [*CASES.items(), *(pytest.param(*split, marks=MEGATRON) for split in SPLIT.items())]
)
def test_two_steps_equal_one_process_on_the_whole_batch(name: str, case: Case) -> None:
    expected, ranks = one_process(case), [results[name] for results in trained(case.ranks)]
    assert not case.clipping or min(expected.norms) > 4 * case.clipping
    for got in ranks:
        assert exceeded(comparisons(got, expected, BOUNDS).values()) == []
        if written.learned(case.loss):
            assert_close(got.log_scale, expected.log_scale, FASTCLIP_ENGINE["log_scale"], "log_scale")
            assert abs(got.log_scale + np.log(TAU)) > 0.01  # the temperature has moved
    kinds = ("u", "tau") if written.individual(case.loss) else ("u",)
    for kind in kinds:
        parts = np.stack([getattr(got, kind) for got in ranks])
        assert ((~np.isnan(parts)).sum(axis=0) <= 1).all()  # each sample has one owner
        whole = np.where(np.isnan(parts).all(axis=0), np.nan, np.nansum(parts, axis=0))
        wanted = getattr(expected, kind)
        met = ~np.isnan(wanted)
        assert (met == ~np.isnan(whole)).all() and 0 < met.sum() < met.size
        assert_close(whole[met], wanted[met], FASTCLIP_ENGINE[kind], kind)


@pytest.mark.parametrize("name", ["fastclip_v3 zero1", "fastclip_v2 zero3"])
def test_the_comparison_detects_another_estimator(name: str) -> None:
    """FastCLIP v0 omits the factor tau. An oracle with gamma = 1 has no memory, like a run that lost its state."""
    got = trained(2)[0][name]
    others = {"FastCLIP v0": one_process(replace(CASES[name], loss="fastclip_v0"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "gamma_of", lambda *_: 1.0)
        others["u without its past"] = one_process(CASES[name])
    for fault, other in others.items():
        assert unnoticed([comparisons(got, other, BOUNDS)["parameters"]], fault) == []
