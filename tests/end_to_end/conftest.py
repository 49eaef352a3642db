"""Inputs of a tiny run, shared by the end-to-end tests: digit scenes, a tokenizer, a model and two ds_configs."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megaclip.data.tokenizers import train_sentencepiece
from tests.end_to_end.training_runs import ROOT

TRAINING_SCENES = 256
MODEL = {
    "embed_dim": 16,
    "vision_position_init": "sin_cos_2d",
    "vision_cfg": {"image_size": 24, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {
        "context_length": 24,
        "vocab_size": 128,
        "width": 32,
        "heads": 2,
        "layers": 2,
        "eos_id": 2,
        "pool_type": "eos",
    },
}
# Two ranks x two chunks of 8 pairs: the contrastive batch is 32.
DS_CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        # torch's AdamW, because DeepSpeed's own must be compiled first
        "params": {"lr": 0.002, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
    },
    "megaclip": {"loss": "clip", "exchange": "ring", "reduction": "feature"},
}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with all inputs of launch/train.py on two ranks; tests write their runs to other folders.

    train/*.tar (4 shards, 256 scenes), held_out/*.tar (32), zero_shot/ (20 labelled digits), tokenizer.model,
    model.json, zero1.json and zero3.json (ds_configs with a contrastive batch of 32).
    """
    folder = tmp_path_factory.mktemp("tiny_run")
    sizes = {"train": TRAINING_SCENES, "shard-size": 64, "held-out": 32, "zero-shot": 20, "processes": 1}
    options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    subprocess.run([sys.executable, "tools/make_digit_scenes.py", str(folder), *options], cwd=ROOT, check=True)
    train_sentencepiece(_captions(folder / "train"), folder / "tokenizer.model", vocab_size=100, model_type="bpe")
    (folder / "model.json").write_text(json.dumps(MODEL))
    partitioning = {"zero1": {"stage": 1}, "zero3": {"stage": 3, "stage3_param_persistence_threshold": 100}}
    for name, zero in partitioning.items():
        (folder / f"{name}.json").write_text(json.dumps(DS_CONFIG | {"zero_optimization": zero}, indent=1))
    return folder


def _captions(shards: Path) -> list[str]:
    captions = []
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                if member.name.endswith(".txt") and (file := archive.extractfile(member)) is not None:
                    captions.append(file.read().decode())
    return captions
