"""Pages of shared memory that are given back before their tensor is deleted."""

import os
import sys

import pytest
import torch

from megaclip.data.shared_memory import free_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can free the pages of a mapping")
PAGES = 64


def shared_bytes() -> int:
    """Return the bytes of shared memory that this process has in use."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[2]) * os.sysconf("SC_PAGESIZE")


def test_the_pages_of_a_shared_tensor_are_free_before_it_is_deleted():
    size = PAGES * os.sysconf("SC_PAGESIZE")
    tensor = torch.ones(size, dtype=torch.uint8).share_memory_()
    before = shared_bytes()
    free_pages(tensor)
    assert before - shared_bytes() >= size - os.sysconf("SC_PAGESIZE")
    assert not tensor.any()


@pytest.mark.parametrize("size", [10, 100_000])
def test_memory_of_one_process_and_neighbours_keep_their_values(size):
    private = torch.ones(size, dtype=torch.uint8)
    free_pages(private)
    assert private.all()
    tensors = [torch.ones(size, dtype=torch.uint8).share_memory_() for _ in range(3)]
    free_pages(tensors[1])
    assert tensors[0].all() and tensors[2].all()
