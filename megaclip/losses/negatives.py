"""Negatives that are no texts of pairs, such as hard negatives: further columns, which only the rows contrast with.

Those without `negative_rows` are columns for the rows of all ranks, and travel as the texts do. Ranks may have unequal
numbers of them. Each rank sends as many as the rank with the most (`Way.negatives`); the padding comes first and has
the id NO_NEGATIVE. Those with `negative_rows` belong to one row of this rank each: one product per negative, and no
exchange.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.losses.distributed_tiles import (
    BatchSigmoid,
    distributed_grads,
    distributed_sigmoid,
    distributed_stats,
)
from megaclip.losses.segments import segment_sums
from megaclip.losses.sums import LossInputs
from megaclip.losses.way import Way
from megaclip.ops.rows import paired_products
from megaclip.ops.types import NO_NEGATIVE, Ids, Limits, Terms, accumulation_dtype


def log_sum_exp(inputs: LossInputs, alpha: Tensor, way: Way, limits: Limits | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the negatives of each row (b,), and the shifts of `softmax_gradients`.

    limits: largest similarities of the rows, the first of the two.
    """
    x = inputs.x
    if not _count(inputs, way):
        return alpha.new_full((len(x),), -math.inf), alpha
    if inputs.negative_rows is None:
        columns, ids = _columns(inputs, way)
        options: dict[str, Any] = {"ids": ids, "limits": _without_columns(limits, columns), "positives": False}
        row_lse, col_lse = distributed_stats(x, columns, alpha, alpha, way=way, **options)
        return row_lse, col_lse.masked_fill(col_lse == -math.inf, 0.0)
    rows, similarities = inputs.negative_rows, _own_similarities(inputs, limits)
    logits = _left_out(alpha * similarities, inputs)
    top = alpha.new_full((len(x),), -math.inf).scatter_reduce(0, rows, logits, "amax")
    top = top.masked_fill(top == -math.inf, 0.0)
    return top + _per_row(torch.exp(logits - top[rows])[:, None], inputs)[:, 0].log(), alpha


def softmax_gradients(
    inputs: LossInputs,
    alpha: Tensor,
    row_shift: Tensor,
    row_weight: Tensor,
    shift: Tensor,
    way: Way,
    limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the negatives add to dx (b, D), and their gradients (e, D), without factor alpha.

    row_shift, row_weight: those of the rows, as in `distributed_grads`. shift: from `log_sum_exp`, limits: as there.
    """
    x, negatives = inputs.x, inputs.negatives
    assert negatives is not None
    if not _count(inputs, way):
        return alpha.new_zeros(x.shape), alpha.new_zeros(negatives.shape)
    if inputs.negative_rows is None:
        columns, ids = _columns(inputs, way)
        # The shift keeps the exponentials of the columns finite, although their weight is 0.
        row, col = Terms(alpha, row_shift, row_weight), Terms(alpha, shift, torch.zeros_like(alpha))
        options: dict[str, Any] = {"ids": ids, "limits": _without_columns(limits, columns), "positives": False}
        found = distributed_grads(x, columns, row, col, way=way, **options)
        return found.dx, found.dy[len(columns) - len(negatives) :]
    rows = inputs.negative_rows
    logits = _left_out(alpha * _own_similarities(inputs, limits), inputs)
    weights = row_weight.expand(len(x))[rows] * torch.exp(logits - row_shift[rows])
    return _products(inputs, weights)


def sigmoid_sums(inputs: LossInputs, alpha: Tensor, beta: Tensor, way: Way) -> BatchSigmoid:
    """Return what the negatives add to the sums of the sigmoid loss; `dy` is the gradient of the negatives (e, D)."""
    x, negatives = inputs.x, inputs.negatives
    assert negatives is not None
    if not _count(inputs, way):
        zeros = (alpha.new_zeros(len(x)) for _ in range(3))
        return BatchSigmoid(next(zeros), alpha.new_zeros(x.shape), alpha.new_zeros(negatives.shape), *zeros)
    if inputs.negative_rows is None:
        columns, ids = _columns(inputs, way)
        found = distributed_sigmoid(x, columns, alpha, beta, way=way, ids=ids, positives=False)
        return found._replace(dy=found.dy[len(columns) - len(negatives) :])
    similarities = _own_similarities(inputs)
    logits = _left_out(alpha * similarities + beta, inputs)
    weights = torch.sigmoid(logits)
    terms = torch.stack((F.softplus(logits, threshold=50), weights * similarities, weights), dim=1)
    row_loss, row_dot, row_sum = _per_row(terms, inputs).unbind(1)
    dx, d_negatives = _products(inputs, weights)
    return BatchSigmoid(row_loss, dx, d_negatives, row_dot, row_sum)


def _count(inputs: LossInputs, way: Way) -> int:
    """Return the number of columns that this rank sends, or of its own negatives if they belong to one row each."""
    assert inputs.negatives is not None
    return way.negatives if inputs.negative_rows is None else len(inputs.negatives)


def _columns(inputs: LossInputs, way: Way) -> tuple[Tensor, Ids]:
    """Return the negatives after padding to the number of all ranks, and the ids of the rows and of these columns."""
    negatives, ids = inputs.negatives, inputs.negative_ids
    assert negatives is not None
    rows = inputs.ids
    if ids is None or rows is None:  # ids that are never equal
        rows = torch.zeros(len(inputs.x), dtype=torch.int64, device=negatives.device)
        ids = rows.new_ones(len(negatives))
    missing = way.negatives - len(negatives)
    return F.pad(negatives, (0, 0, missing, 0)), (rows, F.pad(ids, (missing, 0), value=NO_NEGATIVE))


def _without_columns(limits: Limits | None, columns: Tensor) -> Limits | None:
    """Return the limits of the rows, and none of the columns."""
    return None if limits is None else (limits[0], limits[0].new_full((len(columns),), math.inf))


def _own_similarities(inputs: LossInputs, limits: Limits | None = None) -> Tensor:
    """Return the products (e,) of negatives that belong to one row each with their rows; -inf above the limits."""
    assert inputs.negatives is not None and inputs.negative_rows is not None
    products = paired_products(inputs.x[inputs.negative_rows], inputs.negatives)
    return products if limits is None else products.masked_fill(products > limits[0][inputs.negative_rows], -math.inf)


def _left_out(logits: Tensor, inputs: LossInputs) -> Tensor:
    """Return the logits (e,) of such negatives, with -inf where the ids of negative and row are equal."""
    rows, ids = inputs.negative_rows, inputs.negative_ids
    if ids is None or inputs.ids is None or rows is None:
        return logits
    return logits.masked_fill((ids == inputs.ids[rows]) | (ids == NO_NEGATIVE), -math.inf)


def _per_row(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return the sums (b, k) of values (e, k) of the negatives over each row."""
    assert inputs.negative_rows is not None
    rows = torch.arange(len(inputs.x), device=values.device)
    return segment_sums((values,), inputs.negative_rows, rows)[0]


def _products(inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (b, D) and of the negatives (e, D), of products with these weights (e,)."""
    assert inputs.negatives is not None and inputs.negative_rows is not None
    dtype = accumulation_dtype(inputs.x)
    dx = _per_row(weights[:, None] * inputs.negatives.to(dtype), inputs)
    return dx, weights[:, None] * inputs.x[inputs.negative_rows].to(dtype)
