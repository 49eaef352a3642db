"""Files of weights that other programs have written give the same tensors, or an error that says what they are."""

import argparse
import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from megaclip.checkpoint.weight_files import read_tensors
from megaclip.errors import CheckpointError


class Tower(nn.Module):
    """Names and dtypes as in CLIP: nested modules, a scalar, a buffer and a tied part of a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        self.proj = nn.Parameter(torch.arange(24.0).reshape(4, 6)[:, ::2])
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.small = nn.Parameter(torch.randn(5).half())
        self.register_buffer("input_resolution", torch.tensor(32))
        self.register_buffer("attn_mask", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.visual(x) @ self.proj * self.logit_scale + self.small.float().sum()


@pytest.fixture(scope="module")
def model() -> Tower:
    torch.manual_seed(0)
    return Tower().eval()


@pytest.fixture(scope="module")
def expected(model: Tower) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


Save = Callable[[Tower, dict[str, torch.Tensor], Path], None]


def saved(change: Callable[[dict[str, torch.Tensor]], object]) -> Save:
    return lambda model, tensors, path: torch.save(change(tensors), path)


def renamed(change: Callable[[str], str], **more: torch.Tensor) -> Save:
    return saved(lambda tensors: {change(name): value for name, value in tensors.items()} | more)


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 0 * value for name, value in tensors.items()}


NAMESPACE = {"args": argparse.Namespace(lr=1.0), "best": np.float64(0.5), "path": Path("x")}
READ: dict[str, Save] = {
    "torch.jit.trace": lambda model, _, path: torch.jit.trace(model, torch.zeros(2, 3)).save(str(path)),
    "torch.jit.script": lambda model, _, path: torch.jit.script(model).save(str(path)),
    "old format of torch.save": lambda _, tensors, path: torch.save(
        tensors, path, _use_new_zipfile_serialization=False
    ),
    "safetensors named .pt": lambda _, tensors, path: save_file(
        {name: value.contiguous() for name, value in tensors.items()}, path
    ),
    "model": saved(lambda tensors: {"model": tensors, "epoch": 3}),
    "module of DeepSpeed": saved(lambda tensors: {"module": tensors, "ds_version": "0.19", "optimizer": None}),
    "state_dict_ema": saved(lambda tensors: {"state_dict": zeros(tensors), "state_dict_ema": tensors}),
    "beside a tensor": saved(lambda tensors: {"state_dict": tensors, "best": torch.ones(())}),
    "an average without names": saved(lambda tensors: {"model": tensors, "model_ema": {"decay": 0.9, "shadow": [1]}}),
    "two dictionaries": saved(lambda tensors: {"state_dict": {"model": tensors}}),
    "settings of the program": saved(lambda tensors: {"state_dict": tensors, **NAMESPACE}),
    "clip.": renamed("clip.{}".format),
    "Lightning and DDP": renamed("model.module.{}".format),
    "beside a classifier": renamed("net.clip.{}".format, **{"head.weight": torch.ones(2)}),
    "FSDP": renamed(lambda name: "_fsdp_wrapped_module." + name.replace("visual.", "visual._fsdp_wrapped_module.")),
    "torch.compile of a part": renamed(lambda name: name.replace("visual.", "visual._orig_mod.")),
}


@pytest.mark.parametrize("program", READ)
def test_the_files_of_other_programs_give_the_same_tensors(model, expected, tmp_path, program):
    READ[program](model, expected, path := tmp_path / "weights.pt")
    found = read_tensors(path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


def test_one_tower_keeps_its_names_without_the_prefix_of_a_wrapper(expected, tmp_path):
    tower = {name: value for name, value in expected.items() if name.startswith("visual.")}
    torch.save({f"module.model.{name}": value for name, value in tower.items()}, tmp_path / "tower.pt")
    assert read_tensors(tmp_path / "tower.pt").keys() == tower.keys()


def archive(suffix: str) -> bytes:
    buffer = io.BytesIO()
    if suffix == "tar":
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("weights.bin"))
    else:
        with zipfile.ZipFile(buffer, "w") as opened:
            opened.writestr("weights.npy", b"x")
    return buffer.getvalue()


def pickled(content: object) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


ONE = {"logit_scale": torch.ones(())}
REFUSED = {
    "empty": (b"", "is empty"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
    "page": (b"\n\n<!DOCTYPE html><html><title>Sign in</title></html>", "is a web page"),
    "index": (b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "is a JSON text"),
    "gzip": (gzip.compress(b"x" * 100), "unpack it"),
    "tar": (archive("tar"), "unpack it"),
    "zip": (archive("zip"), r"unpack it, and .* \(it has weights.npy\)"),
    "cut torch": (pickled(ONE)[:-30], "is incomplete or damaged"),
    "cut safetensors": (save(ONE)[:-1], "is incomplete or damaged"),
    "noise": (bytes(range(1, 200)), "is no file of torch.save or safetensors"),
    "optimizer": (pickled({"optimizer_state_dict": {"a": 1}, "ds_config": {}}), "it has optimizer_state_dict, ds_con"),
    "student and teacher": (
        pickled({"student.logit_scale": torch.ones(()), "teacher.logit_scale": torch.ones(())}),
        "holds several models, student., teacher.",
    ),
    "cut header": (save(ONE)[:4], "is incomplete or damaged"),
    "list": (pickled([1, 2]), "does not hold a dictionary"),
    "number": (pickled({**ONE, "visual.proj": 3.0}), "'visual.proj' is a float, expected a floating-point tensor"),
    "integers": (pickled({**ONE, "visual.proj": torch.ones(2, dtype=torch.int64)}), "is a torch.strided tensor of "),
    "8 bits": (pickled({**ONE, "visual.proj": torch.ones(2).to(torch.float8_e5m2)}), "torch.float8_e5m2 on cpu, expec"),
    "sparse": (pickled({**ONE, "visual.proj": torch.eye(3).to_sparse()}), "is a torch.sparse_coo tensor of "),
    "foreign class": (pickled({"state_dict": ONE, "args": SimpleNamespace(lr=1)}), "it uses types.SimpleNamespace"),
    "torch named": (pickled(ONE), "is a file of torch.save; rename it"),
    "numbers as names": (pickled({"state_dict": {1: torch.ones(2)}}), "its keys are not names"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_read_is_named(tmp_path, kind):
    content, message = REFUSED[kind]
    (path := tmp_path / ("a.safetensors" if kind in ("torch named", "cut header") else "weights.bin")).write_bytes(
        content
    )
    with pytest.raises(CheckpointError, match=message) as error:
        read_tensors(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_folder_with_another_name_lists_the_names_that_are_read(tmp_path):
    (path := tmp_path / "model.fp16.safetensors").write_bytes(save(ONE))
    with pytest.raises(CheckpointError, match=r"one of .*, model\.safetensors, .*; give a file of another name by its"):
        read_tensors(tmp_path)
    assert read_tensors(path).keys() == ONE.keys()


def with_pickle(source: Path, target: Path, content: bytes) -> Path:
    """Write a TorchScript archive with another data.pkl."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.infolist():
            new.writestr(member, content if member.filename.endswith("/data.pkl") else old.read(member))
    return target


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_not_executed(model, tmp_path):
    READ["torch.jit.trace"](model, {}, source := tmp_path / "jit.pt")
    bad = Malicious(tmp_path / "evidence")
    with_pickle(source, tmp_path / "bad.pt", pickle.dumps(bad, 2))
    torch.save({"state_dict": {"visual.proj": bad}}, tmp_path / "torch.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"state_dict": {"visual.proj": bad}}, 2))
    for name in ("bad.pt", "torch.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "evidence").exists()


def test_damaged_torchscript_archives_are_errors_of_one_line(model, expected, tmp_path):
    """Whatever bytes of its pickle change, the result is a CheckpointError or tensors."""
    READ["torch.jit.trace"](model, {}, source := tmp_path / "jit.pt")
    with zipfile.ZipFile(source) as opened:
        content = opened.read(next(name for name in opened.namelist() if name.endswith("/data.pkl")))
    outcomes = set()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, len(content) - 1), st.integers(0, 255))
    def change(place: int, byte: int) -> None:
        bad = content[:place] + bytes([byte]) + content[place + 1 :]
        try:
            found = read_tensors(with_pickle(source, tmp_path / "bad.pt", bad))
            outcomes.add("read")
            assert all(isinstance(value, torch.Tensor) for value in found.values())
        except CheckpointError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")

    change()
    assert outcomes == {"read", "refused"}
