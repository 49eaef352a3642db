"""The tile operations as `torch.ops.megaclip.*`, so that `torch.compile` keeps them in its graph.

Each is the function of the same name in `megaclip.ops.tiles` behind a schema that a graph can hold: numbers are
tensors of one element, and every result is always computed. The fake implementations give shapes and dtypes without
computing. None has a gradient formula: `tile_grads` is the gradient of `tile_stats`, and `tile_sigmoid` brings its own,
so a loss multiplies them in (as `megaclip.losses` does); backward through the operation itself is an error.
"""

import torch
from torch import Tensor

from megaclip.ops import tiles


@torch.library.custom_op("megaclip::tile_stats", mutates_args=())
def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    diagonal: int | None = None,
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor]:
    """row_lse (m,), col_lse (n,); see `megaclip.ops.tiles.tile_stats`."""
    return tiles.tile_stats(
        x,
        y,
        row_scale,
        col_scale,
        diagonal=diagonal,
        precision=precision,
        implementation=implementation,
        tile_budget_mib=tile_budget_mib,
    )


@tile_stats.register_fake
def _(x, y, row_scale, col_scale, diagonal=None, precision="auto", implementation="auto", tile_budget_mib=128):
    return _row_values(x), _row_values(y)


@torch.library.custom_op("megaclip::tile_grads", mutates_args=())
def tile_grads(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    row_shift: Tensor,
    row_weight: Tensor,
    col_scale: Tensor,
    col_shift: Tensor,
    col_weight: Tensor,
    diagonal: int | None = None,
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (m, D), dy (n, D), row_dot (m,), col_dot (n,); see `megaclip.ops.tiles.tile_grads`."""
    dx, dy, row_dot, col_dot = tiles.tile_grads(
        x,
        y,
        row_scale,
        row_shift,
        row_weight,
        col_scale,
        col_shift,
        col_weight,
        diagonal=diagonal,
        precision=precision,
        implementation=implementation,
        tile_budget_mib=tile_budget_mib,
    )
    assert dx is not None and dy is not None, "both sides were asked for"
    return dx, dy, row_dot, col_dot


@tile_grads.register_fake
def _(
    x,
    y,
    row_scale,
    row_shift,
    row_weight,
    col_scale,
    col_shift,
    col_weight,
    diagonal=None,
    precision="auto",
    implementation="auto",
    tile_budget_mib=128,
):
    return _feature_values(x), _feature_values(y), _row_values(x), _row_values(y)


@torch.library.custom_op("megaclip::tile_sigmoid", mutates_args=())
def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    diagonal: int | None = None,
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """row_loss (m,), dx (m, D), dy (n, D), row_dot (m,), row_sum (m,); see `megaclip.ops.tiles.tile_sigmoid`."""
    row_loss, dx, dy, row_dot, row_sum = tiles.tile_sigmoid(
        x,
        y,
        scale,
        bias,
        diagonal=diagonal,
        precision=precision,
        implementation=implementation,
        tile_budget_mib=tile_budget_mib,
    )
    assert dx is not None and dy is not None, "both sides were asked for"
    # The three are rows of one buffer, and results of an operation must not share memory.
    return row_loss.clone(), dx, dy, row_dot.clone(), row_sum.clone()


@tile_sigmoid.register_fake
def _(x, y, scale, bias, diagonal=None, precision="auto", implementation="auto", tile_budget_mib=128):
    return _row_values(x), _feature_values(x), _feature_values(y), _row_values(x), _row_values(x)


def _row_values(features: Tensor) -> Tensor:
    return features.new_empty((features.shape[0],), dtype=tiles.accumulation_dtype(features))


def _feature_values(features: Tensor) -> Tensor:
    return features.new_empty(features.shape, dtype=tiles.accumulation_dtype(features))
