"""The scripts of docs/own_trainer.md, on one and two ranks, compared with a plain PyTorch loop on the whole batch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tolerances import RUN, assert_close

PAGE = Path(__file__).parents[2] / "docs" / "own_trainer.md"
SCRIPTS = {"DDP": "train_ddp.py", "Accelerate": "train_accelerate.py", "Trainer": "train_transformers.py",
           "Lightning": "train_lightning.py"}  # fmt: skip
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the page's scripts."""
    folder = tmp_path_factory.mktemp("own_trainer")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, block in zip(["towers.py", *SCRIPTS.values()], blocks, strict=True):
        assert name in PAGE.read_text()
        (folder / name).write_text(block)
    # Trainer and Lightning import torchvision if it is installed, which fails with PyTorch's CPU build
    # (megaclip/open_clip_package.py). Like that module, the test imports torchvision beforehand.
    start = "from megaclip.open_clip_package import import_torchvision\n\nimport_torchvision()\n"
    (folder / "sitecustomize.py").write_text(start)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Losses of a plain loop over whole batches in float64."""
    scope: dict = {}
    exec((folder / "towers.py").read_text(), scope)
    model = scope["Towers"]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, texts = (part.double() for part in scope["pairs"]().tensors)
    losses = []
    for start in range(0, len(images), scope["GLOBAL_BATCH"]):
        rows = slice(start, start + scope["GLOBAL_BATCH"])
        image_features, text_features, scale = model(images[rows], texts[rows])
        logits, targets = scale * image_features @ text_features.T, torch.arange(len(image_features))
        loss = (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_script_trains_on_the_whole_batch(folder, expected, script, ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, *launcher, script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    # When Python exits, a gloo thread that releases a tensor sometimes aborts the process. The script has ended before
    # that, and the abort comes from PyTorch.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert_close(losses, expected, RUN["loss"])
