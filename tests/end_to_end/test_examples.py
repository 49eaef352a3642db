"""The files of examples/, unchanged except for the port of a launcher and the size of the fine-tuned model."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from megaclip.open_clip_package import import_open_clip, import_torchvision
from tests.end_to_end.training_runs import ROOT, free_port, launcher_environment
from tests.tolerances import RUN, assert_close

EXAMPLES = ROOT / "examples"
SCRIPTS = [
    *(f"own_trainer/train_{trainer}.py" for trainer in ("ddp", "accelerate", "transformers", "lightning")),
    *(f"gradient_cache/train_{trainer}.py" for trainer in ("deepspeed", "accelerate", "transformers", "lightning")),
]
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PIXELS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic", "resize_mode": "shortest"}
COUNTED = """
import atexit
import os
from pathlib import Path

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

construct = DistributedDataParallel.__init__


def constructed(self, *arguments, **named):
    construct(self, *arguments, **named)
    reduced = []

    def reduce(group, bucket):
        reduced.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    self.register_comm_hook(None, reduce)
    size = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
    atexit.register(lambda: Path("reduced-" + os.environ["RANK"]).write_text(str(sum(reduced) / size)))


DistributedDataParallel.__init__ = constructed
"""
"""Lets DDP count in whichever trainer how often it reduces a parameter's gradient, and write it to a file."""
pytestmark = pytest.mark.long


def start_with_torchvision(folder: Path) -> None:
    """Let every Python with `folder` on its path import torchvision, which otherwise fails with PyTorch's CPU build.

    Trainer, Lightning and open_clip import it if it is installed (megaclip/open_clip_package.py).
    """
    start = "from megaclip.open_clip_package import import_torchvision\n\nimport_torchvision()\n"
    (folder / "sitecustomize.py").write_text(start)


def run(command: list[str], folder: Path) -> str:
    """Run a command in `folder`, which is on Python's path, and return its output."""
    environment = {**launcher_environment(), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    # When Python exits, a gloo thread that releases a tensor sometimes aborts the process. The script has ended before
    # that, and the abort comes from PyTorch.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stdout, done.stdout
    return done.stdout


def run_script(path: Path, folder: Path, *arguments: str) -> str:
    """Run a shell script with a free port for its launcher. arguments: those that the script passes on."""
    script = path.read_text().replace("deepspeed --", f"deepspeed --master_port {free_port()} --")
    path.write_text(script)
    return run(["bash", str(path), *arguments], folder)


@pytest.fixture(scope="module")
def expected():
    """Losses of a plain loop over whole batches in float64."""
    scope = runpy.run_path(str(EXAMPLES / "own_trainer/towers.py"))
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_trainer_trains_on_the_whole_batch(tmp_path, expected, script):
    folder = tmp_path / "example"
    shutil.copytree((EXAMPLES / script).parent, folder)
    start_with_torchvision(folder)
    with (folder / "sitecustomize.py").open("a") as start:
        start.write(COUNTED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = run([sys.executable, *launcher, Path(script).name], folder)
    assert_close([float(loss) for loss in re.findall(r"\bloss (\d\.\d{6})\b", output)], expected, RUN["loss"])
    if "deepspeed" not in script:
        reductions = [float(path.read_text()) for path in folder.glob("reduced-*")]
        assert reductions == [len(expected)] * 2


@pytest.mark.parametrize("columns", [2, 4])
def test_the_loss_class_for_sentence_transformers_has_the_gradients_of_their_own(monkeypatch, columns):
    """Their MultipleNegativesRankingLoss encodes the whole batch at once. They need not be installed."""
    import_torchvision()
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    monkeypatch.syspath_prepend(str(EXAMPLES / "gradient_cache"))
    example = runpy.run_path(str(EXAMPLES / "gradient_cache/train_sentence_transformers.py"))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = torch.nn.EmbeddingBag(60, 8).double()

        def forward(self, features):
            return {"sentence_embedding": self.table(features["input_ids"])}

    gradients, values = [], []
    texts = torch.randint(60, (columns, 10, 12), generator=torch.Generator().manual_seed(1))
    directions = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    for loss_of in (
        lambda model: losses.MultipleNegativesRankingLoss(model, **directions),
        lambda model: example["CachedClipLoss"](model, mini_batch_size=3),
    ):
        model = Model()
        loss = loss_of(model)([{"input_ids": ids, "modality": "text"} for ids in texts], None)
        loss.backward()
        values.append(loss.item())
        gradients.append(model.table.weight.grad)
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_runs_on_digit_scenes(tmp_path):
    shutil.copytree(EXAMPLES / "digits", tmp_path / "digits")
    output = run_script(tmp_path / "digits/huge_batch.sh", tmp_path)  # draws the data first
    assert "contrastive batch 256 = 2 ranks x 8 image chunks of 16 or 2 text chunks of 64" in output
    assert "images are kept on disk" in output and "step 3/3 loss" in output
    assert "step 6/6 loss" in run_script(tmp_path / "digits/fastclip.sh", tmp_path)
    assert json.loads((tmp_path / "runs/fastclip/metrics.json").read_text())["steps"] == 6


def make_released(folder: Path) -> None:
    """Write a small open_clip model with the files of a download."""
    torch.manual_seed(0)
    model = import_open_clip().CLIP(**MODEL)
    folder.mkdir()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": MODEL, "preprocess_cfg": PIXELS}))


def test_fine_tuning_from_a_released_model_to_an_export_that_open_clip_loads(tiny_run, tmp_path):
    shutil.copytree(tiny_run / "train", tmp_path / "shards")
    shutil.copytree(tiny_run / "held_out", tmp_path / "val")
    shutil.copytree(EXAMPLES / "fine_tuning", tmp_path / "fine_tuning")
    start_with_torchvision(tmp_path)
    make_released(tmp_path / "downloaded")
    config = json.loads((EXAMPLES / "fine_tuning/fine_tune.json").read_text())
    config |= {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 32}  # the example's batch exceeds the data
    (tmp_path / "fine_tuning/fine_tune.json").write_text(json.dumps(config))
    log = run_script(tmp_path / "fine_tuning/fine_tune.sh", tmp_path, "--epochs", "2")
    assert "training would accept this data" in log and (tmp_path / "sheet.png").is_file()
    assert len(re.findall(r"\b0 missing, 0 unexpected", log)) >= 2  # the import and the run
    best = json.loads((tmp_path / "runs/fine-tuned/best_checkpoint.json").read_text())["checkpoint"]
    assert f"megaclip export runs/fine-tuned OUT_DIR --tag {best} --verify" in log
    assert log.count("retrieval, 32 captions") == 2
    difference = re.search(r"export_max_abs_diff (\S+)", log)
    assert difference and float(difference.group(1)) < 1e-5
    assert_only_unlocked_weights_have_changed(tmp_path)

    with tarfile.open(tmp_path / "val" / "00000.tar") as archive:
        picture = archive.extractfile(next(name for name in archive.getnames() if name.endswith(".jpg")))
        assert picture is not None
        (tmp_path / "photo.jpg").write_bytes(picture.read())
    output = run([sys.executable, "fine_tuning/use.py"], tmp_path)
    similarities = re.search(r"^similarities (.*)$", output, re.MULTILINE)
    assert similarities and len(json.loads(similarities.group(1))[0]) == 2

    log = run_script(tmp_path / "fine_tuning/locked.sh", tmp_path, "--epochs", "1")
    assert log.count("images once") == 1 and log.count("images are read from features/") == 2


def assert_only_unlocked_weights_have_changed(folder: Path) -> None:
    """Compare with the release, in float32 although the run had bf16: two groups of the image tower and the text tower
    were trained."""
    before = load_file(folder / "downloaded" / "open_clip_model.safetensors")
    after = load_file(folder / "exported" / "open_clip_model.safetensors")
    unlocked = re.compile(r"visual\.(proj|ln_post|transformer\.resblocks\.2)\b")
    assert before.keys() == after.keys()
    for name, value in before.items():
        trained = not name.startswith("visual.") or unlocked.match(name) is not None
        assert trained != torch.equal(value, after[name]), name
