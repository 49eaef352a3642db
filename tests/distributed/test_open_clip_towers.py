"""Training open_clip's towers through the engine equals plain PyTorch on the whole batch, for all families and stages.

Two ranks take two steps with two chunks per tower. Dropout, stochastic depth and batch norms are active in families
that have them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights, write_weights
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.verify import TOLERANCE, verify
from megaclip.zero.reshard import load_checkpoint
from tests.distributed.engine_cases import STEPS, WORLD_SIZE, Outcome, whole_parameters
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.open_clip_cases import Case, description, oracle, start_engine, statistics_of, train
from tests.distributed.test_engine import comparisons
from tests.open_clip_families import BOTH_RANDOM, COCA, FAMILIES, WITH_BATCH_NORM
from tests.tolerances import OPEN_CLIP_BF16, OPEN_CLIP_ENGINE, compare, exceeded, unnoticed

WAYS: dict[str, dict] = {
    "compiled": {"compiled": True, "keep": 1, "resumes": False},
    "checkpointing": {"checkpointing": "plain"},
    "kept": {"keep": 3, "text_chunks": 1, "resumes": False},
}
WITHOUT_GROUPS = ("resnet", "m2m_100")
"""Families of which open_clip cannot unlock groups."""
ADAPTERS = (("lora", {"rank": 4, "dropout": 0.2}),)
# The short form has one stage per family.
QUICK = {
    f"{name} zero{index % 4}": Case(index % 4, family=name, resumes=name in ("resnet", "convnext"))
    for index, name in enumerate(FAMILIES)
}
QUICK |= {
    # The first or last pass of one tower also runs the other tower, on blank rows.
    "both random zero2 offloaded": Case(2, family=BOTH_RANDOM, offload="optimizer", resumes=False),
    "mobileclip zero2 kept": Case(2, family="mobileclip", keep=3, checkpointing="plain", resumes=False),
    "mt5 zero3 checkpointing": Case(3, family="mt5", checkpointing="plain", resumes=False),
    "both random zero3 adapters": Case(3, family=BOTH_RANDOM, checkpointing="plain", section=ADAPTERS, resumes=False),
    # Adapters in timm's blocks, beside batch norms whose statistics are in checkpoints.
    "mobileclip zero2 adapters": Case(2, family="mobileclip", section=ADAPTERS),
    "eva zero1 cut": Case(1, family="eva", captions="cut", resumes=False),
    "coca zero0": Case(0, family=COCA, captions="padded"),
    "coca zero2 offloaded": Case(2, family=COCA, captions="padded", offload="optimizer", resumes=False),
    "coca zero3 kept": Case(3, family=COCA, captions="padded", keep=2),
}
GRID = {
    "eva zero3 compiled, cut": Case(
        3, family="eva", compiled=True, captions="cut", checkpointing="plain", resumes=False
    ),
    "both random zero3 kept": Case(3, family=BOTH_RANDOM, keep=3, text_chunks=1),
}
"""Each family at the stages that QUICK does not have, one way each. Every third family is also compiled.
tests/unit/models/test_compilation.py compiles all families without an engine."""
for _index, _name in enumerate(FAMILIES):
    for _stage, _way in list(enumerate(WAYS, start=_index + 1))[_index % 3 > 0 :]:
        GRID[f"{_name} zero{_stage % 4} {_way}"] = Case(_stage % 4, family=_name, **WAYS[_way])
    _locked = "" if _name in WITHOUT_GROUPS else "below"
    GRID[f"{_name} zero3 locked offloaded"] = Case(3, family=_name, locked=_locked, offload="all", resumes=False)
BF16 = {
    f"{name} zero{2 + index % 2}": Case(2 + index % 2, family=name, bf16=True) for index, name in enumerate(FAMILIES)
}


def train_all(cases: dict[str, Case], folder: Path) -> dict[str, Outcome | str]:
    """Return the outcome of every case on this rank, or the traceback of its exception."""
    return {name: or_traceback(train, case, folder, checkpoints_of(folder, name)) for name, case in cases.items()}


def checkpoints_of(folder: Path, name: str) -> Path:
    """Return the folder of a case's checkpoints."""
    return folder / "runs" / name.replace(" ", "-")


def prepared(folder: Path, cases: dict[str, Case]) -> Path:
    """Create an empty checkpoint folder in `folder` for every case. Return `folder`."""
    for name in cases:
        checkpoints_of(folder, name).mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("open_clip"), QUICK)


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Outcome | str]]:
    """Outcomes by the name of the case, one dictionary per rank."""
    return run_ranks(train_all, WORLD_SIZE, QUICK, folder)


def check(outcomes: list[dict[str, Outcome | str]], name: str, case: Case, folder: Path) -> None:
    """Compare every rank with the oracle, and the resumed engine with the engine that never stopped."""
    expected = oracle(case, folder)
    for rank, of_rank in enumerate(outcomes):
        got = of_rank[name]
        assert exceeded(comparisons(got, expected, OPEN_CLIP_ENGINE).values()) == [], f"rank {rank}"
        assert isinstance(got, Outcome)
        for key, value in (got.parameters | got.statistics).items() if case.resumes else ():
            assert (got.resumed[key] == value).all(), f"rank {rank}: {key} after resume"
    if not case.section:  # an export of adapters needs the files of --pretrained
        check_export(outcomes[0][name], name, case, folder)


def check_export(got: Outcome | str, name: str, case: Case, folder: Path) -> None:
    """Export the last checkpoint. It must have the values of the run, and open_clip must compute equal features."""
    assert isinstance(got, Outcome)
    checkpoints, exported = checkpoints_of(folder, name), folder / "exported" / name.replace(" ", "-")
    weights, config = consolidated_weights(checkpoints, f"step_{STEPS:08d}"), description(case, folder)
    trained = got.parameters | got.statistics
    assert weights.keys() == trained.keys()
    assert all((weights[key].detach().numpy() == value).all() for key, value in trained.items())
    write_model_card(exported, config, OPENAI_PREPROCESS)
    write_weights(exported, weights, config)
    assert verify(exported, assigned_model(config, read_weights(exported, config))).max_abs_diff <= TOLERANCE


@pytest.mark.parametrize("name", QUICK)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, folder, name):
    check(trained, name, QUICK[name], folder)


@pytest.mark.long
def test_every_family_at_every_stage(tmp_path):
    outcomes = run_ranks(train_all, WORLD_SIZE, GRID, prepared(tmp_path, GRID), time_limit_s=2400)
    failed = {}
    for name, case in GRID.items():
        try:
            check(outcomes, name, case, tmp_path)
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())


@pytest.mark.parametrize(("ranks", "chunks"), [(1, {1: 3, 3: 1}), (3, {1: 2, 2: 1})])
def test_the_caption_loss_is_that_of_the_whole_batch(tmp_path, ranks, chunks):
    """Chunks and ranks have different numbers of labels. chunks: number of chunks by ZeRO stage."""
    plain = Case(family=COCA, captions="padded", resumes=False, ranks=ranks)
    cases = {
        f"coca zero{stage}": replace(
            plain, stage=stage, accumulation=count, keep=stage, coalesce=stage == 1, compiled=(stage, ranks) == (1, 1)
        )
        for stage, count in chunks.items()
    }
    outcomes = run_ranks(train_all, ranks, cases, prepared(tmp_path, cases))
    for name, case in cases.items():
        check(outcomes, name, case, tmp_path)


@pytest.mark.parametrize(
    ("name", "weight"), [("convnext zero3", "visual.head.proj.weight"), ("coca zero0", "text_decoder.text_projection")]
)
def test_exports_are_compared_with_open_clips_own_forward(trained, folder, name, weight):
    """A changed weight is detected, so the comparison of the other test depends on the exported values."""
    check(trained, name, QUICK[name], folder)
    config, exported = description(QUICK[name], folder), folder / "exported" / name.replace(" ", "-")
    changed = read_weights(exported, config)
    changed[weight] += 0.1 * torch.randn_like(changed[weight])
    assert verify(exported, assigned_model(config, changed)).max_abs_diff > 3 * TOLERANCE


def test_the_comparison_detects_other_dropout_and_statistics(trained, folder):
    """An oracle with either mistake is far away, so the comparison depends on both."""
    case = QUICK["both random zero2 offloaded"]
    got, other = trained[0]["both random zero2 offloaded"], oracle(replace(case, fault="dropout"), folder)
    found = comparisons(got, other, OPEN_CLIP_ENGINE)
    assert unnoticed([found["parameters"]], "dropout") == []
    (name,) = [name for name in QUICK if name.startswith(WITH_BATCH_NORM[0])]
    other = oracle(replace(QUICK[name], fault="statistics"), folder)
    found = comparisons(trained[0][name], other, OPEN_CLIP_ENGINE)
    assert unnoticed([found["statistics"]], "statistics") == []


def reload(checkpoints: Path, exported: Path, folder: Path) -> list[dict[str, np.ndarray]]:
    """Return two sets of weights at ZeRO-3: loaded from an export, and from a checkpoint of ZeRO-1."""
    case, results = Case(3, family="mobileclip"), []
    engine = start_engine(case, folder, "--pretrained", str(exported))
    results.append(whole_parameters(engine) | statistics_of(engine.module))
    engine = start_engine(case, folder)
    load_checkpoint(engine, checkpoints / f"step_{STEPS:08d}")
    results.append(whole_parameters(engine) | statistics_of(engine.module))
    return results


def dtypes_of_parameters(folder: Path) -> list[tuple[set[torch.dtype], set[torch.dtype]]]:
    """Return the dtypes of parameters and of what this rank holds of them, at ZeRO-1 to 3."""
    found = []
    for stage in (1, 2, 3):
        parameters = list(start_engine(Case(stage, family="vit", bf16=True), folder).module.parameters())
        found.append(({p.dtype for p in parameters}, {getattr(p, "ds_tensor", p).dtype for p in parameters}))
    return found


def test_bfloat16_parameters_are_bfloat16_at_every_stage(tmp_path):
    """The modules are built in float32. DeepSpeed does not cast parameters that are already partitioned."""
    for found in run_ranks(dtypes_of_parameters, WORLD_SIZE, tmp_path):
        assert found == [({torch.bfloat16}, {torch.bfloat16})] * 3


@pytest.mark.long
def test_bfloat16_is_near_float64_and_resumes(tmp_path):
    outcomes = run_ranks(train_all, WORLD_SIZE, BF16, prepared(tmp_path, BF16))
    for name, case in BF16.items():
        got, expected = outcomes[0][name], oracle(case, tmp_path)
        assert isinstance(got, Outcome), got
        found = [compare(got.losses, expected.losses, OPEN_CLIP_BF16["loss"], name)]
        for key, values in expected.statistics.items():
            found.append(compare(got.statistics[key], values, OPEN_CLIP_BF16["statistics"], f"{name} {key}"))
        assert exceeded(found) == []
        for key, value in (got.parameters | got.statistics).items():
            assert (got.resumed[key] == value).all(), f"{name}: {key} after resume"


@pytest.mark.long
def test_exports_and_other_stages_start_from_the_same_weights_and_statistics(trained, folder):
    name = "mobileclip zero1"
    check(trained, name, QUICK[name], folder)
    exported = folder / "exported" / name.replace(" ", "-")
    got = trained[0][name]
    expected = got.parameters | got.statistics
    for of_rank in run_ranks(reload, WORLD_SIZE, checkpoints_of(folder, name), exported, folder):
        for weights in of_rank:
            assert weights.keys() == expected.keys()
            assert all((weights[key] == value).all() for key, value in expected.items())
