"""The commands of docs/fine_tuning.md, unchanged, with a small pretrained model on the CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaclip.open_clip_package import import_open_clip
from tests.end_to_end.training_runs import ROOT, free_port, launcher_environment

PAGE = ROOT / "docs" / "fine_tuning.md"
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PIXELS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic", "resize_mode": "shortest"}
pytestmark = pytest.mark.long


def make_released(folder: Path) -> None:
    """Write a small open_clip model with the files of a download."""
    torch.manual_seed(0)
    model = import_open_clip().CLIP(**MODEL)
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()},
              folder / "open_clip_model.safetensors")  # fmt: skip
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": MODEL, "preprocess_cfg": PIXELS}))


def run(folder: Path, commands: str) -> str:
    """Run a code block of the page in bash and return its output. Only the launcher's port is added."""
    commands = commands.replace("deepspeed --module", f"deepspeed --master_port {free_port()} --module")
    environment = {**launcher_environment(), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


def test_the_page_from_a_released_model_to_an_export_that_open_clip_loads(tiny_run, tmp_path):
    shutil.copytree(tiny_run / "train", tmp_path / "shards")
    shutil.copytree(tiny_run / "held_out", tmp_path / "val")
    make_released(tmp_path / "downloaded")
    with tarfile.open(tmp_path / "val" / "00000.tar") as archive:
        picture = archive.extractfile(next(name for name in archive.getnames() if name.endswith(".jpg")))
        assert picture is not None
        (tmp_path / "photo.jpg").write_bytes(picture.read())
    # open_clip imports torchvision, which fails with PyTorch's CPU build (megaclip/open_clip_package.py).
    start = "from megaclip.open_clip_package import import_torchvision\n\nimport_torchvision()\n"
    page = PAGE.read_text()
    config = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    config |= {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 32}  # the page's batch is larger than the data
    (tmp_path / "fine_tune.json").write_text(json.dumps(config))
    get, check, train, evaluate, export = re.findall(r"```\n(.*?)```\n", re.sub(r"```\w+\n.*?```\n", "", page,
                                                                               flags=re.DOTALL), re.DOTALL)  # fmt: skip

    download, importing = get.strip().splitlines()
    assert download.endswith("--local-dir downloaded")  # requires a network: `make_released` wrote that directory
    assert "0 missing, 0 unexpected" in run(tmp_path, importing)
    assert "training would accept this data" in run(tmp_path, check) and (tmp_path / "sheet.png").is_file()
    log = run(tmp_path, train)
    assert re.search(r"\d+ parameters loaded, 0 missing, 0 unexpected", log)
    best = json.loads((tmp_path / "runs/fine-tuned/best_checkpoint.json").read_text())["checkpoint"]
    assert f"megaclip export runs/fine-tuned OUT_DIR --tag {best} --verify" in log
    assert "retrieval, 32 pairs" in run(tmp_path, evaluate)
    difference = re.search(r"export_max_abs_diff (\S+)", run(tmp_path, export))
    assert difference and float(difference.group(1)) < 1e-5
    assert_only_unlocked_weights_have_changed(tmp_path)

    (tmp_path / "sitecustomize.py").write_text(start)
    (tmp_path / "load.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    similarities = re.search(r"^similarities (.*)$", run(tmp_path, f"{sys.executable} load.py"), re.MULTILINE)
    assert similarities and len(json.loads(similarities.group(1))[0]) == 2


def assert_only_unlocked_weights_have_changed(folder: Path) -> None:
    """Compare the export with the release: two groups of the image tower and the whole text tower were trained."""
    before = load_file(folder / "downloaded" / "open_clip_model.safetensors")
    after = load_file(folder / "exported" / "open_clip_model.safetensors")
    unlocked = re.compile(r"visual\.(proj|ln_post|transformer\.resblocks\.2)\b")
    assert before.keys() == after.keys()
    for name, value in before.items():
        trained = not name.startswith("visual.") or unlocked.match(name) is not None
        assert trained != torch.equal(value.bfloat16().float(), after[name]), name
