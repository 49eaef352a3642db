"""Register the tile operations as a DeepSpeed op that is found by name, probed and listed in the op report.

DeepSpeed searches for builders in its own folders only and has no entry point for other packages.
`megaclip.ops.registration` imports this module after deepspeed. The import adds the builder to the running process: as
an attribute of `deepspeed.ops.op_builder`, in the accelerator's look-up, and in `ALL_OPS`.

Then `get_accelerator().create_op_builder("ContrastiveTilesBuilder").load()`, the compatibility probe and `op_report()`
handle it like DeepSpeed's own ops. A process that does not import megaclip, such as DeepSpeed's `ds_report`, does not
know the op. `megaclip report` lists it. Triton compiles the kernels at first use.
"""

from types import ModuleType

import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder

from megaclip.ops import tiles


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


def _register(builder: type[OpBuilder]) -> None:
    name = builder.__name__
    accelerator = get_accelerator()
    if hasattr(accelerator, "_lazy_init_class_dict"):
        accelerator._lazy_init_class_dict()
        accelerator.class_dict[name] = builder
    else:  # the CPU accelerator has no table of builders
        look_up = accelerator.get_op_builder
        accelerator.get_op_builder = lambda class_name: builder if class_name == name else look_up(class_name)
    setattr(op_builder, name, builder)
    ALL_OPS[ContrastiveTilesBuilder.NAME] = builder()
    vars(deepspeed.ops).pop("__compatible_ops__", None)  # so that the next access probes again, with this op


_register(ContrastiveTilesBuilder)
