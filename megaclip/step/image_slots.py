"""Memory for the images of a step: page-locked host memory, or an unlinked temporary file."""

import mmap
import os
import tempfile
from pathlib import Path

import torch

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.errors import ConfigError, first_line
from megaclip.logging import format_bytes

WINDOW = 3
"""Number of slots if no images are kept: one is used, one is copied to the device, and one is filled."""


class ImageSlots:
    """S slots in memory or in a file until `close`: `tensor`, (S, ...) uint8. All ranks construct it together."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, folder: Path | None) -> None:
        """Reserve the slots. Raises ConfigError, on every rank, if any rank cannot reserve them.

        Args:
            shape: shape of `tensor`.
            device: the device that the tensor will be copied to.
            folder: the folder of the file. None: the slots are in memory, page-locked if the device is a GPU.
        """
        self._is_pinned = False
        with raise_on_all_ranks():
            try:
                self.tensor = self._in_memory(shape, device) if folder is None else self._in_file(shape, folder)
            except (OSError, RuntimeError) as problem:
                size, where = format_bytes(torch.Size(shape).numel()), folder or "page-locked memory"
                raise ConfigError(
                    f"data offload: cannot reserve {size} in {where}: {first_line(problem)}; free space there, specify "
                    "another folder with --data-offload-dir, or change megaclip.data_offload"
                ) from None

    def _in_file(self, shape: tuple[int, ...], folder: Path) -> torch.Tensor:
        size = torch.Size(shape).numel()
        with tempfile.TemporaryFile(dir=folder) as file:  # unlinked, so the system deletes it with the process
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not by a signal during a step
            return _tensor_in(mmap.mmap(file.fileno(), size)).view(shape)

    def _in_memory(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        pages = mmap.mmap(-1, torch.Size(shape).numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = _tensor_in(pages).view(shape)
        if device.type == "cuda":
            # Registered, not allocated as pinned: torch's allocator would round the size up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
            if code != 0:
                raise RuntimeError(f"CUDA error {code} while locking pages")
            self._is_pinned = True
        return tensor

    def close(self) -> None:
        """Free the memory or the file; the tensor must not be used afterwards."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor


def _tensor_in(pages: mmap.mmap) -> torch.Tensor:
    pages.madvise(mmap.MADV_DONTFORK)  # forked data workers do not use it
    return torch.frombuffer(pages, dtype=torch.uint8)
