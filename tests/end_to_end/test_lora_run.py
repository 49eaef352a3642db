"""Complete runs that train adapters: resume, other weights, other ZeRO stages, precision, exports and refusals."""

import sys

import pytest
import torch

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.checkpoint.saved_states import SavedStates, consolidated_weights
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.commands import export_open_clip
from megaclip.data import load_tokenizer
from megaclip.errors import ConfigError
from megaclip.models import build_model, load_model_config
from tests.end_to_end.training_runs import flags, run_in_ranks, write_config

STEPS, LAST = 4, "step_00000004"


def test_adapters_resume_and_export_and_refuse_other_weights(tiny_run, tmp_path, monkeypatch):
    config = load_model_config(str(tiny_run / "model.json"))
    for seed, name in enumerate(("base", "other")):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name, build_model(config).state_dict(), config)
    section = {"lora": {"rank": 4, "dropout": 0.1, "towers": ["image"]}, "ema_decay": 0.8}
    settings = {
        stage: write_config(tmp_path / f"zero{stage}.json", stage, section, bf16={"enabled": True}) for stage in (2, 3)
    }
    shared = {"train_steps": STEPS, "save_every_steps": 2, "keep_last": 9, "pretrained": tmp_path / "base"}
    second = tmp_path / "whole/checkpoints/step_00000002"
    commands = [
        flags(tiny_run, settings[2], tmp_path, name="whole", async_save=[], **shared),
        flags(tiny_run, settings[2], tmp_path, name="resumed", resume=second, **shared),
        flags(tiny_run, settings[3], tmp_path, name="zero3", resume=second, **shared),
        flags(tiny_run, settings[2], tmp_path, name="o", resume=second, **shared | {"pretrained": tmp_path / "other"}),
        flags(tiny_run, settings[2], tmp_path, name="random", **shared | {"pretrained": None}),
        flags(tiny_run, settings[2], tmp_path, name="locked", lock_image=[], **shared),
    ]
    *ends, other, random, locked = run_in_ranks(commands)
    assert all(end.exit_code == 0 for command in ends for end in command), [command[0].output for command in ends]
    assert "LoRA: adapters of rank 4 at 12 layers" in ends[0][0].output
    for (end, _), message in (
        (other, "the checkpoint's adapters were trained on weights with SHA-256"),
        (random, "megaclip.lora requires --pretrained"),
        (locked, "--lock-image cannot be used with megaclip.lora"),
    ):
        assert end.exit_code == 78 and message in end.errors[0], end.output

    trained = SavedStates.open(second).shapes
    assert all(".lora_" in name or name == "logit_scale" for name in trained)
    assert sum(path.stat().st_size for path in second.iterdir()) < 400_000, "the model has 230,000 parameters"
    weights, base = consolidated_weights(tmp_path / "whole/checkpoints", LAST), read_tensors(tmp_path / "base")
    for name, value in consolidated_weights(tmp_path / "resumed/checkpoints", LAST).items():
        assert torch.equal(weights[name], value), name
    for name, value in consolidated_weights(tmp_path / "zero3/checkpoints", LAST).items():
        torch.testing.assert_close(weights[name], value, rtol=0.02, atol=2e-3)
    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "whole"), str(exported), "--ema", "--verify"])
    export_open_clip.main()  # exits if open_clip's features differ
    merged = read_tensors(exported)
    changed = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    blocks = range(config.vision_cfg.layers)
    layers = ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    expected = {f"visual.transformer.resblocks.{block}.{layer}" for block in blocks for layer in layers}
    assert changed == {*expected, "logit_scale"}

    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "whole"), str(tmp_path / "peft"), "--format", "peft"])
    with pytest.raises(ConfigError, match="eos_id 2, which CLIPModel reads as the highest id"):
        export_open_clip.main()
    assert not (tmp_path / "peft").exists()


def test_an_objective_trains_its_parameters_beside_adapters(tiny_run, tmp_path, monkeypatch):
    """With --feature-cache there are no images that it could read."""
    config = load_model_config(str(tiny_run / "model.json"))
    tokenizer = load_tokenizer(str(tiny_run / "tokenizer.model"), config.text_cfg.context_length)
    config = config.replace(text_cfg=tokenizer.write_open_clip(tmp_path / "base"))
    write_model_card(tmp_path / "base", config, OPENAI_PREPROCESS, tokenizer.files)
    write_weights(tmp_path / "base", build_model(config).state_dict(), config)
    teachers = {"teachers": [{"model": str(tmp_path / "base")}], "feature_weight": 1.0, "project": True}
    section = {"objective": "distillation", "objective_settings": teachers, "lora": {"rank": 4}}
    path = write_config(tmp_path / "config.json", megaclip=section)
    shared = {"train_steps": 1, "pretrained": tmp_path / "base"}
    cached = {"no_augmentation": [], "lock_image": [], "feature_cache": tmp_path / "cache"}
    (first, second), (refused, _) = run_in_ranks(
        [
            flags(tiny_run, path, tmp_path, name="run", **shared),
            flags(tiny_run, path, tmp_path, name="cached", **shared, **cached),
        ]
    )
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert refused.exit_code == 78 and "--feature-cache keeps neither images nor extra fields" in refused.errors[0]
    assert "objective.image_0.weight" in SavedStates.open(tmp_path / "run/checkpoints/step_00000001").shapes
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"])
    export_open_clip.main()  # exits if open_clip's features differ
