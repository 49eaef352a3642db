"""CLIP's loss: InfoNCE over the whole batch of all ranks, with one tile of logits in memory at a time.

`L = 1/(2B) sum_i [softplus(row_lse_i - alpha*s_ii) + softplus(col_lse_i - alpha*s_ii)]`, where the log-sum-exps exclude
the positive (docs/mathematics.md). One pass over the batch computes the statistics, and another the gradients. The
terms of the positives are added here, per row.

Variants, which can be combined, except margin with ids="positive":

* ids="mask": the log-sum-exps also exclude the entries whose pairs have equal ids.
* ids="positive": `alpha*s_ii` becomes the mean over P(i), the pairs with the id of pair i, which stay in the
  log-sum-exps. This is L_out of supervised contrastive learning (Khosla et al. 2020, arXiv:2004.11362, equation 2), in
  both directions. The difference `alpha * (s_ii - mean over P(i) of s_ip)` is linear in the features of either side:
  it needs the sums of the features by id, and no tiles.
* negatives: further columns, which only the log-sum-exps of rows include. Those that belong to one row are products of
  this rank, joined by logaddexp.
* margin=m: the log-sum-exp of row i leaves out the columns with s_ij > s_ii + m, and that of column j the rows with
  s_ij > s_jj + m. The gradient does not count that s_ii moves the limit.
* same_side=True: both log-sum-exps of pair i include <x_i, x_j> and <y_i, y_j> of the other pairs j.
* symmetric=False: rows only, `1/B sum_i`. weights: a factor of both terms of a pair.

The reduction contract: data-parallel engines average parameter gradients over ranks. So the backward pass of each rank
returns `W * dL/d(local features)`. Every rank has logit_scale, so each rank returns the whole `dL/d(logit_scale)`. Both
are exact after averaging.
"""

from typing import Any

import torch
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.losses.batch_loss import SummedLoss, working_scalar
from megaclip.losses.compiled_operation import register_loss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import DistributedTiles
from megaclip.losses.negatives import Negatives
from megaclip.losses.segments import sums_of_equal_ids
from megaclip.losses.settings import ClipLossSettings
from megaclip.losses.sums import LossAndSums, LossInputs
from megaclip.losses.way import Way
from megaclip.ops.rows import finish_gradient, paired_products, softmax_pairs
from megaclip.ops.types import Terms, accumulation_dtype


class ClipLoss(SummedLoss):
    """CLIP's loss with every sample of every rank as a negative, with the call signature of open_clip's ClipLoss.

    The constructor takes the arguments of `BatchLoss`, not those of open_clip's ClipLoss.
    """

    settings_model = ClipLossSettings
    settings: ClipLossSettings
    cost = LOSS_COSTS["clip"]

    def records(self, x: Tensor, way: Way) -> bool:
        return self.settings.margin is None and super().records(x, way)

    def used_bias(self, logit_bias: Tensor | float | None, features: Tensor) -> None:
        return None

    def plain_sums(self, inputs: LossInputs, *, way: Way, gradients: bool) -> LossAndSums:
        batch = _Batch(inputs, self.settings, way)
        alpha = batch.alpha
        if not gradients:
            (loss,) = _means_over_ranks(batch.loss, way=way)
            return LossAndSums(loss, *(alpha,) * 7)  # the caller uses only the loss
        dx, dy, d_negatives, missing = batch.gradients()
        # L is a function of alpha*x, so alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>. The dots lack this factor alpha.
        _, dots = finish_gradient(dx, inputs.x, inputs.y, batch.pull, alpha)
        total = dots.sum() if missing is None else dots.sum() + missing
        loss, d_alpha = _means_over_ranks(batch.loss, total, way=way)
        return LossAndSums(loss, dx, dy, batch.pull, alpha, d_alpha, torch.zeros_like(alpha), d_negatives)


ClipLoss.operation = register_loss("clip_loss", ClipLoss)


class _Batch:
    """One batch, with the results of the statistics pass."""

    loss: Tensor
    """() the mean over this rank's rows and columns."""
    pull: Tensor
    """(b,) weights of the positives' gradients, without factor alpha."""

    def __init__(self, inputs: LossInputs, settings: ClipLossSettings, way: Way) -> None:
        self._inputs, self._settings, self._way = inputs, settings, way
        x, y = inputs.x, inputs.y
        self.alpha = alpha = working_scalar(inputs.logit_scale, x)
        limit = None if settings.margin is None else paired_products(x, y) + settings.margin
        ids = (inputs.ids, inputs.ids) if settings.ids == "mask" else None
        limits = None if limit is None else (limit, limit)
        self._left_out: dict[str, Any] = {"ids": ids, "limits": limits}
        self._tiles = DistributedTiles(x, y, way, **self._left_out)
        row_lse, col_lse = self._tiles.stats(alpha, alpha)
        for side in (x, y) if settings.same_side else ():
            lse, _ = self._tiles_of_side(side).stats(alpha, alpha)
            row_lse, col_lse = torch.logaddexp(row_lse, lse), torch.logaddexp(col_lse, lse)
        self._negatives = None if inputs.negatives is None else Negatives(inputs, way, limits)
        if self._negatives is not None:
            row_lse = torch.logaddexp(row_lse, self._negatives.log_sum_exp(alpha))
        self._weights = self._weights_of_pairs()
        pairs = softmax_pairs(x, y, row_lse, col_lse, alpha, self._weights)
        self.loss, self._full_2b, self.pull = pairs.losses.sum(), pairs.full_2m, pairs.pull
        self._from_positives_2bd = self._from_positives() if settings.ids == "positive" else None
        if self._from_positives_2bd is not None:
            self.loss = self.loss + alpha * (x.to(alpha.dtype) * self._from_positives_2bd[0]).sum()

    def _tiles_of_side(self, side: Tensor) -> DistributedTiles:
        """Return the tiles of the images with images, or of the texts with texts."""
        y_all = self._tiles.y_all if side is self._inputs.y else None
        return DistributedTiles(side, side, self._way, y_all=y_all, **self._left_out)

    def _weights_of_pairs(self) -> float | Tensor:
        """Return the weight of each row and column, a number or (2, b), with the factor W of the contract."""
        x, weights, symmetric = self._inputs.x, self._inputs.weights, self._settings.symmetric
        mean = 1 / len(x)
        if weights is None and symmetric:
            return mean / 2
        weights = mean * (torch.ones_like(x[:, 0], dtype=accumulation_dtype(x)) if weights is None else weights)
        return torch.stack((weights / 2, weights / 2) if symmetric else (weights, torch.zeros_like(weights)))

    def _from_positives(self) -> Tensor:
        """Return the gradients (2, b, D) of `sum_i [v_i (s_ii - mean_p s_ip) + w_i (s_ii - mean_p s_pi)]`.

        v, w: weights of the rows and the columns. p: the pairs with the id of pair i. The sum is
        `sum_i <x_i, gradient>`.
        """
        x, y, ids, weights = self._inputs.x, self._inputs.y, self._inputs.ids, self._weights
        assert ids is not None, "check_features requires ids"
        row, col = (weights, weights) if isinstance(weights, float) else weights.unbind()
        sums = sums_of_equal_ids(x, y, ids, row, col, way=self._way, y_all=self._tiles.y_all)
        row, col = (weight if isinstance(weight, float) else weight[:, None] for weight in (row, col))
        number = sums.number[:, None]
        return torch.stack(
            (
                (row + col) * y.to(number.dtype) - (row * sums.y + sums.weighted_y) / number,
                (row + col) * x.to(number.dtype) - (col * sums.x + sums.weighted_x) / number,
            )
        )

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the sums over the negatives dx, dy (b, D) and d_negatives, without factor alpha.

        The fourth result is what `sum_i <x_i, dL/dx_i>` lacks of `alpha * dL/d(alpha)`, without factor alpha; None if
        every logit has one factor x.
        """
        x, y, alpha, weights = self._inputs.x, self._inputs.y, self.alpha, self._weights
        # alpha is multiplied in after the sums
        row_weight, col_weight = (alpha.new_full((2,), weights) if isinstance(weights, float) else weights).unbind()
        row_full, col_full = self._full_2b
        row, col = Terms(alpha, row_full, row_weight), Terms(alpha, col_full, col_weight)
        found = self._tiles.grads(row, col)
        dx, dy, d_negatives, missing = found.dx, found.dy, alpha.new_empty(0), None
        if self._settings.same_side:
            sides = []
            for side, sign in ((x, -1), (y, 1)):
                # Pair i is row i and column i: the terms of both of its log-sum-exps meet in dx + dy.
                found = self._tiles_of_side(side).grads(row, col)
                own = sign * (side.to(alpha.dtype) * found.dx).sum()
                missing = own if missing is None else missing + own
                sides.append(found.dx + found.dy)
            dx, dy = dx + sides[0], dy + sides[1]
        if self._negatives is not None:
            more, d_negatives = self._negatives.softmax_gradients(alpha, row_full, row_weight)
            dx = dx + more
        if self._from_positives_2bd is not None:
            dx, dy = dx + self._from_positives_2bd[0], dy + self._from_positives_2bd[1]
        return dx, dy, d_negatives, missing


def _means_over_ranks(*values: Tensor, way: Way) -> tuple[Tensor, ...]:
    """Return the mean of each value () over ranks, with one collective for all."""
    if way.ranks.size == 1:
        return values
    means = sum_over_ranks(torch.stack(values), group=way.ranks) / way.ranks.size
    return tuple(mean.clone() for mean in means)  # a loss must not be a view
