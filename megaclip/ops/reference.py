"""The oracle: whole-matrix float64 losses and gradients that every other implementation is tested against.

Nothing here is fast or small: each function forms the whole matrix of logits, in float64, in the plainest way that can
be written. Losses take their gradients from autograd; the tile functions follow their defining sums term by term. Tests
and benchmarks read it; the training path never does.

Shapes: B contrastive batch, D embedding, m and n the rows and columns of a tile.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Scalars = float | Tensor  # a number, or one value per row or per column


class LossAndGrads(NamedTuple):
    """A loss and its gradients by the leaves they were taken for, all float64."""

    loss: Tensor  # ()
    d_image: Tensor  # (B, D)
    d_text: Tensor  # (B, D)
    d_logit_scale: Tensor  # ()


class TileGrads(NamedTuple):
    """What `tile_grads` returns, float64."""

    dx: Tensor  # (m, D)
    dy: Tensor  # (n, D)
    row_dot: Tensor  # (m,)
    col_dot: Tensor  # (n,)


class TileSigmoid(NamedTuple):
    """What `tile_sigmoid` returns, float64."""

    row_loss: Tensor  # (m,)
    dx: Tensor  # (m, D)
    dy: Tensor  # (n, D)
    row_dot: Tensor  # (m,)
    row_sum: Tensor  # (m,)


def info_nce(image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor) -> LossAndGrads:
    """InfoNCE over the whole batch: the mean of the two cross-entropies over rows and over columns (CLIP, figure 3).

    image_features, text_features: (B, D), any floating dtype. logit_scale: the multiplier alpha itself, not its
    logarithm.
    """
    x_BD = image_features.detach().double().requires_grad_()
    y_BD = text_features.detach().double().requires_grad_()
    alpha = torch.as_tensor(logit_scale, dtype=torch.float64, device=x_BD.device).detach().reshape(()).requires_grad_()
    logits_BB = alpha * x_BD @ y_BD.T
    target_B = torch.arange(len(x_BD), device=x_BD.device)
    loss = (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2
    d_image, d_text, d_alpha = torch.autograd.grad(loss, (x_BD, y_BD, alpha))
    return LossAndGrads(loss.detach(), d_image, d_text, d_alpha)


def tile_stats(
    x: Tensor, y: Tensor, row_scale: Scalars, col_scale: Scalars, *, diagonal: int | None = None
) -> tuple[Tensor, Tensor]:
    """`row_lse_i = log sum_j exp(row_scale_i * s_ij)` (m,) and `col_lse_j = log sum_i exp(col_scale_j * s_ij)` (n,),
    float64.

    x (m, D), y (n, D); entries with `i + diagonal == j` are left out; an empty sum gives -inf.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal)
    row_mn = (_column(row_scale, s_mn) * s_mn).masked_fill(~kept_mn, -torch.inf)
    col_mn = (_row(col_scale, s_mn) * s_mn).masked_fill(~kept_mn, -torch.inf)
    return torch.logsumexp(row_mn, dim=1), torch.logsumexp(col_mn, dim=0)


def tile_grads(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    row_shift: Scalars,
    row_weight: Scalars,
    col_scale: Scalars,
    col_shift: Scalars,
    col_weight: Scalars,
    *,
    diagonal: int | None = None,
) -> TileGrads:
    """The gradient tile, float64, with entries `i + diagonal == j` left out.

    `P_ij = row_weight_i*exp(row_scale_i*s_ij - row_shift_i) + col_weight_j*exp(col_scale_j*s_ij - col_shift_j)`;
    `dx = P y`, `dy = P^T x`, `row_dot_i = sum_j (row part of P_ij)*s_ij`, `col_dot_j = sum_i (column part of
    P_ij)*s_ij`.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal)
    row_mn = _column(row_weight, s_mn) * torch.exp(_column(row_scale, s_mn) * s_mn - _column(row_shift, s_mn))
    col_mn = _row(col_weight, s_mn) * torch.exp(_row(col_scale, s_mn) * s_mn - _row(col_shift, s_mn))
    row_mn, col_mn = row_mn.masked_fill(~kept_mn, 0.0), col_mn.masked_fill(~kept_mn, 0.0)
    p_mn = row_mn + col_mn
    return TileGrads(p_mn @ y.double(), p_mn.T @ x.double(), (row_mn * s_mn).sum(1), (col_mn * s_mn).sum(0))


def tile_sigmoid(
    x: Tensor, y: Tensor, scale: float | Tensor, bias: float | Tensor, *, diagonal: int | None = None
) -> TileSigmoid:
    """The sigmoid loss's negatives in one tile, float64, with entries `i + diagonal == j` left out (SigLIP, equation
    1).

    With `z_ij = scale*s_ij + bias` and `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`, `dy =
    P^T x`, `row_dot_i = sum_j P_ij*s_ij` and `row_sum_i = sum_j P_ij`. The caller multiplies by alpha/B, alpha/B, 1/B
    and 1/B.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal)
    z_mn = _column(scale, s_mn) * s_mn + _column(bias, s_mn)
    p_mn = torch.sigmoid(z_mn).masked_fill(~kept_mn, 0.0)
    row_loss = F.softplus(z_mn, threshold=40.0).masked_fill(~kept_mn, 0.0).sum(1)
    return TileSigmoid(row_loss, p_mn @ y.double(), p_mn.T @ x.double(), (p_mn * s_mn).sum(1), p_mn.sum(1))


def _similarities(x: Tensor, y: Tensor, diagonal: int | None) -> tuple[Tensor, Tensor]:
    """All products (m, n) in float64, and True where an entry counts."""
    s_mn = x.double() @ y.double().T
    if diagonal is None:
        return s_mn, torch.ones_like(s_mn, dtype=torch.bool)
    row = torch.arange(len(x), device=x.device)[:, None]
    col = torch.arange(len(y), device=x.device)[None, :]
    return s_mn, row + diagonal != col


def _column(value: Scalars, like: Tensor) -> Tensor:
    """A number or an (m,) vector as (1, 1) or (m, 1) float64."""
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).reshape(-1, 1)


def _row(value: Scalars, like: Tensor) -> Tensor:
    """A number or an (n,) vector as (1, 1) or (1, n) float64."""
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).reshape(1, -1)
