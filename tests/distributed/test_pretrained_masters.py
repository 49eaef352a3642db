"""With bf16, training starts from unrounded pretrained weights: the float32 masters have every bit of the file.

DeepSpeed copies a master from its parameter, which has been rounded to bfloat16. Random initial values are equal with
and without the partitioning of ZeRO-3.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param

from megaclip.checkpoint.open_clip_weights import write_tensors, write_weights
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import LOCKED_WEIGHTS, MODEL_CARD
from megaclip.checkpoint.store import Target, save
from megaclip.comm.groups import group_rank
from megaclip.engine.saved_model import locked_weights
from megaclip.models import build_model, load_model_config
from megaclip.zero.reshard import load_checkpoint
from tests.distributed.checks import assert_passed, run_checks
from tests.distributed.engine_cases import MODEL, WORLD_SIZE, Case, start_engine, whole_parameters, whole_value
from tests.distributed.harness import run_ranks

CASES = {
    "ZeRO-1": Case(1, bf16=True),
    "ZeRO-2, optimizer in host memory": Case(2, bf16=True, offload="optimizer"),
    "ZeRO-3": Case(3, bf16=True),
    "ZeRO-3, all in host memory": Case(3, bf16=True, offload="all"),
    "most parameters locked": Case(2, bf16=True, locked="most"),
    "both towers locked, ZeRO-3": Case(3, bf16=True, locked="both"),
    # Must be the last case: DeepSpeed keeps the groups of tensor parallelism until the process ends.
    "two tensor-parallel ranks": Case(1, bf16=True, tensor_parallel=2, locked="text"),
}


def released(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in build_model(MODEL).state_dict().items()}


def check(case: Case, folder: Path, case_name: str) -> None:
    """Check masters when the image tower comes from one file and the other weights from another file."""
    engine = start_engine(
        case, None, "--pretrained", str(folder / "whole"), "--pretrained-image", str(folder / "image")
    )
    image, rest = released(2), released(1)
    expected = {name: image[name] if name.startswith("visual.") else rest[name] for name in rest}
    named = dict(engine.module.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    assert named.keys() == expected.keys()
    assert ("visual.class_embedding" in trained) == (case.locked in ("", "text"))
    for name in trained:
        found = whole_value(name, safe_get_full_fp32_param(named[name]).detach().clone(), engine.module.tensor)
        assert torch.equal(found, expected[name]), name
    for name, found in whole_parameters(engine).items():
        assert torch.equal(torch.from_numpy(found), expected[name].bfloat16().float()), name
    check_saved(engine, case, folder / "saved" / case_name, expected)


def check_saved(engine: DeepSpeedEngine, case: Case, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check that an export has the exact weights, locked ones included, and so has a run that resumes in float32."""
    locked = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
    if group_rank() == 0:
        (folder / MODEL_CARD).mkdir(parents=True)
        if locked:
            write_tensors(folder / MODEL_CARD / LOCKED_WEIGHTS, engine.module.locked_weights)
    tag = save(engine, Target(folder, step=1, state={}, keep_last=1))
    exported = consolidated_weights(folder, tag)
    for name, value in expected.items():
        assert torch.equal(exported[name], value), name
    if locked and case.tensor_parallel == 1:
        resumed = start_engine(replace(case, stage=0, bf16=False))
        load_checkpoint(resumed, folder / tag)
        for name, found in whole_parameters(resumed).items():
            assert torch.equal(torch.from_numpy(found), expected[name]), name
        exact = locked_weights(folder / tag, folder, locked, bf16=True)
        assert exact.keys() == set(locked) and all(torch.equal(exact[name], expected[name]) for name in locked)


def check_initial_values() -> None:
    """Check a model with fixed positions: deepspeed.zero.Init replaces torch.arange by one that rounds to bfloat16."""
    config = load_model_config("demo-tiny")
    assert config.vision_position_init == "sin_cos_2d"
    torch.manual_seed(3)
    plain = build_model(config).bfloat16().state_dict()
    torch.manual_seed(3)
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        partitioned = build_model(config)
    assert partitioned.visual.proj.numel() == 0  # otherwise the check could not fail
    for name, parameter in partitioned.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            assert torch.equal(parameter, plain[name]), name


def run_all(folder: Path) -> dict[str, str]:
    checks = {name: partial(check, case, folder, name) for name, case in CASES.items()}
    return run_checks({"initial values": check_initial_values, **checks})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("released")
    for name, seed in (("whole", 1), ("image", 2)):
        (folder / name).mkdir()
        write_weights(folder / name, released(seed), MODEL)
    return run_ranks(run_all, WORLD_SIZE, folder)


@pytest.mark.parametrize("name", CASES)
def test_masters_are_not_rounded(outcomes: list[dict[str, str]], name: str) -> None:
    assert_passed(outcomes, name)


def test_initial_values_are_those_without_partitioning(outcomes: list[dict[str, str]]) -> None:
    assert_passed(outcomes, "initial values")
