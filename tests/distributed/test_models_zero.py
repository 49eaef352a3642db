"""Models under ZeRO on two gloo ranks: initial values and export.

One seed gives the same model with and without partitioning. The checkpoint of every stage exports to the weights of
the running model.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from megaclip.checkpoint import store
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.saved_states import PARAMETER_NAMES, consolidated_weights
from megaclip.checkpoint.search import MODEL_CARD
from megaclip.models import build_model, load_model_config
from tests.distributed.checks import assert_passed, run_checks
from tests.distributed.harness import run_ranks
from tests.tolerances import EXPORT, assert_close

REPOSITORY = Path(__file__).parents[2]
CONFIG = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 49408, "width": 24, "pool_type": "argmax"})
SEED = 3


def ds_config(stage, bf16):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        # Threshold 0: all parameters are partitioned, even the logit scale.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": bf16},
    }


def built(stage, bf16):
    torch.manual_seed(SEED)
    config = ds_config(stage, bf16)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        return build_model(CONFIG)


def whole_values(model):
    values = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = parameter.detach().clone()
    return values


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def check_initial_values(bf16):
    torch.manual_seed(SEED)
    plain = build_model(CONFIG)
    partitioned = built(3, bf16)
    assert partitioned.visual.proj.numel() == 0  # otherwise the check could not fail
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert_equal(whole_values(partitioned), {name: value.to(dtype) for name, value in plain.state_dict().items()})
    assert partitioned.no_weight_decay_names() == plain.no_weight_decay_names()


def step_of_training(engine):
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(2, 3, 24, 24, generator=generator)
    tokens = torch.randint(CONFIG.text_cfg.vocab_size, (2, CONFIG.text_cfg.context_length), generator=generator)
    image_features, text_features, log_scale = engine(images, tokens)
    engine.backward(-(image_features.float() * text_features.float()).sum() * log_scale.exp().sum())
    engine.step()


def check_export(stage, bf16, folder):
    """After a step of a partly frozen model, the exported weights equal those of the running model."""
    model = built(stage, bf16)
    model.lock_tower("text", 1)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group = {"params": list(trainable.values()), PARAMETER_NAMES: list(trainable)}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[group], config=ds_config(stage, bf16))
    before = whole_values(engine.module)
    step_of_training(engine)
    after = whole_values(engine.module)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert "visual.proj" in moved
    assert "text.token_embedding.weight" not in moved
    assert bf16 or "logit_scale" in moved
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        write_model_card(folder / MODEL_CARD, CONFIG, OPENAI_PREPROCESS)
    dist.barrier()
    masters = {}
    if stage:
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        masters = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained.items()}
    tag = store.save(engine, store.Target(folder, step=1, state={}, keep_last=1))
    if dist.get_rank() == 0:
        joined = consolidated_weights(folder, tag)
        assert_equal({name: joined[name] for name in masters}, masters)
        assert {value.dtype for value in joined.values()} == {torch.float32}
        # With bfloat16 the float32 masters are exported. Rounded to bfloat16, they equal the running weights.
        dtype = torch.bfloat16 if bf16 else torch.float32
        assert_equal({name: value.to(dtype) for name, value in joined.items()}, after)
    dist.barrier()


def checks(root):
    """Return the checks of the launch by name. They write their exports to folders of `root`."""
    result = {}
    for bf16, suffix in ((False, ""), (True, "_bf16")):
        result[f"initial values{suffix}"] = partial(check_initial_values, bf16)
        for stage in range(1 if bf16 else 0, 4):  # bf16 at stage 0 is refused by the configuration
            result[f"export, stage{stage}{suffix}"] = partial(check_export, stage, bf16, root / f"stage{stage}{suffix}")
    return result


def run_all_checks(root):
    return run_checks(checks(root))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def outcomes(root):
    """Outcomes of both ranks. `root` then contains the checkpoints."""
    return run_ranks(run_all_checks, 2, root)


@pytest.mark.parametrize("name", checks(Path()))
def test_models_under_zero(outcomes, name):
    assert_passed(outcomes, name)


def run_export(*arguments):
    command = [sys.executable, "-m", "megaclip", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


def test_export_command_writes_a_directory_that_open_clip_verifies(root, outcomes, tmp_path):
    done = run_export(root / "stage3", tmp_path / "out", "--verify")
    assert done.returncode == 0, done.stderr
    words = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert_close(float(words["export_max_abs_diff"]), 0.0, EXPORT, size=1)  # features have length 1
    assert words["export_captions_differing"] == "0 of 6"
    files = ["README.md", MANIFEST, "open_clip_config.json", "open_clip_model.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == files


def test_an_incomplete_checkpoint_is_refused_in_one_line(root, outcomes, tmp_path):
    broken = shutil.copytree(root / "stage2", tmp_path / "broken")
    next(broken.glob("step_*/*rank_1*optim_states.pt")).unlink()
    done = run_export(broken, tmp_path / "out")
    assert done.returncode == 1
    assert "optim_states.pt is missing" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
