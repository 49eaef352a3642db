"""Reference losses and tile operations in float64, against which every other implementation is tested.

Each function forms the whole matrix of logits in the plainest way, without regard to speed or memory. The losses take
their gradients from autograd. The tile functions follow their defining sums term by term.

Shapes: B contrastive batch, D embedding, m and n the rows and columns of a tile.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.ops.types import NO_NEGATIVE, Ids, Scalars, Terms


class LossAndGrads(NamedTuple):
    """A loss and its gradients, float64."""

    loss: Tensor  # ()
    d_image: Tensor  # (B, D)
    d_text: Tensor  # (B, D)
    d_logit_scale: Tensor  # ()


class TileGrads(NamedTuple):
    """Result of `tile_grads`, float64."""

    dx: Tensor  # (m, D)
    dy: Tensor  # (n, D)
    row_dot: Tensor  # (m,)
    col_dot: Tensor  # (n,)


class TileSigmoid(NamedTuple):
    """Result of `tile_sigmoid`, float64."""

    row_loss: Tensor  # (m,)
    dx: Tensor  # (m, D)
    dy: Tensor  # (n, D)
    row_dot: Tensor  # (m,)
    row_sum: Tensor  # (m,)


def info_nce(image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor) -> LossAndGrads:
    """Return InfoNCE over the whole batch: the mean of the cross-entropies over rows and columns (CLIP, figure 3).

    image_features, text_features: (B, D), any floating-point dtype. logit_scale: the multiplier alpha, not its
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
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    col_scale: Scalars,
    *,
    diagonal: int | None = None,
    ids: Ids | None = None,
) -> tuple[Tensor, Tensor]:
    """Return row_lse (m,) and col_lse (n,), float64.

    `row_lse_i = log sum_j exp(row_scale_i * s_ij)` and `col_lse_j = log sum_i exp(col_scale_j * s_ij)` for x (m, D) and
    y (n, D). Entries with `i + diagonal == j` or with equal ids are left out. An empty sum gives -inf.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal, ids)
    row_mn = (_column(row_scale, s_mn) * s_mn).masked_fill(~kept_mn, -torch.inf)
    col_mn = (_row(col_scale, s_mn) * s_mn).masked_fill(~kept_mn, -torch.inf)
    return torch.logsumexp(row_mn, dim=1), torch.logsumexp(col_mn, dim=0)


def tile_grads(
    x: Tensor, y: Tensor, row: Terms, col: Terms, *, diagonal: int | None = None, ids: Ids | None = None
) -> TileGrads:
    """Return the gradient tile, float64, without the entries `i + diagonal == j` and those with equal ids.

    `P_ij = row.weight_i*exp(row.scale_i*s_ij - row.shift_i) + col.weight_j*exp(col.scale_j*s_ij - col.shift_j)`;
    `dx = P y`, `dy = P^T x`, `row_dot_i = sum_j (row part of P_ij)*s_ij`, `col_dot_j = sum_i (column part of
    P_ij)*s_ij`.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal, ids)
    row_mn = _column(row.weight, s_mn) * torch.exp(_column(row.scale, s_mn) * s_mn - _column(row.shift, s_mn))
    col_mn = _row(col.weight, s_mn) * torch.exp(_row(col.scale, s_mn) * s_mn - _row(col.shift, s_mn))
    row_mn, col_mn = row_mn.masked_fill(~kept_mn, 0.0), col_mn.masked_fill(~kept_mn, 0.0)
    p_mn = row_mn + col_mn
    return TileGrads(p_mn @ y.double(), p_mn.T @ x.double(), (row_mn * s_mn).sum(1), (col_mn * s_mn).sum(0))


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    diagonal: int | None = None,
    ids: Ids | None = None,
) -> TileSigmoid:
    """Return the sums over the sigmoid loss's negatives in one tile, float64 (SigLIP, equation 1).

    Entries `i + diagonal == j` and those with equal ids are left out.
    With `z_ij = scale*s_ij + bias` and `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`, `dy =
    P^T x`, `row_dot_i = sum_j P_ij*s_ij` and `row_sum_i = sum_j P_ij`. The caller multiplies by alpha/B, alpha/B, 1/B
    and 1/B.
    """
    s_mn, kept_mn = _similarities(x, y, diagonal, ids)
    z_mn = _column(scale, s_mn) * s_mn + _column(bias, s_mn)
    p_mn = torch.sigmoid(z_mn).masked_fill(~kept_mn, 0.0)
    row_loss = F.softplus(z_mn, threshold=40.0).masked_fill(~kept_mn, 0.0).sum(1)
    return TileSigmoid(row_loss, p_mn @ y.double(), p_mn.T @ x.double(), (p_mn * s_mn).sum(1), p_mn.sum(1))


def _similarities(x: Tensor, y: Tensor, diagonal: int | None, ids: Ids | None) -> tuple[Tensor, Tensor]:
    """Return all products (m, n) in float64, and a mask of the entries that are not left out."""
    s_mn = x.double() @ y.double().T
    kept_mn = torch.ones_like(s_mn, dtype=torch.bool)
    if ids is not None:
        kept_mn &= (ids[0][:, None] != ids[1]) & (ids[1] != NO_NEGATIVE)
    if diagonal is not None:
        row = torch.arange(len(x), device=x.device)[:, None]
        kept_mn &= row + diagonal != torch.arange(len(y), device=x.device)
    return s_mn, kept_mn


def _column(value: Scalars, like: Tensor) -> Tensor:
    """Return a number as (1, 1), or a vector (m,) as (m, 1), in float64."""
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).reshape(-1, 1)


def _row(value: Scalars, like: Tensor) -> Tensor:
    """Return a number as (1, 1), or a vector (n,) as (1, n), in float64."""
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).reshape(1, -1)
