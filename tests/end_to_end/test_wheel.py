"""The wheel without the checkout contains the trainer and its configurations, and runs the demo in an empty folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the source distribution from the tracked files, and the wheel from it, as `make dist` does.

    The environment's setuptools builds them, so the test needs no network.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.long
def test_the_wheel_has_the_trainer_its_configurations_and_the_command(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"megaclip/{path.relative_to(ROOT)}" for path in (ROOT / "ds_configs").rglob("*.json")}
    pages = {f"megaclip/{path.relative_to(ROOT)}" for path in (ROOT / "docs").glob("*.md")}
    assert configs and configs <= names
    examples = {f"megaclip/{path.relative_to(ROOT)}" for path in (ROOT / "examples").glob("*/*.*")}
    assert pages | examples | {"megaclip/README.md", "megaclip/launch/slurm.sbatch"} <= names
    assert {"megaclip/commands/train.py", "megaclip/__main__.py", "megaclip/models/presets/ViT-B-32.json"} <= names
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "megaclip = megaclip.commands:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]


@pytest.mark.long
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    installed, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(command, check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import megaclip; print(megaclip.__file__)"]
    found = subprocess.run(where, cwd=work, env=environment, check=True, capture_output=True, text=True).stdout
    assert Path(found.strip()).is_relative_to(installed)

    command = [sys.executable, "-m", "megaclip", "demo", "--steps", "6"]
    subprocess.run(command, cwd=work, env=environment, check=True)
    metrics = json.loads((work / "runs/demo/metrics.json").read_text())
    assert metrics["steps"] == 6 and metrics["export_max_abs_diff"] < 1e-5
    assert (work / "runs/demo/open_clip/open_clip_model.safetensors").is_file()
