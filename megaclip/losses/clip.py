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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.losses import negatives
from megaclip.losses.batch_loss import SummedLoss, working_scalar
from megaclip.losses.compiled_operation import register_loss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import distributed_grads, distributed_stats, gather_columns
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
        x, y, alpha = inputs.x, inputs.y, working_scalar(inputs.logit_scale, inputs.x)
        options = (_left_out(inputs, self.settings), self.settings, way)
        statistics = _statistics(inputs, alpha, *options)
        if not gradients:
            (loss,) = _means_over_ranks(statistics.loss, way=way)
            return LossAndSums(loss, *(alpha,) * 7)  # the caller uses only the loss
        dx, dy, d_negatives, missing = _gradients(inputs, alpha, statistics, *options)
        # L is a function of alpha*x, so alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>. The dots lack this factor alpha.
        _, dots = finish_gradient(dx, x, y, statistics.pull, alpha)
        total = dots.sum() if missing is None else dots.sum() + missing
        loss, d_alpha = _means_over_ranks(statistics.loss, total, way=way)
        return LossAndSums(loss, dx, dy, statistics.pull, alpha, d_alpha, torch.zeros_like(alpha), d_negatives)


ClipLoss.operation = register_loss("clip_loss", ClipLoss)


class _Statistics(NamedTuple):
    """Results of the statistics pass."""

    loss: Tensor  # (), the mean over this rank's rows and columns
    y_all: Tensor | None  # (B, D), the columns of all ranks, with the all_gather exchange
    full_2b: Tensor  # log-sum-exp of all, for rows and columns
    pull: Tensor  # (b,), weights of the positives' gradients, without factor alpha
    shift: Tensor | None  # of the negatives
    from_positives_2bd: Tensor | None  # gradients of x and y of the difference of s_ii and its mean, without alpha


def _weights(inputs: LossInputs, settings: ClipLossSettings) -> float | Tensor:
    """Return the weight of each row and column, a number or (2, b), with the factor W of the contract."""
    mean = 1 / len(inputs.x)
    if inputs.weights is None and settings.symmetric:
        return mean / 2
    weights = torch.ones_like(inputs.x[:, 0], dtype=accumulation_dtype(inputs.x))
    weights = mean * (weights if inputs.weights is None else inputs.weights)
    return torch.stack((weights / 2, weights / 2) if settings.symmetric else (weights, torch.zeros_like(weights)))


def _left_out(inputs: LossInputs, settings: ClipLossSettings) -> dict[str, Any]:
    """Return the arguments of the tiles that select the entries to leave out, by ids and by similarity."""
    limit = None if settings.margin is None else paired_products(inputs.x, inputs.y) + settings.margin
    return {
        "ids": (inputs.ids, inputs.ids) if settings.ids == "mask" else None,
        "limits": None if limit is None else (limit, limit),
    }


def _statistics(
    inputs: LossInputs, alpha: Tensor, left_out: dict[str, Any], settings: ClipLossSettings, way: Way
) -> _Statistics:
    x, y, weights = inputs.x, inputs.y, _weights(inputs, settings)
    y_all = gather_columns(y, way)
    row_lse, col_lse = distributed_stats(x, y, alpha, alpha, way=way, y_all=y_all, **left_out)
    shift, from_positives = None, None
    for side in (x, y) if settings.same_side else ():
        side_all = y_all if side is y else gather_columns(side, way)
        lse, _ = distributed_stats(side, side, alpha, alpha, way=way, y_all=side_all, **left_out)
        row_lse, col_lse = torch.logaddexp(row_lse, lse), torch.logaddexp(col_lse, lse)
    if inputs.negatives is not None:
        lse, shift = negatives.log_sum_exp(inputs, alpha, way, left_out["limits"])
        row_lse = torch.logaddexp(row_lse, lse)
    pairs = softmax_pairs(x, y, row_lse, col_lse, alpha, weights)
    loss = pairs.losses.sum()
    if settings.ids == "positive":
        from_positives = _from_positives(inputs, weights, way, y_all)
        loss = loss + alpha * (x.to(alpha.dtype) * from_positives[0]).sum()
    return _Statistics(loss, y_all, pairs.full_2m, pairs.pull, shift, from_positives)


def _from_positives(inputs: LossInputs, weights: float | Tensor, way: Way, y_all: Tensor | None) -> Tensor:
    """Return the gradients (2, b, D) of `sum_i [v_i (s_ii - mean_p s_ip) + w_i (s_ii - mean_p s_pi)]`.

    v, w: weights of the rows and the columns. p: the pairs with the id of pair i. The sum is `sum_i <x_i, gradient>`.
    """
    x, y, ids = inputs.x, inputs.y, inputs.ids
    assert ids is not None, "check_features requires ids"
    row, col = (weights, weights) if isinstance(weights, float) else weights.unbind()
    sums = sums_of_equal_ids(x, y, ids, row, col, way=way, y_all=y_all)
    row, col = (weight if isinstance(weight, float) else weight[:, None] for weight in (row, col))
    number = sums.number[:, None]
    return torch.stack(
        (
            (row + col) * y.to(number.dtype) - (row * sums.y + sums.weighted_y) / number,
            (row + col) * x.to(number.dtype) - (col * sums.x + sums.weighted_x) / number,
        )
    )


def _gradients(
    inputs: LossInputs,
    alpha: Tensor,
    statistics: _Statistics,
    left_out: dict[str, Any],
    settings: ClipLossSettings,
    way: Way,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the sums over the negatives dx, dy (b, D) and d_negatives, without factor alpha.

    The fourth result is what `sum_i <x_i, dL/dx_i>` lacks of `alpha * dL/d(alpha)`, without factor alpha; None if every
    logit has one factor x.
    """
    weights = _weights(inputs, settings)  # alpha is multiplied in after the sums
    row_weight, col_weight = (alpha.new_full((2,), weights) if isinstance(weights, float) else weights).unbind()
    row_full, col_full = statistics.full_2b
    row = Terms(scale=alpha, shift=row_full, weight=row_weight)
    col = Terms(scale=alpha, shift=col_full, weight=col_weight)
    found = distributed_grads(inputs.x, inputs.y, row, col, way=way, y_all=statistics.y_all, **left_out)
    dx, dy, d_negatives, missing = found.dx, found.dy, alpha.new_empty(0), None
    if settings.same_side:
        sides = []
        for side, sign in ((inputs.x, -1), (inputs.y, 1)):
            # Pair i is row i and column i: the terms of both of its log-sum-exps meet in dx + dy.
            side_all = statistics.y_all if side is inputs.y else None
            found = distributed_grads(side, side, row, col, way=way, y_all=side_all, **left_out)
            own = sign * (side.to(alpha.dtype) * found.dx).sum()
            missing = own if missing is None else missing + own
            sides.append(found.dx + found.dy)
        dx, dy = dx + sides[0], dy + sides[1]
    if statistics.shift is not None:
        arguments = (row_full, row_weight, statistics.shift, way, left_out["limits"])
        more, d_negatives = negatives.softmax_gradients(inputs, alpha, *arguments)
        dx = dx + more
    if statistics.from_positives_2bd is not None:
        dx, dy = dx + statistics.from_positives_2bd[0], dy + statistics.from_positives_2bd[1]
    return dx, dy, d_negatives, missing


def _means_over_ranks(*values: Tensor, way: Way) -> tuple[Tensor, ...]:
    """Return the mean of each value () over ranks, with one collective for all."""
    if way.ranks.size == 1:
        return values
    means = sum_over_ranks(torch.stack(values), group=way.ranks) / way.ranks.size
    return tuple(mean.clone() for mean in means)  # a loss must not be a view
