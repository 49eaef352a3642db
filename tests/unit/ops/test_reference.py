"""Compare the reference with sums in Python floats, and its gradients with finite differences of its values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.ops.types import Terms
from tests import reference
from tests.tolerances import GRADIENT, VALUE, assert_close

ALPHA = 7.5


def rows(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, 3, generator=generator, dtype=torch.float64), dim=1)


def dot(a: Tensor, b: Tensor) -> float:
    return math.fsum(p * q for p, q in zip(a.tolist(), b.tolist(), strict=True))


def info_nce_by_hand(x: Tensor, y: Tensor, alpha: float) -> float:
    """Return -1/(2B) sum_i log softmax_i(row i)_i + log softmax_i(column i)_i."""
    logits = [[alpha * dot(a, b) for b in y] for a in x]
    total = 0.0
    for i in range(len(x)):
        total += math.log(math.fsum(map(math.exp, logits[i]))) - logits[i][i]
        total += math.log(math.fsum(math.exp(row[i]) for row in logits)) - logits[i][i]
    return total / (2 * len(x))


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_info_nce(batch: int) -> None:
    x, y = rows(batch), rows(batch, seed=1)
    result = reference.info_nce(x, y, ALPHA)
    assert_close(result.loss, info_nce_by_hand(x, y, ALPHA), VALUE[torch.float64])
    step = 1e-5
    for row in range(batch):
        for column in range(3):
            shift = torch.zeros_like(x)
            shift[row, column] = step
            slope = (info_nce_by_hand(x + shift, y, ALPHA) - info_nce_by_hand(x - shift, y, ALPHA)) / (2 * step)
            assert result.d_image[row, column].item() == pytest.approx(slope, abs=1e-8)
            slope = (info_nce_by_hand(x, y + shift, ALPHA) - info_nce_by_hand(x, y - shift, ALPHA)) / (2 * step)
            assert result.d_text[row, column].item() == pytest.approx(slope, abs=1e-8)
    slope = (info_nce_by_hand(x, y, ALPHA + step) - info_nce_by_hand(x, y, ALPHA - step)) / (2 * step)
    assert result.d_logit_scale.item() == pytest.approx(slope, abs=1e-8)


def kept(m: int, n: int, diagonal: int | None) -> list[tuple[int, int]]:
    return [(i, j) for i in range(m) for j in range(n) if diagonal is None or i + diagonal != j]


@pytest.mark.parametrize("diagonal", [None, 0, 2, -3, 9])
def test_tile_stats(diagonal: int | None) -> None:
    x, y = rows(5), rows(4, seed=1)
    row_scale, col_scale = torch.arange(5.0), torch.arange(4.0) - 1
    row_lse, col_lse = reference.tile_stats(x, y, row_scale, col_scale, diagonal=diagonal)
    row_sums, col_sums = [0.0] * 5, [0.0] * 4
    for i, j in kept(5, 4, diagonal):
        row_sums[i] += math.exp(row_scale[i] * dot(x[i], y[j]))
        col_sums[j] += math.exp(col_scale[j] * dot(x[i], y[j]))
    assert row_lse.exp().tolist() == pytest.approx(row_sums)
    assert col_lse.exp().tolist() == pytest.approx(col_sums)


def test_tile_stats_of_an_empty_sum() -> None:
    row_lse, col_lse = reference.tile_stats(rows(1), rows(1), 2.0, 3.0, diagonal=0)
    assert row_lse.item() == col_lse.item() == -math.inf


@pytest.mark.parametrize("diagonal", [None, 0, 1, -2])
def test_tile_grads(diagonal: int | None) -> None:
    m, n = 5, 4
    x, y = rows(m), rows(n, seed=1)
    i_m, j_n = torch.arange(m).double(), torch.arange(n).double()
    row, col = (i_m, i_m / 3, 1 + i_m), (j_n - 1, 0.3, j_n / 2)
    got = reference.tile_grads(x, y, Terms(*row), Terms(*col), diagonal=diagonal)
    dx, dy = torch.zeros_like(x), torch.zeros_like(y)
    row_dot, col_dot = [0.0] * m, [0.0] * n
    for i, j in kept(m, n, diagonal):
        s = dot(x[i], y[j])
        row_part = float(row[2][i] * math.exp(row[0][i] * s - row[1][i]))
        col_part = float(col[2][j] * math.exp(col[0][j] * s - col[1]))
        dx[i] += (row_part + col_part) * y[j]
        dy[j] += (row_part + col_part) * x[i]
        row_dot[i] += row_part * s
        col_dot[j] += col_part * s
    for result, wanted in zip(got, (dx, dy, row_dot, col_dot), strict=True):
        assert_close(result, wanted, GRADIENT[torch.float64])


def sigmoid_by_hand(x: Tensor, y: Tensor, scale: float, bias: float, diagonal: int | None) -> float:
    return math.fsum(math.log1p(math.exp(scale * dot(x[i], y[j]) + bias)) for i, j in kept(len(x), len(y), diagonal))


@pytest.mark.parametrize("diagonal", [None, 0, -1])
def test_tile_sigmoid(diagonal: int | None) -> None:
    """Sums of P are slopes of the loss: dL/dx = scale*dx, dL/dscale = sum of row_dot, dL/dbias = sum of row_sum."""
    x, y, scale, bias, step = rows(5), rows(4, seed=1), 3.0, -1.5, 1e-5
    got = reference.tile_sigmoid(x, y, scale, bias, diagonal=diagonal)

    def slope(dx: float = 0.0, dy: float = 0.0, dscale: float = 0.0, dbias: float = 0.0) -> float:
        def value(sign: float) -> float:
            return sigmoid_by_hand(
                x + sign * step * dx,
                y + sign * step * dy,
                scale + sign * step * dscale,
                bias + sign * step * dbias,
                diagonal,
            )

        return (value(1) - value(-1)) / (2 * step)

    assert_close(got.row_loss.sum(), sigmoid_by_hand(x, y, scale, bias, diagonal), VALUE[torch.float64])
    assert scale * got.dx.sum().item() == pytest.approx(slope(dx=1), abs=1e-7)
    assert scale * got.dy.sum().item() == pytest.approx(slope(dy=1), abs=1e-7)
    assert got.row_dot.sum().item() == pytest.approx(slope(dscale=1), abs=1e-7)
    assert got.row_sum.sum().item() == pytest.approx(slope(dbias=1), abs=1e-7)
