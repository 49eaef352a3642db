"""Runs with an objective: the examples, checkpoints and exports of its parameters, curves of its terms, refusals."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.checkpoint.saved_states import OBJECTIVE, consolidated_weights
from megaclip.commands import export_open_clip
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.models import build_model, load_model_config
from tests.end_to_end.training_runs import ROOT, flags, run_in_ranks, scalars, write_config

EXAMPLES = ROOT / "examples" / "objectives"
TEACHER = {"image": "npz.image", "text": "npz.text", "dims": [4, 5], "logit_scale": 20.0, "views": True}


def with_fields(source: Path, target: Path) -> str:
    """Write tar shards with a score and a teacher's features beside each sample; return their pattern."""
    target.mkdir()
    generator = np.random.default_rng(0)
    for shard in sorted(source.glob("*.tar")):
        with tarfile.open(shard) as old, tarfile.open(target / shard.name, "w") as new:
            for member in old.getmembers():
                content = old.extractfile(member).read()
                members = {member.name: content}
                if member.name.endswith(".txt"):
                    stem, buffer = member.name.removesuffix(".txt"), io.BytesIO()
                    image, text = generator.normal(size=(3, 9)), generator.normal(size=9)
                    np.savez(buffer, image=image.astype(np.float16), text=text.astype(np.float16))
                    members |= {f"{stem}.json": json.dumps({"score": 0.5}).encode(), f"{stem}.npz": buffer.getvalue()}
                for name, data in members.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    new.addfile(info, io.BytesIO(data))
    return str(target / "*.tar")


def settings(path: Path, objective: str | None, stage: int = 1, loss: str = "clip", **of_objective: object) -> Path:
    section = {"loss": loss, "objective": objective, "objective_settings": of_objective or None}
    return write_config(path, stage, section, bf16={"enabled": stage == 3})


def test_objectives_train_resume_and_export(tiny_run, tmp_path, monkeypatch):
    data = with_fields(tiny_run / "train", tmp_path / "data")
    short = {"train_data": data, "train_steps": 1}
    shared = {"train_data": data, "train_steps": 4, "save_every_steps": 2, "keep_last": 9}
    score = [settings(tmp_path / f"score{stage}.json", f"{EXAMPLES / 'score.py'}:Score", stage) for stage in (1, 3)]
    margin = settings(tmp_path / "margin.json", f"{EXAMPLES / 'margin.py'}:Margin", margin=0.9)
    mirrored = settings(tmp_path / "mirrored.json", f"{EXAMPLES / 'mirrored.py'}:Mirrored", 3, "fastclip_v3")
    stored = settings(tmp_path / "stored.json", "distillation", teachers=[TEACHER], feature_weight=0.5, project=True)
    config = load_model_config(str(tiny_run / "model.json"))
    chosen = choose_tokenizer(str(tiny_run / "tokenizer.model"), None, config)
    config = chosen.fit(config)
    (tmp_path / "teacher").mkdir()
    write_weights(tmp_path / "teacher", build_model(config).state_dict(), config)
    write_model_card(tmp_path / "teacher", config, OPENAI_PREPROCESS, chosen.tokenizer.files)
    live = settings(tmp_path / "live.json", "distillation", 3, teachers=[{"model": str(tmp_path / "teacher")}])
    second = tmp_path / "score/checkpoints/step_00000002"
    commands = {
        "score": flags(tiny_run, score[0], tmp_path, name="score", **shared),
        "resumed": flags(tiny_run, score[0], tmp_path, name="resumed", resume=second, **shared),
        "zero3": flags(tiny_run, score[1], tmp_path, name="zero3", resume=second, **shared),
        "margin": flags(tiny_run, margin, tmp_path, name="margin", **short),
        "mirrored": flags(tiny_run, mirrored, tmp_path, name="mirrored", **short),
        "live": flags(tiny_run, live, tmp_path, name="live", **short),
        "stored": flags(tiny_run, stored, tmp_path, name="stored", **short),
        "without": flags(tiny_run, settings(tmp_path / "no.json", None), tmp_path, name="no", resume=second, **shared),
    }
    outcomes = dict(zip(commands, run_in_ranks(list(commands.values())), strict=True))
    without = outcomes.pop("without")
    for name, outcome in outcomes.items():
        assert [end.exit_code for end in outcome] == [0, 0], (name, outcome[0].output)
    assert without[0].exit_code == 78
    assert "was written with objective ['head.weight', 'head.bias'], and this run has []" in without[0].errors[0]
    assert " margin 0." in outcomes["margin"][0].output and " contrastive " in outcomes["margin"][0].output

    last = "step_00000004"
    weights = consolidated_weights(tmp_path / "score/checkpoints", last, of_objective=True)
    assert set(weights) == {"objective.head.weight", "objective.head.bias"}
    for name, exact in (("resumed", True), ("zero3", False)):
        other = consolidated_weights(tmp_path / name / "checkpoints", last, of_objective=True)
        for key, value in weights.items():
            bound = {} if exact else {"rtol": 0.02, "atol": 2e-3}
            torch.testing.assert_close(other[key], value, **(bound or {"rtol": 0, "atol": 0}))
    curves = scalars(tmp_path / "score")
    score, contrastive = curves["train/terms/score"], curves["train/terms/contrastive"]
    assert score[4] < score[1]
    assert all(abs(score[step] + contrastive[step] - loss) < 1e-5 for step, loss in curves["train/loss"].items())

    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "score"), str(exported), "--verify"])
    export_open_clip.main()  # exits if open_clip's features differ
    for name, value in load_file(exported / "objective.safetensors").items():
        assert torch.equal(value, weights[OBJECTIVE + name]), name
