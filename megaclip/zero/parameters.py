"""Attributes that ZeRO-3 adds to the parameters it has partitioned."""

from typing import Any

import torch


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned the parameter."""
    return hasattr(parameter, "ds_id")


def gathered_shape(parameter: Any) -> torch.Size:
    """Return the shape of the gathered parameter; a partitioned one has shape (0,) between its uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
