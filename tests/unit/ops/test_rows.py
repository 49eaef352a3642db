"""Compare the per-row operations with float64 on the CPU; test_tiles_triton.py runs their kernels."""

import pytest
import torch

from megaclip.ops import rows
from tests.tile_cases import check_row_operations, check_softmax_pairs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_operations(dtype: torch.dtype) -> None:
    check_row_operations(rows, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softmax_pairs(dtype: torch.dtype) -> None:
    check_softmax_pairs(rows, dtype, "cpu")
