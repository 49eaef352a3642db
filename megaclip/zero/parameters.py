"""Attributes that ZeRO-3 adds to the parameters it has partitioned."""

from typing import Any

import torch
from deepspeed.runtime.zero.utils import is_zero_param


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned the parameter."""
    return bool(is_zero_param(parameter))


def gathered_shape(parameter: Any) -> torch.Size:
    """Return the shape of the gathered parameter; a partitioned one has shape (0,) between its uses."""
    shape: torch.Size = parameter.ds_shape if is_partitioned(parameter) else parameter.shape
    return shape
