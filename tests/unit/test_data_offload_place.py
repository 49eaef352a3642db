"""Place of a step's images (host memory, disk or read again): the choice by free memory, and the memory itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaclip.engine import data_offload
from megaclip.engine.data_offload import Place, Slots, choose_place, embeddings_on_cpu, free_memory
from megaclip.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch, tmp_path):
    """Return a function that sets the free memory and disk and returns the choice for a batch of 800 bytes."""

    def choose(wanted: str, *, memory: int, disk: int, passes: int = 2) -> Place:
        monkeypatch.setattr(data_offload, "free_memory", lambda: memory)
        monkeypatch.setattr(data_offload, "_free_disk", lambda folder: disk)
        return choose_place(wanted, 800, tmp_path, passes=passes)

    return choose


@pytest.mark.parametrize(
    ("wanted", "memory", "disk", "passes", "name", "keeps"),
    [
        ("auto", 1001, 0, 2, "cpu", True),
        ("auto", 999, 1001, 2, "disk", True),
        ("auto", 0, 0, 1, "reread", False),
        ("cpu", 1001, 0, 1, "cpu", True),
        ("disk", 5000, 1001, 2, "disk", True),
        ("reread", 0, 0, 2, "reread", False),
    ],
)
def test_the_choice_follows_free_memory_and_disk(free, wanted, memory, disk, passes, name, keeps):
    assert free(wanted, memory=memory, disk=disk, passes=passes) == Place(name, keeps)


def test_images_that_fit_nowhere_are_an_error(free):
    with pytest.raises(ConfigError, match=r'data_offload "cpu": .* set "disk" or "reread"'):
        free("cpu", memory=999, disk=5000)
    with pytest.raises(ConfigError, match=r'data_offload "disk": .* a larger disk, set "reread"'):
        free("disk", memory=5000, disk=999)
    with pytest.raises(ConfigError, match="fit nowhere"):
        free("auto", memory=999, disk=999)


def test_ranks_of_one_host_share_its_memory_and_the_smallest_host_decides(free, monkeypatch):
    def second_rank_here_and_one_elsewhere(own):
        return [own, own, own._replace(name="elsewhere", free_memory=9999, free_disk=9999)]

    monkeypatch.setattr(data_offload, "gather_objects", second_rank_here_and_one_elsewhere)
    assert free("auto", memory=2002, disk=0).name == "cpu"
    assert free("auto", memory=1998, disk=2001).name == "disk"
    with pytest.raises(ConfigError, match="fit nowhere"):
        free("auto", memory=1998, disk=1999)
    monkeypatch.setattr(
        data_offload, "gather_objects", lambda own: [own, own._replace(name="elsewhere", free_memory=999)]
    )
    assert free("auto", memory=5000, disk=5000).name == "disk"


def test_free_memory_respects_the_limit_of_a_control_group(monkeypatch, tmp_path):
    monkeypatch.setattr(data_offload.psutil, "virtual_memory", lambda: SimpleNamespace(available=20000))
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("6000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 2500\n")
    monkeypatch.setattr(data_offload, "_CGROUP", tmp_path)
    assert free_memory() == 10000 - 6000 + 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 20000


@pytest.mark.parametrize("name", ["cpu", "disk"])
def test_slots_keep_their_contents_and_leave_no_file(name, tmp_path):
    slots = Slots(Place(name, keeps=True), (3, 2, 3, 5, 5), tmp_path, CPU)
    pixels = torch.randint(256, (3, 2, 3, 5, 5), dtype=torch.uint8)
    slots.tensor.copy_(pixels)
    assert torch.equal(slots.tensor, pixels) and list(tmp_path.iterdir()) == []
    slots.close()


def test_slots_that_cannot_be_reserved_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot reserve 0\.0 MiB in .*gone.*--data-offload-dir"):
        Slots(Place("disk", keeps=True), (1, 1, 3, 5, 5), Path(tmp_path / "gone"), CPU)


def test_embeddings_are_kept_on_the_cpu_above_a_share_of_device_memory(monkeypatch):
    accelerator = data_offload.get_accelerator()
    monkeypatch.setattr(accelerator, "total_memory", lambda *_: 10 * 4 * 64 * 2 * 2 - 1)
    cuda = torch.device("cuda", 0)
    assert embeddings_on_cpu("auto", (64, 2), torch.bfloat16, cuda)
    assert not embeddings_on_cpu("auto", (63, 2), torch.bfloat16, cuda)
    assert not embeddings_on_cpu(False, (64, 2), torch.bfloat16, cuda)
    assert embeddings_on_cpu(True, (1, 1), torch.float32, CPU) and not embeddings_on_cpu(
        "auto", (64, 2), torch.bfloat16, CPU
    )
