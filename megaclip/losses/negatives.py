"""Negatives that are no texts of pairs, such as hard negatives: further columns, which only the rows contrast with.

Those without `negative_rows` are columns for the rows of all ranks, and travel as the texts do. Ranks may have unequal
numbers of them. Each rank sends as many as the rank with the most (`Way.negatives`); the padding comes first and has
the id NO_NEGATIVE. Those with `negative_rows` belong to one row of this rank each: one product per negative, and no
exchange.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.losses.distributed_tiles import BatchSigmoid, DistributedTiles
from megaclip.losses.segments import segment_sums
from megaclip.losses.sums import LossInputs
from megaclip.losses.way import Way
from megaclip.ops.rows import paired_products
from megaclip.ops.types import NO_NEGATIVE, Limits, Terms, accumulation_dtype


class Negatives:
    """The negatives of one call of a loss, (e, D) on this rank. limits: as in `DistributedTiles`; of rows only."""

    _shift: Tensor
    """Log-sum-exp of the columns."""

    def __init__(self, inputs: LossInputs, way: Way, limits: Limits | None = None) -> None:
        assert inputs.negatives is not None, "the loss has negatives"
        self._inputs, self._x, self._own, self._way = inputs, inputs.x, inputs.negatives, way
        self._limit = None if limits is None else limits[0]
        self._is_empty = not (way.negatives if inputs.negative_rows is None else len(inputs.negatives))

    def log_sum_exp(self, alpha: Tensor) -> Tensor:
        """Return the log-sum-exp over the negatives of each row (b,)."""
        rows, nothing = self._inputs.negative_rows, alpha.new_full((len(self._x),), -math.inf)
        if self._is_empty:
            return nothing
        if rows is None:
            row_lse, col_lse = self._tiles().stats(alpha, alpha)
            self._shift = col_lse.masked_fill(col_lse == -math.inf, 0.0)
            return row_lse
        logits = self._left_out(alpha * self._similarities(rows), rows)
        top = nothing.scatter_reduce(0, rows, logits, "amax")
        top = top.masked_fill(top == -math.inf, 0.0)
        return top + self._per_row(torch.exp(logits - top[rows])[:, None], rows)[:, 0].log()

    def softmax_gradients(self, alpha: Tensor, row_shift: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the negatives add to dx (b, D), and their gradients (e, D), without factor alpha.

        row_shift, row_weight: those of the rows, as in `DistributedTiles.grads`. Call `log_sum_exp` first.
        """
        rows = self._inputs.negative_rows
        if self._is_empty:
            return alpha.new_zeros(self._x.shape), alpha.new_zeros(self._own.shape)
        if rows is None:
            # The shift keeps the exponentials of the columns finite, although their weight is 0.
            row, col = Terms(alpha, row_shift, row_weight), Terms(alpha, self._shift, torch.zeros_like(alpha))
            found = self._tiles().grads(row, col)
            return found.dx, found.dy[self._way.negatives - len(self._own) :]
        logits = self._left_out(alpha * self._similarities(rows), rows)
        return self._products(row_weight.expand(len(self._x))[rows] * torch.exp(logits - row_shift[rows]), rows)

    def sigmoid_sums(self, alpha: Tensor, beta: Tensor) -> BatchSigmoid:
        """Return what the negatives add to the sums of the sigmoid loss; `dy` is their own gradient (e, D)."""
        rows = self._inputs.negative_rows
        if self._is_empty:
            zeros = (alpha.new_zeros(len(self._x)) for _ in range(3))
            return BatchSigmoid(next(zeros), alpha.new_zeros(self._x.shape), alpha.new_zeros(self._own.shape), *zeros)
        if rows is None:
            found = self._tiles().sigmoid(alpha, beta)
            return found._replace(dy=found.dy[self._way.negatives - len(self._own) :])
        similarities = self._similarities(rows)
        logits = self._left_out(alpha * similarities + beta, rows)
        weights = torch.sigmoid(logits)
        terms = torch.stack((F.softplus(logits, threshold=50), weights * similarities, weights), dim=1)
        row_loss, row_dot, row_sum = self._per_row(terms, rows).unbind(1)
        dx, d_negatives = self._products(weights, rows)
        return BatchSigmoid(row_loss, dx, d_negatives, row_dot, row_sum)

    def _tiles(self) -> DistributedTiles:
        """Return the tiles of the rows with the negatives, after padding to the number of all ranks."""
        rows, ids = self._inputs.ids, self._inputs.negative_ids
        if ids is None or rows is None:  # ids that are never equal
            rows = torch.zeros(len(self._x), dtype=torch.int64, device=self._own.device)
            ids = rows.new_ones(len(self._own))
        missing = self._way.negatives - len(self._own)
        columns, ids = F.pad(self._own, (0, 0, missing, 0)), F.pad(ids, (missing, 0), value=NO_NEGATIVE)
        limit = self._limit
        limits = None if limit is None else (limit, limit.new_full((len(columns),), math.inf))
        return DistributedTiles(self._x, columns, self._way, ids=(rows, ids), limits=limits, positives=False)

    def _similarities(self, rows: Tensor) -> Tensor:
        """Return the products (e,) of negatives that belong to one row each with their rows; -inf above the limits."""
        products, limit = paired_products(self._x[rows], self._own), self._limit
        return products if limit is None else products.masked_fill(products > limit[rows], -math.inf)

    def _left_out(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the logits (e,) of such negatives, with -inf where the ids of negative and row are equal."""
        ids, own = self._inputs.ids, self._inputs.negative_ids
        if ids is None or own is None:
            return logits
        return logits.masked_fill((own == ids[rows]) | (own == NO_NEGATIVE), -math.inf)

    def _per_row(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return the sums (b, k) of values (e, k) of the negatives over each row."""
        return segment_sums((values,), rows, torch.arange(len(self._x), device=values.device))[0]

    def _products(self, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (b, D) and of the negatives (e, D), of products with these weights (e,)."""
        dtype = accumulation_dtype(self._x)
        dx = self._per_row(weights[:, None] * self._own.to(dtype), rows)
        return dx, weights[:, None] * self._x[rows].to(dtype)
