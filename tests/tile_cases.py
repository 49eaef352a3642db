"""Cases and checks for every implementation of the tile operations, compiled or interpreted.

The results are compared with `tests.reference` in float64, for features that are rounded as for the product.
Every buffer that an implementation allocates without filling it starts as NaN. So a check fails where a value is never
written.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.losses.distillation import DistillationLoss
from megaclip.ops import tiles
from megaclip.ops.types import NO_NEGATIVE, Ids, Implementation, Terms, TileOptions
from tests import reference
from tests.tolerances import CONVERGED, GRADIENT, ROWS, TILE_GRADIENT, TILE_SUM, TILE_VALUE, VALUE, Bound, assert_close


@dataclass(frozen=True)
class TileCase:
    """Arguments of one call: sizes, dtype, scales, and the memory layout of the features."""

    m: int
    n: int
    embedding: int
    dtype: torch.dtype = torch.bfloat16
    precision: str = "auto"
    scale: float = 10.0
    diagonal: int | None = 0
    layout: str = "contiguous"
    vectors: str = "random"
    per_sample_scales: bool = False
    id_values: int = 0
    """Number of different ids of rows and columns. If it is even, their lowest 32 bits are equal. 0: no ids."""
    budget_mib: float = 128

    def __str__(self) -> str:
        differing = [
            f"{name}={value}"
            for name, value in self.__dict__.items()
            if name not in ("m", "n", "embedding") and value != TileCase.__dataclass_fields__[name].default
        ]
        return "-".join([f"{self.m}x{self.n}x{self.embedding}", *differing]).replace("torch.", "")


def random_features(count: int, embedding: int, seed: int, device: str) -> Tensor:
    """Return unit vectors, (count, embedding) float32."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, embedding, generator=generator), dim=1).to(device)


def features_of(case: TileCase, device: str) -> tuple[Tensor, Tensor]:
    """Return the features x (m, D) and y (n, D) of a case."""
    x = random_features(case.m, case.embedding, 1, device)
    y = random_features(case.n, case.embedding, 2, device)
    if case.vectors == "extreme":  # identical, opposite and zero vectors
        y[:] = y[0]
        x[:] = y[0]
        x[: case.m // 3] = -y[0]
        x[case.m // 2] = 0
        y[case.n // 2] = 0
        y[case.n // 3] = -x[-1]
    x, y = x.to(case.dtype), y.to(case.dtype)
    return _laid_out(x, case.layout), _laid_out(y, case.layout)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of x and another memory layout."""
    rows, cols = x.shape
    if layout == "contiguous":
        return x
    if layout == "offset":  # a tile of a larger matrix that starts at an odd address
        home = torch.full((rows + 3, cols + 7), torch.nan, dtype=x.dtype, device=x.device)[2:-1, 5:-2]
    elif layout == "strided":  # every second row
        home = torch.full((2 * rows, cols), torch.nan, dtype=x.dtype, device=x.device)[::2]
    else:
        assert layout == "transposed"
        home = torch.full((cols, rows), torch.nan, dtype=x.dtype, device=x.device).T
    home.copy_(x)
    return home


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill new floating-point tensors with NaN where PyTorch would leave them uninitialised."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def poison(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with (
        mock.patch.object(torch, "empty", lambda *a, **k: poison(empty(*a, **k))),
        mock.patch.object(Tensor, "new_empty", lambda self, *a, **k: poison(new_empty(self, *a, **k))),
    ):
        yield


def _options(case: TileCase, implementation: Implementation) -> TileOptions:
    return TileOptions(case.precision, implementation, case.budget_mib)


def _as_multiplied(x: Tensor, case: TileCase) -> Tensor:
    return x.to(torch.bfloat16) if case.precision == "bf16" else x


def _gradient_bound(case: TileCase, device: str) -> Bound:
    """Return the bound. In exact and TF32 products, the error of logits and of P is scale * rounding errors of s."""
    if case.precision == "tf32":
        return TILE_GRADIENT["tf32"].magnified(max(1.0, case.scale / 20))
    if case.precision == "float32" or (case.precision == "auto" and case.dtype == torch.float32):
        return TILE_GRADIENT["float32"].magnified(max(1.0, case.scale / 20))
    # float16 features are also rounded to bfloat16 for the products with P. Rounding errors of equal P do not average
    # out.
    bound = TILE_GRADIENT["bf16" if device == "cuda" else "bf16 truncated"]
    is_worst_case = case.dtype == torch.float16 or case.vectors == "extreme"
    return bound.magnified(math.sqrt(3)) if is_worst_case else bound


def _scales(case: TileCase, device: str) -> tuple[Any, Any]:
    if not case.per_sample_scales:
        return case.scale, case.scale
    return tuple(
        case.scale * (0.25 + torch.rand(count, generator=torch.Generator().manual_seed(seed))).to(device)
        for seed, count in ((3, case.m), (4, case.n))
    )


def ids_of(case: TileCase, device: str) -> Ids | None:
    """Return the ids of a case: ascending ones of the columns, and of the rows if their number is even.

    One column is a negative of no row.
    """
    if not case.id_values:
        return None
    factor = 2**32 + case.id_values % 2
    row, col = (
        torch.randint(case.id_values, (count,), generator=torch.Generator().manual_seed(seed)).to(device) * factor - 7
        for seed, count in ((5, case.m), (6, case.n))
    )
    col[len(col) // 2] = NO_NEGATIVE
    return row if case.id_values % 2 else row.sort().values, col.sort().values


def check_tile_case(implementation: Implementation, case: TileCase, device: str) -> None:
    """Assert that `tile_stats` and `tile_grads` equal the float64 reference within the tolerances."""
    x, y = features_of(case, device)
    given: dict[str, Any] = {"diagonal": case.diagonal, "ids": ids_of(case, device)}
    options = _options(case, implementation)
    row_scale, col_scale = _scales(case, device)
    exact = (_as_multiplied(x, case), _as_multiplied(y, case))
    expected = reference.tile_stats(*exact, row_scale, col_scale, **given)
    with poisoned_allocations():
        got = tiles.tile_stats(x, y, row_scale, col_scale, **given, options=options)
    for name, result, wanted in zip(("row_lse", "col_lse"), got, expected, strict=True):
        assert result.dtype == torch.float32 and result.shape == wanted.shape
        empty = wanted == -torch.inf
        assert torch.equal(result == -torch.inf, empty), f"{name}: empty sums are -inf"
        bound = TILE_VALUE["tf32" if case.precision == "tf32" else "float32"]
        assert_close(result[~empty], wanted[~empty], bound, name, size=1 + case.scale)

    # Shifts as a loss passes them: finite and close to the log-sum-exp.
    row_shift, col_shift = (lse.clamp_min(-2 * case.scale).float() for lse in expected)
    row_weight, col_weight = (0.1 + torch.linspace(0, 1, len(t), device=device) for t in (x, y))
    row, col = Terms(row_scale, row_shift, row_weight), Terms(col_scale, col_shift, col_weight)
    wanted_grads = reference.tile_grads(*exact, row, col, **given)
    with poisoned_allocations():
        got_grads = tiles.tile_grads(x, y, row, col, **given, options=options)
    bound = _gradient_bound(case, device)
    for name, result, wanted in zip(wanted_grads._fields, got_grads, wanted_grads, strict=True):
        assert result.dtype == torch.float32
        if wanted.norm() == 0:
            assert result.norm() == 0, f"{name} is not zero"
        else:
            assert_close(result, wanted, bound, name)


def check_sides_and_accumulators(implementation: Implementation, case: TileCase, device: str) -> None:
    """Run `_check_sides_and_accumulators` for `tile_grads` and for `tile_sigmoid`."""
    x, y = features_of(case, device)
    options = dict(diagonal=case.diagonal, options=_options(case, implementation))
    row, col = Terms(case.scale, 5.0, 0.5), Terms(case.scale, 4.0, 0.25)
    _check_sides_and_accumulators(lambda **given: tiles.tile_grads(x, y, row, col, **options, **given)[:2])
    _check_sides_and_accumulators(lambda **given: tiles.tile_sigmoid(x, y, case.scale, -1.0, **options, **given)[1:3])


def _check_sides_and_accumulators(gradients: Callable[..., tuple[Tensor | None, Tensor | None]]) -> None:
    """Assert that one side alone has the same bits as with the other side, and that accumulators are added to."""
    dx, dy = gradients()
    assert dx is not None and dy is not None
    for alone, (only_x, only_y) in ((dx, gradients(need_dy=False)), (dy, gradients(need_dx=False)[::-1])):
        assert only_x is not None and torch.equal(only_x, alone) and only_y is None
    held = [torch.linspace(-1, 1, side.numel(), device=dx.device).view(side.shape) for side in (dx, dy)]
    totals = [before.clone() for before in held]
    with poisoned_allocations():
        returned = gradients(add_to=tuple(totals))
    for total, got, before, side in zip(totals, returned, held, (dx, dy), strict=True):
        assert got is total
        assert_close(total, before.double() + side, TILE_SUM, "a total")


def check_sigmoid_case(implementation: Implementation, case: TileCase, device: str, bias: float) -> None:
    """Assert that `tile_sigmoid` equals the float64 reference within the tolerances."""
    x, y = features_of(case, device)
    given: dict[str, Any] = {"diagonal": case.diagonal, "ids": ids_of(case, device)}
    wanted_results = reference.tile_sigmoid(_as_multiplied(x, case), _as_multiplied(y, case), case.scale, bias, **given)
    with poisoned_allocations():
        got = tiles.tile_sigmoid(x, y, case.scale, bias, options=_options(case, implementation), **given)
    for name, result, wanted in zip(wanted_results._fields, got, wanted_results, strict=True):
        assert result.dtype == torch.float32
        if wanted.norm() == 0:
            assert result.norm() == 0, f"{name} is not zero"
        else:
            assert_close(result, wanted, _gradient_bound(case, device), name)


def check_converged_training(implementation: Implementation, batch: int, device: str) -> None:
    """Check that the bfloat16 gradient is within 1e-2 of float64 where all positives have a probability above 0.999.

    The gradient is then a thousandth of the size of a positive's own term. It stays accurate because the positives are
    left out of the tiles, and `1 - p` is computed from the sum of the negatives.
    """
    options = TileOptions(implementation=implementation)
    alpha = math.log(batch * 2000.0)
    x = random_features(batch, 512, 1, device)
    y = F.normalize(x + 0.003 * random_features(batch, 512, 2, device), dim=1)
    x, y = x.bfloat16(), y.bfloat16()
    row_lse, col_lse = tiles.tile_stats(x, y, alpha, alpha, diagonal=0, options=options)
    positive = alpha * (x.float() * y.float()).sum(1)
    row_full, col_full = torch.logaddexp(row_lse, positive), torch.logaddexp(col_lse, positive)
    assert torch.exp(positive - row_full).min() > 0.999
    weight = alpha / (2 * batch)
    row, col = Terms(alpha, row_full, weight), Terms(alpha, col_full, weight)
    dx, dy, _, _ = tiles.tile_grads(x, y, row, col, diagonal=0, options=options)
    missing = weight * (torch.exp(row_lse - row_full) + torch.exp(col_lse - col_full))[:, None]
    expected = reference.info_nce(x, y, alpha)
    assert_close(dx - missing * y, expected.d_image, CONVERGED, "d_image")
    assert_close(dy - missing * x, expected.d_text, CONVERGED, "d_text")


def check_row_operations(module: Any, dtype: torch.dtype, device: str, gradient_bound: Bound | None = None) -> None:
    """Assert that the functions of `module`, `megaclip.ops.rows` or its kernels, equal float64 within bounds."""
    gradient_bound = gradient_bound or GRADIENT[dtype]
    for count, embedding, layout in (
        (1, 16, "contiguous"),
        (63, 70, "offset"),
        (7, 1152, "strided"),
        (9, 2048, "transposed"),
    ):
        x, y = (_laid_out(random_features(count, embedding, seed, device).to(dtype), layout) for seed in (1, 2))
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        total = random_features(count, embedding, 3, device).to(sums)
        pull = torch.linspace(0, 1, count, dtype=sums, device=device)
        factor = torch.tensor(3.5, dtype=sums, device=device)
        with poisoned_allocations():
            products = module.paired_products(x, y)
            gradient, dots = module.finish_gradient(total, x, y, pull, factor)
            both = module.finish_gradients(total, total.flip(0), x, y, pull, factor)
            twice = module.finish_gradients(total, total.flip(0), x, y, pull, factor / 2, torch.full_like(factor, 2.0))
            source = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
            sums_elsewhere = (total[source], total.flip(0)[source], x, y, pull[source], factor)
            placed = module.finish_gradients(*sums_elsewhere, places=source.argsort())
        assert all(map(torch.equal, twice, both))  # multiplication by a power of two is exact
        assert all(map(torch.equal, placed, both))
        assert torch.equal(both[0], gradient) and torch.equal(both[2], dots)
        assert torch.equal(both[1], module.finish_gradient(total.flip(0), y, x, pull, factor)[0])
        expected = total.double() - pull.double()[:, None] * y.double()
        assert products.dtype == dots.dtype == sums and gradient.dtype == dtype
        assert_close(products, (x.double() * y.double()).sum(1), ROWS[sums], "paired_products")
        assert_close(dots, (x.double() * expected).sum(1), ROWS[sums], "dots")
        assert_close(gradient, 3.5 * expected, gradient_bound, "gradient")


def check_softmax_pairs(module: Any, dtype: torch.dtype, device: str) -> None:
    """Check that `module.softmax_pairs` equals float64 for positives far below, near and far above the negatives."""
    for count, embedding, layout in ((1, 16, "contiguous"), (63, 70, "offset"), (7, 1152, "strided")):
        x, y = (_laid_out(random_features(count, embedding, seed, device).to(dtype), layout) for seed in (1, 2))
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        scale = torch.tensor(9.0, dtype=sums, device=device)
        z = scale.double() * (x.double() * y.double()).sum(1)
        gaps = torch.stack([torch.linspace(start, -start, count, dtype=torch.float64) for start in (-40, 60)]).to(
            device
        )
        row_lse, col_lse = (z + gaps).to(sums)
        with poisoned_allocations():
            losses, full, pull = module.softmax_pairs(x, y, row_lse, col_lse, scale, 0.25)
        gaps = torch.stack((row_lse, col_lse)).double() - z  # includes the rounding of the log-sum-exps
        expected = -F.logsigmoid(-gaps)
        assert losses.dtype == full.dtype == pull.dtype == sums
        assert pull.storage_offset() == 0  # compiled code assumes that an operation's result is aligned
        for got, wanted, name in (
            (losses, 0.25 * expected.sum(0), "losses"),
            (full, z + expected, "full"),
            (pull, 0.25 * torch.sigmoid(gaps).sum(0), "pull"),
        ):
            # each value relative to its own size
            assert_close(got / wanted, torch.ones_like(wanted), VALUE[sums], name)


def check_distillation_loss(implementation: Implementation, case: TileCase, device: str) -> None:
    """Check loss and gradients of m samples against autograd in float64. The teacher has 1.5 times the embedding."""
    sizes = (case.embedding, case.embedding, case.embedding * 3 // 2, case.embedding * 3 // 2)
    features = [random_features(case.m, size, seed, device).to(case.dtype) for seed, size in enumerate(sizes)]
    results = []
    for dtype in (case.dtype, torch.float64):
        x, y, u, v = (each.to(dtype, copy=True) for each in features)
        scale = torch.full((1,), case.scale, dtype=torch.promote_types(dtype, torch.float32), device=device)
        inputs = [each.requires_grad_() for each in (x, y, scale)]
        if dtype == case.dtype:
            with poisoned_allocations():
                options = {"implementation": implementation, "tile_budget_mib": case.budget_mib}
                loss = DistillationLoss(**options)(*inputs, u, v, 40.0)
                results.append([loss, *torch.autograd.grad(loss, inputs)])
        else:
            s, t = scale * x @ y.T, 40.0 * u @ v.T
            each = (F.kl_div(s.log_softmax(d), t.log_softmax(d), log_target=True, reduction="sum") for d in (0, 1))
            loss = sum(each) / (2 * case.m)
            results.append([loss, *torch.autograd.grad(loss, inputs)])
    for got, wanted, name in zip(*results, ("loss", "dx", "dy", "dscale"), strict=True):
        assert_close(got, wanted, _gradient_bound(case, device), name)  # the value is a sum of gradients too


# Small enough for the interpreter.
DISTILLATION_CASES = [
    TileCase(1, 1, 16, dtype=torch.float32),
    TileCase(63, 63, 16, dtype=torch.float32, scale=100.0),
    TileCase(70, 70, 17),
    TileCase(70, 70, 24, dtype=torch.float16, budget_mib=0.02),
]

# One side at a time, and non-zero accumulators, with one block and with several blocks.
SIDES_CASES = [
    TileCase(33, 40, 24),
    TileCase(65, 70, 16, budget_mib=0.01, diagonal=20, dtype=torch.float32),
]

# Small enough for Triton's interpreter, which uses tiles of 32 x 64.
SMALL_CASES = [
    TileCase(1, 1, 16, diagonal=None, dtype=torch.float32),
    TileCase(1, 70, 16),
    TileCase(1, 1, 16),  # the only entry is the diagonal, which is left out
    TileCase(63, 70, 16),
    TileCase(70, 63, 17, diagonal=-20),
    TileCase(33, 65, 384, diagonal=40),
    TileCase(65, 33, 640, diagonal=None, layout="offset"),
    TileCase(40, 70, 1152, dtype=torch.float16, layout="strided"),
    TileCase(40, 40, 2048, scale=100.0),
    TileCase(70, 63, 48, dtype=torch.float16, scale=100.0),
    TileCase(70, 63, 48, dtype=torch.float32),
    TileCase(70, 63, 50, dtype=torch.float32, layout="transposed"),
    TileCase(70, 63, 48, dtype=torch.float32, precision="tf32", diagonal=10**6),
    TileCase(70, 63, 48, dtype=torch.float32, precision="bf16", layout="offset"),
    TileCase(70, 63, 48, precision="float32", diagonal=-(10**6)),
    TileCase(70, 63, 48, dtype=torch.float32, scale=1000.0),
    TileCase(70, 130, 48, scale=1000.0),
    TileCase(130, 70, 48, vectors="extreme"),
    TileCase(130, 70, 48, vectors="extreme", scale=100.0),
    TileCase(130, 70, 48, vectors="extreme", scale=1000.0, dtype=torch.float32),
    TileCase(130, 70, 48, per_sample_scales=True),
    TileCase(70, 130, 48, per_sample_scales=True, scale=100.0, dtype=torch.float32, precision="tf32"),
    TileCase(200, 300, 16, budget_mib=0.02),
    TileCase(200, 300, 16, budget_mib=0.05, diagonal=150, dtype=torch.float32),
    TileCase(200, 300, 16, budget_mib=0.03, diagonal=-70, layout="offset", dtype=torch.float16),
    *(
        ID_CASES := [
            TileCase(130, 70, 48, id_values=901),
            TileCase(70, 130, 16, budget_mib=0.02, diagonal=9, dtype=torch.float32, id_values=20),
            TileCase(1, 1, 16, diagonal=None, id_values=1),
            TileCase(70, 130, 48, scale=1000.0, id_values=3),
            TileCase(130, 70, 48, per_sample_scales=True, id_values=50),
        ]
    ),
]
