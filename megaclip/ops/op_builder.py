"""The tile operations as a DeepSpeed op, which is found by name, probed and listed in the op report.

`megaclip.losses` imports this module, and the import registers the builder in the running process. Then
`get_accelerator().create_op_builder("ContrastiveTilesBuilder").load()`, the compatibility probe and `op_report()`
handle it like DeepSpeed's own ops. A process that does not import the losses, such as DeepSpeed's `ds_report`, does not
know the op. `megaclip report` lists it. Triton compiles the kernels at first use.
"""

from types import ModuleType

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import OpBuilder

from megaclip.ops import tiles
from megaclip.zero.op_builds import register_builder


class ContrastiveTilesBuilder(OpBuilder):
    """Builder of `megaclip.ops.tiles`. It has no sources to compile; `load` returns the Python module."""

    NAME = "contrastive_tiles"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return "megaclip.ops.tiles"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the Triton kernels run on this machine's accelerator. Otherwise the PyTorch tiles run."""
        reason = _reason_without_kernels()
        if reason and verbose:
            self.warning(f"{self.NAME}: {reason}; the tiles run in PyTorch instead")
        return not reason

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the module with the tile operations, which select the kernels or PyTorch per call."""
        return tiles


def _reason_without_kernels() -> str:
    """Return why the Triton kernels cannot run on this machine, or an empty string if they can."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda" or not accelerator.is_available():
        return f"the Triton kernels require a CUDA device, and DeepSpeed's accelerator is {accelerator.device_name()}"
    return tiles.reason_without_kernels(torch.device(accelerator.current_device_name()))


register_builder(ContrastiveTilesBuilder)
