"""The tile operations as an op of DeepSpeed: found by name, probed, listed in its op report.

DeepSpeed discovers its own builders in its own folders and has no entry point for others, so importing this module
(`megaclip.ops.registration` does, after deepspeed) writes the builder into the running process: as an attribute of
`deepspeed.ops.op_builder`, in the accelerator's look-up, in `ALL_OPS`. What that gives: `get_accelerator()
.create_op_builder("ContrastiveTilesBuilder").load()`, the compatibility probe and `op_report()` treat it as DeepSpeed's
own. What it does not: a process that never imports megaclip, DeepSpeed's `ds_report` command among them, does not know
it (`tools/ds_report.py` does). Nothing is compiled ahead: Triton compiles the kernels at first use.
"""

from types import ModuleType

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder

from megaclip.ops import tiles

# Below this the kernels' bfloat16 products have no hardware.
_LOWEST_CAPABILITY = (8, 0)


class ContrastiveTilesBuilder(OpBuilder):
    """Builder of `megaclip.ops.tiles`. It has no sources: `load` returns the Python module."""

    NAME = "contrastive_tiles"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return "megaclip.ops.tiles"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the Triton kernels run on this machine's accelerator; where not, the PyTorch tiles do."""
        reason = _why_no_kernels()
        if reason and verbose:
            self.warning(f"{self.NAME}: {reason}; the tiles run in PyTorch instead")
        return not reason

    def load(self, verbose: bool = False) -> ModuleType:
        """The module with `tile_stats`, `tile_grads` and `tile_sigmoid`, which pick kernels or PyTorch per call."""
        return tiles


def _why_no_kernels() -> str:
    """What keeps the Triton kernels from running here; empty when nothing does."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda" or not accelerator.is_available():
        return f"the Triton kernels need a CUDA device, and DeepSpeed's accelerator here is {accelerator.device_name()}"
    capability = accelerator.torch().cuda.get_device_capability()
    if capability < _LOWEST_CAPABILITY:
        return f"the Triton kernels need compute capability 8.0, and this device has {'.'.join(map(str, capability))}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return ""


def _register(builder: type[OpBuilder]) -> None:
    name = builder.__name__
    accelerator = get_accelerator()
    if hasattr(accelerator, "_lazy_init_class_dict"):
        accelerator._lazy_init_class_dict()
        accelerator.class_dict[name] = builder
    else:  # the CPU's is a chain of ifs
        look_up = accelerator.get_op_builder
        accelerator.get_op_builder = lambda class_name: builder if class_name == name else look_up(class_name)
    setattr(op_builder, name, builder)
    ALL_OPS[ContrastiveTilesBuilder.NAME] = builder()
    vars(deepspeed.ops).pop("__compatible_ops__", None)  # probed again at next access, with this op


_register(ContrastiveTilesBuilder)
