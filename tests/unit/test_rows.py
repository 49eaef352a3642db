"""The per-row operations against their definitions in float64; the kernels' own test is in test_tiles_triton.py."""

import pytest
import torch

from megaclip.ops import rows
from tests.tile_cases import check_row_operations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_operations(dtype: torch.dtype) -> None:
    check_row_operations(rows, dtype, "cpu")
