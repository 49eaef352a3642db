"""Copy the content of checkpoint files to host memory, so that training can change the originals during the save.

torch has a class for this, `torch.distributed.checkpoint.staging.DefaultStager`. It is not used, because torch 2.8
lacks it and that of torch 2.11 fails at its second save. Its copies also do not keep `requires_grad`, so their files
would differ from those of a synchronous save.
"""

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_iter


class HostCopies:
    """Host memory for the copies of one save.

    The next save reuses the memory if its tensors have the same sizes, because filling new memory takes several times
    as long."""

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []
        self._used = 0
        """Number of `_buffers` that the current save uses."""

    def reuse(self) -> None:
        """Start the copies of another save. The copies of the previous save must no longer be in use."""
        self._used = 0

    def copy(self, content: Any) -> Any:
        """Return a copy of nested dictionaries, lists and tuples. Its tensors are on the CPU.

        Tensors that share memory still do so in the copy: `torch.save` writes the same bytes, if the originals are on
        the CPU too. Raises RuntimeError if there is not enough memory.
        """
        memo: dict[int, Any] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for value in tree_iter(content):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = self._on_host(value, storages)
        return copy.deepcopy(content, memo)

    def _on_host(self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return a copy of one tensor. storages: copies of storages, by the address of the original."""
        original = tensor.untyped_storage()
        if original._cdata not in storages:
            storages[original._cdata] = self._filled(original)
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(storages[original._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        copied.__dict__.update(copy.deepcopy(tensor.__dict__))  # torch.save writes them: DeepSpeed's ds_id at ZeRO-3
        return copied.requires_grad_(tensor.requires_grad)

    def _filled(self, original: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._used == len(self._buffers):
            self._buffers.append(torch.UntypedStorage(original.nbytes()))
        elif self._buffers[self._used].nbytes() != original.nbytes():
            self._buffers[self._used] = torch.UntypedStorage(original.nbytes())
        buffer = self._buffers[self._used]
        self._used += 1
        buffer.copy_(original, non_blocking=False)
        return buffer
