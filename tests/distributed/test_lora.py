"""Training adapters through the engine equals peft in plain PyTorch, at every ZeRO stage, and resumes with its bits.

Two steps on one or two ranks are compared with one process in float64 on the whole batch, where peft has added the
adapters to the same model.
"""

from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megaclip.checkpoint import store
from megaclip.checkpoint.saved_states import FP32, WORKING, SavedStates
from megaclip.comm.parallelism import ONE_RANK
from megaclip.models import DualEncoder, build_model
from megaclip.models.lora import import_peft
from megaclip.step.batch import Tower
from megaclip.step.gradient_cache import RandomState
from megaclip.zero.reshard import load_resharded
from tests.distributed import engine_cases
from tests.distributed.engine_cases import (
    MEAN,
    SEED,
    STD,
    Case,
    OracleTraining,
    Outcome,
    masters,
    model_of,
    share_of,
    start_engine,
    take_step,
    train,
)
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import exceeded, unnoticed

RANK, ALPHA = 4, 12
MODEL = engine_cases.MODEL.replace(vision_cfg={"layers": 3})
"""At ZeRO-3 the first block, whose input has no gradient, is not compiled, and the last block never is."""


def case(stage: int, accumulation: int = 3, *, lora: dict | None = None, **settings) -> Case:
    """Return a case with adapters."""
    section = {"rank": RANK, "alpha": ALPHA, **(lora or {})}
    return Case(stage, accumulation, section=(("lora", section),), **settings)


CASES = {f"zero{stage} x {chunks}": case(stage, chunks) for stage in range(4) for chunks in (1, 3)}
CASES |= {f"zero{stage} on one rank": case(stage, ranks=1) for stage in range(4)}
CASES |= {
    "zero0 rslora": case(0, lora={"rslora": True}),
    "zero1 dora": case(1, lora={"dora": True}),
    "zero1 dropout, compiled": case(1, lora={"dropout": 0.4}, compiled=True, keep=3),
    "zero2 dropout, checkpointing, coalesced": case(
        2, lora={"dropout": 0.4}, checkpointing="plain", coalesce=True, text_chunks=2
    ),
    "zero3 dropout, compiled": case(3, lora={"dropout": 0.4}, compiled=True, keep=2, clipping=0.1),
    "zero2 text": case(2, lora={"towers": ["text"]}, checkpointing="plain"),
    "zero3 image": case(3, lora={"towers": ["image"], "targets": ["q_proj", "v_proj"]}, persistence_threshold=200),
    "zero3 offloaded": case(3, offload="all", checkpointing="cpu"),
}


def peft_model(case: Case) -> DualEncoder:
    """Return the model of a case in float64 with the adapters that peft adds to it."""
    settings = dict(case.section)["lora"]
    torch.manual_seed(SEED)
    model = build_model(model_of(case))
    torch.manual_seed(SEED)
    towers = "|".join({"image": "visual", "text": "text"}[name] for name in settings.get("towers", ["image", "text"]))
    layers = "|".join(settings.get("targets", ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"]))
    peft = import_peft()
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=rf"({towers})\..*\.({layers})",
        lora_dropout=settings.get("dropout", 0.0),
        use_dora=settings.get("dora", False),
        use_rslora=settings.get("rslora", False),
    )
    peft.get_peft_model(model, config)  # changes the model itself
    model.logit_scale.requires_grad_(True)
    return model.double()


class Oracle(OracleTraining):
    """Both towers draw random numbers for each chunk."""

    def features(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        case, model = self.case, self.model
        features: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for rank in range(case.ranks):
            images, tokens = share_of(step, rank, case.ranks)
            pixels, random = (images.double() / 255 - MEAN) / STD, RandomState(SEED, step, rank)
            for index, chunk in enumerate(pixels.chunk(case.accumulation)):
                random.reseed(Tower.IMAGE, index)
                features[0].append(model(chunk, None)[0])
            for index, chunk in enumerate(tokens.chunk(case.text_chunks or case.accumulation)):
                random.reseed(Tower.TEXT, index)
                features[1].append(model(None, chunk)[1])
        x, y = (torch.cat(side) for side in features)
        return x, y


@cache
def oracle(name: str) -> Outcome:
    with mock.patch.object(engine_cases, "MODEL", MODEL):
        training = Oracle(CASES[name], model=peft_model(CASES[name]))
        return training.train(training.features)


def train_all(cases: dict[str, Case], folder: str) -> dict[str, Outcome | str]:
    """Return the outcome of every case, and of the resumed engines of `resume`."""
    engine_cases.MODEL = MODEL
    outcomes = {name: or_traceback(train, case) for name, case in cases.items()}
    for stage in range(4):
        outcomes[f"resumed {stage}"] = or_traceback(resume, stage, Path(folder))
    return outcomes


def resume(stage: int, folder: Path) -> Outcome:
    """Return the masters after two steps ("parameters"), and of an engine that resumes after the first ("resumed").

    On one rank the engine loads what two ranks have saved, and saves it again.
    """
    engine, outcome, first = start_engine(case(stage)), Outcome(), "step_00000001"
    folder = folder / f"zero{stage}"
    folder.mkdir(exist_ok=True)
    if torch.distributed.get_world_size() == 1:
        load_resharded(engine, folder / first)
        store.save(engine, store.Target(folder, 2, {}, 2))
        return outcome
    take_step(engine, case(stage), 0, outcome)
    store.save(engine, store.Target(folder, 1, {}, 2))
    take_step(engine, case(stage), 1, outcome)
    outcome.parameters = adapters(engine)
    resumed = start_engine(case(stage))
    store.load(resumed, folder, first)
    take_step(resumed, case(stage), 1, outcome)
    outcome.resumed = adapters(resumed)
    return outcome


def adapters(engine) -> dict[str, np.ndarray]:
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in masters(engine).items() if name in trained}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[dict[str, Outcome | str]], Path]:
    """Outcomes by the name of the case, one dictionary per rank, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("lora")
    by_ranks = {n: {name: case for name, case in CASES.items() if case.ranks == n} for n in (1, 2)}
    both = run_ranks(train_all, 2, by_ranks[2], str(folder))
    (alone,) = run_ranks(train_all, 1, by_ranks[1], str(folder))
    return [*both, {name: alone[name] for name in by_ranks[1]}], folder


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_peft_in_plain_pytorch(trained, name):
    for outcomes in trained[0]:
        if name in outcomes:
            assert exceeded(comparisons(outcomes[name], oracle(name)).values()) == []


def test_the_comparison_detects_another_scale_and_no_dropout(trained):
    for name, other in (("zero0 x 3", "zero0 rslora"), ("zero1 dropout, compiled", "zero0 x 3")):
        found = comparisons(trained[0][0][name], oracle(other))
        assert unnoticed([found["parameters"]], other) == []


@pytest.mark.parametrize("stage", range(4))
def test_checkpoints_hold_adapters_only_and_resume_with_the_same_bits(trained, stage):
    outcomes, folder = trained
    resumed = outcomes[0][f"resumed {stage}"]
    assert isinstance(resumed, Outcome), resumed
    assert all(np.array_equal(resumed.resumed[name], value) for name, value in resumed.parameters.items())
    saved, again = (SavedStates.open(folder / f"zero{stage}" / f"step_{step:08d}") for step in (1, 2))
    assert saved.shapes.keys() == again.shapes.keys() == resumed.parameters.keys()
    assert all("lora_" in name or name == "logit_scale" for name in saved.shapes)
    for name, shape in saved.shapes.items():
        for kind in (*saved.state_kinds(name), FP32):
            values = [torch.empty(shape.numel()) for _ in range(2)]
            for states, value in zip((saved, again), values, strict=True):
                states.read(name, kind if states.has(name, kind) else WORKING, shape, ONE_RANK, 0, value)
            assert torch.equal(*values), (name, kind)
