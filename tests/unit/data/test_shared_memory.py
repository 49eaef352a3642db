"""Pages of shared memory are freed before their tensor is deleted."""

import os
import re
import sys

import pytest
import torch

from megaclip.data.shared_memory import free_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can free the pages of a mapping")
PAGES = 64


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """Return the resident bytes of a tensor's mapping. Sums over the process would include libraries."""
    address, inside = tensor.data_ptr(), False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


def test_the_pages_of_a_shared_tensor_are_free_before_it_is_deleted():
    size = PAGES * os.sysconf("SC_PAGESIZE")
    tensor = torch.ones(size, dtype=torch.uint8).share_memory_()
    before = bytes_in_memory(tensor)
    free_pages(tensor)
    assert before - bytes_in_memory(tensor) >= size - os.sysconf("SC_PAGESIZE")
    assert not tensor.any()


@pytest.mark.parametrize("size", [10, 100_000])
def test_memory_of_one_process_and_neighbours_keep_their_values(size):
    private = torch.ones(size, dtype=torch.uint8)
    free_pages(private)
    assert private.all()
    tensors = [torch.ones(size, dtype=torch.uint8).share_memory_() for _ in range(3)]
    free_pages(tensors[1])
    assert tensors[0].all() and tensors[2].all()
