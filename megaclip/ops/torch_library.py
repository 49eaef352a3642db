"""The tile operations as `torch.ops.megaclip.*`, so that `torch.compile` keeps them in its graph.

Each operation calls the function of that name in `megaclip.ops.tiles` or `megaclip.ops.rows`. Its schema fits a graph:
numbers are tensors with one element, and every result is computed. The fake implementations return shapes and dtypes
without computing.

Vectors may be parts of one buffer, so they are copied: results of an operation must not share memory, and compiled code
assumes that each result is aligned to 16 bytes.

No operation has a gradient formula, and backward through one is an error. `tile_grads` is the gradient of `tile_stats`,
and `tile_sigmoid` returns its own gradients. A loss multiplies them by its upstream gradient, as `megaclip.losses`
does.
"""

import torch
from torch import Tensor

from megaclip.ops import rows, tiles
from megaclip.ops.types import DEFAULT_OPTIONS, Terms, TileOptions, accumulation_dtype


@torch.library.custom_op("megaclip::tile_stats", mutates_args=())
def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    diagonal: int | None = None,
    precision: str = DEFAULT_OPTIONS.precision,
    implementation: str = DEFAULT_OPTIONS.implementation,
    tile_budget_mib: float = DEFAULT_OPTIONS.tile_budget_mib,
) -> tuple[Tensor, Tensor]:
    """Return row_lse (m,) and col_lse (n,); see `megaclip.ops.tiles.tile_stats`."""
    options = _options(precision, implementation, tile_budget_mib)
    row_lse, col_lse = tiles.tile_stats(x, y, row_scale, col_scale, diagonal=diagonal, options=options)
    return row_lse.clone(), col_lse.clone()


@tile_stats.register_fake
def _(x, y, row_scale, col_scale, *diagonal_and_options, **others):
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
    precision: str = DEFAULT_OPTIONS.precision,
    implementation: str = DEFAULT_OPTIONS.implementation,
    tile_budget_mib: float = DEFAULT_OPTIONS.tile_budget_mib,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx (m, D), dy (n, D), row_dot (m,) and col_dot (n,); see `megaclip.ops.tiles.tile_grads`."""
    row, col = Terms(row_scale, row_shift, row_weight), Terms(col_scale, col_shift, col_weight)
    options = _options(precision, implementation, tile_budget_mib)
    dx, dy, row_dot, col_dot = tiles.tile_grads(x, y, row, col, diagonal=diagonal, options=options)
    assert dx is not None and dy is not None, "both sides are computed by default"
    assert row_dot is not None and col_dot is not None, "dots are computed by default"
    return dx, dy, row_dot.clone(), col_dot.clone()


@tile_grads.register_fake
def _(x, y, *terms_diagonal_and_options, **others):
    return _feature_values(x), _feature_values(y), _row_values(x), _row_values(y)


@torch.library.custom_op("megaclip::tile_sigmoid", mutates_args=())
def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    diagonal: int | None = None,
    precision: str = DEFAULT_OPTIONS.precision,
    implementation: str = DEFAULT_OPTIONS.implementation,
    tile_budget_mib: float = DEFAULT_OPTIONS.tile_budget_mib,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return row_loss (m,), dx (m, D), dy (n, D), row_dot (m,), row_sum (m,); see `megaclip.ops.tiles.tile_sigmoid`."""
    options = _options(precision, implementation, tile_budget_mib)
    row_loss, dx, dy, row_dot, row_sum = tiles.tile_sigmoid(x, y, scale, bias, diagonal=diagonal, options=options)
    assert dx is not None and dy is not None, "both sides are computed by default"
    return row_loss.clone(), dx, dy, row_dot.clone(), row_sum.clone()


@tile_sigmoid.register_fake
def _(x, y, *scalars_diagonal_and_options, **others):
    return _row_values(x), _feature_values(x), _feature_values(y), _row_values(x), _row_values(x)


finish_gradients = torch.library.custom_op("megaclip::finish_gradients", rows.finish_gradients, mutates_args=())


@finish_gradients.register_fake
def _(total_x, total_y, x, y, *pull_and_factors):
    return *(torch.empty_like(features, memory_format=torch.contiguous_format) for features in (x, y)), _row_values(x)


def _options(precision: str, implementation: str, tile_budget_mib: float) -> TileOptions:
    """Return the options of an operation. Its schema has plain strings, which `TileOptions` checks."""
    return TileOptions(precision, implementation, tile_budget_mib)  # type: ignore[arg-type]


def _row_values(features: Tensor) -> Tensor:
    return features.new_empty((features.shape[0],), dtype=accumulation_dtype(features))


def _feature_values(features: Tensor) -> Tensor:
    return features.new_empty(features.shape, dtype=accumulation_dtype(features))
