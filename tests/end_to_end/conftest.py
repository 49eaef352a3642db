"""Inputs of a tiny run, shared by the end-to-end tests: digit scenes, a tokenizer, a model and two ds_configs."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megaclip.data.sentencepiece_training import train_sentencepiece
from tests.end_to_end.training_runs import MODEL, ROOT, write_config

TRAINING_SCENES = 128


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with all inputs of launch/train.py on two ranks. Tests write their runs to other folders.

    train/*.tar (4 shards, 128 scenes), held_out/*.tar (32), zero_shot/ (20 labelled digits), tokenizer.model,
    model.json, zero1.json and zero3.json (ds_configs with a contrastive batch of 32).
    """
    folder = tmp_path_factory.mktemp("tiny_run")
    make_inputs(folder)
    return folder


def make_inputs(folder: Path) -> None:
    """Write the files of `tiny_run` to an empty folder."""
    sizes = {"train": TRAINING_SCENES, "shard-size": 32, "held-out": 32, "zero-shot": 20}
    options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    subprocess.run([sys.executable, "-m", "megaclip", "demo-data", str(folder), *options], cwd=ROOT, check=True)
    train_sentencepiece(_captions(folder / "train"), folder / "tokenizer.model", vocab_size=100, model_type="bpe")
    (folder / "model.json").write_text(json.dumps(MODEL))
    write_config(folder / "zero1.json")
    write_config(folder / "zero3.json", zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 100})


def _captions(shards: Path) -> list[str]:
    captions = []
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                if member.name.endswith(".txt") and (file := archive.extractfile(member)) is not None:
                    captions.append(file.read().decode())
    return captions
