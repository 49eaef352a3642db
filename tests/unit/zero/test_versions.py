"""Another version of DeepSpeed than the declared ones is refused in one line before its internals are imported."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megaclip.errors import VersionError
from megaclip.zero import versions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["0.18.9", "0.19.7", "0.20.0", "0.20.0rc1", "1.0.0"])
def test_other_versions_are_refused_with_the_command_that_installs_a_supported_one(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(VersionError, match=rf"^DeepSpeed {version} is not supported: .*pip install 'deepspeed>=0.19.8"):
        versions.require_deepspeed()


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc123", "0.19.10"])
def test_supported_versions_are_accepted(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    versions.require_deepspeed()


def test_pyproject_the_page_of_versions_and_the_check_declare_the_same():
    declared = (ROOT / "pyproject.toml").read_text()
    assert f'"deepspeed>={versions.OLDEST},<{versions.BELOW}"' in declared
    rows = re.findall(r"^\| ([\w-]+) \| `(.*?)` ", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert len(rows) == 13 and rows[0] == ("Python", ">=3.10") and 'requires-python = ">=3.10"' in declared
    assert [row for row in rows[1:] if not re.search(rf'"{row[0]}(\[\w+\])?{re.escape(row[1])}', declared)] == []


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes find a DeepSpeed 0.18.9, whose modules fail if they are imported."""
    (tmp_path / "deepspeed-0.18.9.dist-info").mkdir()
    (tmp_path / "deepspeed-0.18.9.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.18.9\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}", prepend=os.pathsep)


@pytest.mark.parametrize(
    "command",
    [["-m", "megaclip", "train", "--help"], ["launch/train.py", "--local_rank=0"], ["-m", "megaclip", "plan"]],
)
def test_commands_print_one_line_and_end_with_the_exit_code_of_refused_settings(environment, command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (78, "")
    assert re.fullmatch(r"error: DeepSpeed 0\.18\.9 is not supported: [^\n]*\n", done.stderr)


def test_packages_raise_the_same_line_as_an_import_error(environment):
    modules = ["losses", "models", "config.training", "zero.build", "step.gradient_cache", "checkpoint.store"]
    code = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"megaclip.{name}")
    except ImportError as error:
        print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == len(modules), done.stderr
    assert all(line.startswith("VersionError DeepSpeed 0.18.9 is not supported: ") for line in lines)
