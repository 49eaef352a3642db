"""Arguments and options that the tile operations and both of their implementations share."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Scalars = float | Tensor
"""A number, a tensor with one element, or a vector with one value per row or per column."""
Accumulators = tuple[Tensor | None, Tensor | None]
"""Tensors to which dx and dy are added."""
Ids = tuple[Tensor, Tensor]
"""int64 ids of the rows (m,) and of the columns (n,) of a tile, those of the columns in ascending order. Entries whose
row and column have equal ids are left out. The kernels are fast if the ids of the rows ascend too."""
Limits = tuple[Tensor, Tensor]
"""Largest similarity of each row (m,) and column (n,), in the dtype of sums. Larger ones are left out of the sums of
that row or column."""
NO_NEGATIVE = torch.iinfo(torch.int64).min
"""Id of a column that every row leaves out, such as padding. It is the smallest."""
Implementation = Literal["auto", "torch", "triton"]
Precision = Literal["auto", "float32", "tf32", "bf16"]

FEATURE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Terms(NamedTuple):
    """One direction of the gradient tile, `weight * exp(scale*s - shift)`. Vectors have one value per row or column."""

    scale: Scalars
    shift: Scalars
    weight: Scalars


class TermVectors(NamedTuple):
    """`Terms` expanded to vectors in the dtype of sums: (m,) for the rows, (n,) for the columns."""

    scale: Tensor
    shift: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class TileOptions:
    """Options of the computation of tiles. Raises ValueError for a value that is not accepted."""

    precision: Precision = "auto"
    """Precision of the products of features. "auto": their own dtype, float32 without TF32. "float32", "tf32", "bf16":
    that format, to which they are rounded first. Sums are float32. float64 features require "auto" and have float64
    sums."""

    implementation: Implementation = "auto"
    """"auto": Triton for CUDA tensors if it can be imported, else PyTorch. "triton" refuses other tensors, and float64
    features."""

    tile_budget_mib: float = 128
    """Upper limit, in MiB, of the memory for the buffers of one tile of logits."""

    def __post_init__(self) -> None:
        for name, accepted in (("precision", Precision), ("implementation", Implementation)):
            if getattr(self, name) not in get_args(accepted):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(get_args(accepted))}")
        if not self.tile_budget_mib > 0:
            raise ValueError(f"tile_budget_mib is {self.tile_budget_mib}; expected a number of MiB above 0")


DEFAULT_OPTIONS = TileOptions()


def accumulation_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype of sums over these features: float64 for float64 features, float32 for all others."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32
