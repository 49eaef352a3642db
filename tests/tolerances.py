"""The one table of tolerances: largest |got - expected| relative to the largest |expected|, with the reason for each.

Expected values are always float64, computed from the features as they were rounded to the dtype under test.
"""

import torch
from torch import Tensor

# Loss values and statistics. They are accumulated in float32 whatever the features' dtype, products included.
VALUE = {
    torch.float64: 1e-12,  # a few hundred float64 roundings
    torch.float32: 2e-5,  # float32 roundings of the similarities, magnified by the scale: 6e-8 * 100 and a few of them
    torch.bfloat16: 2e-5,  # products of bfloat16 are exact in float32, their sums are not
    torch.float16: 2e-5,
}

# Gradients are computed as the values are, but handed out in the features' dtype.
GRADIENT = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,  # exp(scale*s - shift) magnifies the roundings of scale*s
    torch.bfloat16: 4e-3,  # half a unit in the last of 8 bits, 2e-3, twice for sums of rounded values
    torch.float16: 1e-3,  # half a unit in the last of 11 bits, 5e-4
}

# Tile gradients, as the norm of the difference relative to the norm of the expected gradient.
TILE_GRADIENT = {
    "bf16": 3e-3,  # P is rounded to 8 bits, about 1.5e-3
    "bf16 truncated": 4.5e-3,  # Triton's interpreter truncates instead, about 3e-3
    "tf32": 5e-3,  # 11 bits of the features, magnified by the scale, here up to 20
    "float32": 1e-5,  # for scales up to 20; the roundings of scale*s grow with the scale
}


def norm_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of the expected tensor."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value (absolute where all expected values are tiny)."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    if torch.isnan(got).any():
        return float("nan")
    same = got == expected  # infinities of one sign
    difference = (got - expected).abs().masked_fill(same, 0).max().item()
    finite = expected[expected.isfinite()].abs()
    return difference / max(finite.max().item() if len(finite.flatten()) else 0.0, 1e-3)
