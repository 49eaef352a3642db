"""The memory that holds a step's images, and the free memory that is measured for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaclip.engine import preflight
from megaclip.errors import ConfigError
from megaclip.step.image_slots import ImageSlots

CPU = torch.device("cpu")


def test_the_limit_of_a_control_group_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=20000))
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("6000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 2500\n")
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    assert preflight.free_host_memory() == 10000 - 6000 + 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.free_host_memory() == 20000


@pytest.mark.parametrize("on_disk", [False, True])
def test_slots_return_what_is_written_and_leave_no_file(on_disk, tmp_path):
    slots = ImageSlots((3, 2, 3, 5, 5), CPU, tmp_path if on_disk else None)
    pixels = torch.randint(256, (3, 2, 3, 5, 5), dtype=torch.uint8)
    slots.tensor.copy_(pixels)
    assert torch.equal(slots.tensor, pixels) and list(tmp_path.iterdir()) == []
    slots.close()


def test_slots_that_cannot_be_reserved_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot reserve 0\.0 MiB in .*gone.*--data-offload-dir"):
        ImageSlots((1, 1, 3, 5, 5), CPU, Path(tmp_path / "gone"))
