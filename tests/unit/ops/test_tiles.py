"""Compare the PyTorch tiles with the float64 reference: odd sizes, all diagonals, extreme scales, tiny tiles."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.errors import ConfigError
from megaclip.ops import rows, tiles, tiles_torch
from megaclip.ops.types import Terms, TileOptions
from tests import reference
from tests.tile_cases import (
    ID_CASES,
    SIDES_CASES,
    TileCase,
    check_sides_and_accumulators,
    check_sigmoid_case,
    check_tile_case,
)
from tests.tolerances import GRADIENT, VALUE, assert_close, assert_far

SIZES = [(1, 1), (1, 70), (63, 1), (63, 70), (70, 63), (5, 1000)]
TINY_MIB = 0.002  # tiles of 13 x 13 float32 statistics: many tiles, incomplete at every edge
BF16 = TileOptions(precision="bf16")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def features(count: int, embedding: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, embedding, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def values(count: int, low: float, high: float, seed: int) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_stats(x: Tensor, y: Tensor, row_scale: Any, col_scale: Any, **options: Any) -> None:
    got = tiles.tile_stats(x, y, row_scale, col_scale, **options)
    expected = reference.tile_stats(x, y, row_scale, col_scale, diagonal=options.get("diagonal"))
    for result, wanted in zip(got, expected, strict=True):
        assert result.dtype == tiles.accumulation_dtype(x)
        assert torch.equal(result == -torch.inf, wanted == -torch.inf)
        assert_close(result, wanted, VALUE[x.dtype])


def assert_grads(x: Tensor, y: Tensor, row: Terms, col: Terms, magnified: float = 1, **options: Any) -> None:
    got = tiles.tile_grads(x, y, row, col, **options)
    expected = reference.tile_grads(x, y, row, col, diagonal=options.get("diagonal"))
    bound = GRADIENT[torch.float64 if x.dtype == torch.float64 else torch.float32]
    for result, wanted in zip(got, expected, strict=True):
        assert result is not None and result.dtype == tiles.accumulation_dtype(x)
        assert_close(result, wanted, bound.magnified(magnified))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_every_size_diagonal_and_budget(m: int, n: int, dtype: torch.dtype) -> None:
    x, y = features(m, 33, dtype, 0), features(n, 33, dtype, 1)
    row = Terms(*(values(m, *span, seed) for seed, span in enumerate(((1, 20), (0, 5), (0.1, 2)))))
    col = Terms(*(values(n, *span, seed) for seed, span in enumerate(((-3, 15), (0, 4), (-1, 1)), start=3)))
    for diagonal, budget in itertools.product((None, 0, 7, -5, m - 1, 1 - n, 10**6, -(10**6)), (128, TINY_MIB)):
        options = TileOptions(tile_budget_mib=budget)
        assert_stats(x, y, row.scale, col.scale, diagonal=diagonal, options=options)
        assert_grads(x, y, row, col, diagonal=diagonal, options=options)


@pytest.mark.parametrize("case", ID_CASES, ids=str)
def test_equal_ids_are_left_out(case: TileCase) -> None:
    check_tile_case("torch", case, "cpu")
    if not case.per_sample_scales:
        check_sigmoid_case("torch", case, "cpu", -1.0)


def test_sigmoid_of_large_logits() -> None:
    """Logits of -60 to 60: softplus is not replaced by its argument where float64 still has their difference."""
    x, y = features(63, 16, torch.float64, 0), features(70, 16, torch.float64, 1)
    got = tiles.tile_sigmoid(x, y, 60.0, 1.0, diagonal=3, options=TileOptions(tile_budget_mib=TINY_MIB))
    expected = reference.tile_sigmoid(x, y, 60.0, 1.0, diagonal=3)
    for result, wanted in zip(got, expected, strict=True):
        assert_close(result, wanted, VALUE[torch.float64])


@pytest.mark.parametrize("scale", [100.0, 1000.0])
@pytest.mark.parametrize("kind", ["random", "identical", "opposite", "zero"])
def test_extreme_scales_and_vectors(kind: str, scale: float) -> None:
    """Nothing overflows or underflows, although rows and columns of one tile have maxima that differ by 1000."""
    x, y = features(63, 16, torch.float64, 0), features(70, 16, torch.float64, 1)
    if kind != "random":
        x = x[:1].expand_as(x)
        y = {"identical": 1.0, "opposite": -1.0, "zero": 0.0}[kind] * x[:1].expand(70, 16)
    for dtype in (torch.float64, torch.float32):
        a, b = x.to(dtype), y.to(dtype)
        assert_stats(a, b, scale, scale, diagonal=0, options=TileOptions(tile_budget_mib=TINY_MIB))
        row_lse, col_lse = reference.tile_stats(a, b, scale, scale, diagonal=0)
        # exp(scale*s - shift) magnifies the roundings of scale*s
        row, col = Terms(scale, row_lse, 1.0), Terms(scale, col_lse, 1.0)
        assert_grads(a, b, row, col, diagonal=0, magnified=scale / 100)


def test_numbers_vectors_and_tensors_with_one_element_give_equal_results() -> None:
    x, y = features(6, 5, torch.float32, 0), features(4, 5, torch.float32, 1)
    row, col = Terms(3.0, 0.5, 2.0), Terms(4.0, 0.25, 1.5)
    plain = tiles.tile_grads(x, y, row, col)
    for make in (torch.tensor, lambda value: torch.tensor([value]), lambda value: torch.tensor(value).double()):
        made = tiles.tile_grads(x, y, Terms(*map(make, row)), Terms(*map(make, col)))
        for got, expected in zip(made, plain, strict=True):
            assert torch.equal(got, expected)
    row, col = row._replace(scale=torch.full((6,), 3.0)), col._replace(scale=torch.full((4,), 4.0))
    for got, expected in zip(tiles.tile_grads(x, y, row, col), plain, strict=True):
        assert torch.equal(got, expected)


def test_sides_and_dots_that_are_not_requested() -> None:
    x, y = features(6, 5, torch.float32, 0), features(4, 5, torch.float32, 1)
    terms = Terms(3.0, 0.5, 2.0), Terms(4.0, 0.25, 1.5)
    dx, _, row_dot, col_dot = tiles.tile_grads(x, y, *terms, diagonal=1)
    rows = tiles.tile_grads(x, y, *terms, diagonal=1, need_dy=False)
    columns = tiles.tile_grads(x, y, *terms, diagonal=1, need_dx=False)
    assert torch.equal(rows[2], row_dot) and torch.equal(columns[3], col_dot)
    for case in SIDES_CASES:
        check_sides_and_accumulators("torch", case, "cpu")
    bare = tiles.tile_grads(x, y, *terms, diagonal=1, need_dots=False)
    assert torch.equal(bare[0], dx) and bare[2] is None and bare[3] is None
    assert_close((x * dx).sum(), row_dot.sum() + col_dot.sum(), GRADIENT[torch.float32])


def test_a_direction_can_be_left_out() -> None:
    x, y = features(6, 5, torch.float64, 0), features(4, 5, torch.float64, 1)
    assert_grads(x, y, Terms(5.0, 1.0, 0.7), Terms(0.0, 0.0, 0.0))
    assert_grads(x, y, Terms(0.0, 0.0, 0.0), Terms(5.0, 1.0, 0.7), diagonal=2)


def test_precision_bf16_rounds_float32_features() -> None:
    x, y = features(63, 16, torch.float32, 0), features(70, 16, torch.float32, 1)
    expected = reference.tile_stats(x.bfloat16(), y.bfloat16(), 10.0, 10.0)
    for got, wanted in zip(tiles.tile_stats(x, y, 10.0, 10.0, options=BF16), expected, strict=True):
        assert_close(got, wanted, VALUE[torch.float32])
    exact = tiles.tile_stats(x, y, 10.0, 10.0)[0]
    assert_far(exact, expected[0], VALUE[torch.float32], "features that are not rounded to bfloat16")


def test_nothing_is_recorded_for_autograd_and_autocast_is_ignored() -> None:
    x = features(6, 5, torch.float32, 0).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        row_lse, _ = tiles.tile_stats(x, x, 10.0, 10.0, diagonal=0)
        dx, _, _, _ = tiles.tile_grads(x, x, Terms(10.0, row_lse, 1.0), Terms(10.0, row_lse, 1.0), diagonal=0)
    assert dx is not None and not row_lse.requires_grad and not dx.requires_grad
    assert_close(row_lse, reference.tile_stats(x.detach(), x.detach(), 10.0, 10.0, diagonal=0)[0], VALUE[torch.float32])


@pytest.mark.parametrize("setting", ["medium", "high", "tf32", "none"])
def test_the_precision_of_products_is_restored(setting: str) -> None:
    matmul, x = torch.backends.cuda.matmul, features(3, 4, torch.float32, 0)
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("requires torch 2.9")
    try:
        if setting in ("medium", "high"):
            torch.set_float32_matmul_precision(setting)
        else:
            matmul.fp32_precision = setting
        before = matmul.fp32_precision
        tiles.tile_stats(x, x, 1.0, 1.0)
        assert matmul.fp32_precision == before
        assert setting not in ("medium", "high") or torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("budget_mib", [0.001, 0.01, 1])
def test_tiles_cover_everything_once_and_stay_within_the_budget(budget_mib: float) -> None:
    side = tiles_torch.tile_side(budget_mib, 4, torch.float32)
    for m, n in ((1, 1), (1000, 3), (3, 1000), (333, 777), (0, 5)):
        counts = torch.zeros(m, n)
        for down, across in tiles_torch.tiles(m, n, side):
            counts[down, across] += 1
            assert (down.stop - down.start) * (across.stop - across.start) * 4 * 4 <= budget_mib * 2**20
        assert (counts == 1).all()


X, Y, INTEGERS, IDS = torch.zeros(3, 5), torch.zeros(4, 5), torch.zeros(3, 5, dtype=torch.int64), torch.arange(3)
stats, grads, sigmoid = tiles.tile_stats, tiles.tile_grads, tiles.tile_sigmoid
ONE = Terms(1.0, 0.0, 1.0)
TRITON = TileOptions(implementation="triton")
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: stats(X, torch.zeros(4, 6), 1.0, 1.0), r"\(3, 5\) and \(4, 6\); expected \(m, D\) and \(n, D\)"),
    (lambda: stats(torch.zeros(5), Y, 1.0, 1.0), r"shapes \(5,\) and \(4, 5\); expected"),
    (lambda: stats(X, Y.double(), 1.0, 1.0), "x is torch.float32 on cpu and y is torch.float64 on cpu; expec"),
    (lambda: stats(X, Y, torch.ones(4), 1.0), r"row_scale has shape \(4,\); expected a number or shape \(3,\)"),
    (lambda: stats(X, Y, 1.0, torch.ones(4, 1)), r"col_scale has shape \(4, 1\); expected a number or shape"),
    (lambda: grads(X, Y, ONE, Terms(1.0, 0.0, torch.ones(3))), r"col\.weight has shape \(3,\); expected a num"),
    (lambda: sigmoid(X, Y, 1.0, 0.0, ids=(IDS, IDS)), r"ids are \(3,\) torch\.int64 on cpu; expected \(4,\)"),
    (lambda: sigmoid(X, X, 1.0, 0.0, ids=(IDS, IDS.float())), r"ids are \(3,\) torch.float32 on cpu; expected"),
    (lambda: stats(X, X, 1.0, 1.0, ids=(IDS, IDS.flip(0))), "ids of the columns do not ascend"),
    (lambda: sigmoid(X, X, 1.0, 0.0, add_to=(torch.zeros(3, 4), None)), r"\(3, 4\) of .* expected \(3, 5\) of"),
    (lambda: sigmoid(X, X, 1.0, 0.0, add_to=(X.double(), None)), "an accumulator is .* of torch.float64"),
    (lambda: sigmoid(X, X, 1.0, 0.0, add_to=(torch.zeros(5, 3).T, None)), "expected a contiguous accumulator"),
    (lambda: stats(INTEGERS, INTEGERS, 1.0, 1.0), r"the features are torch\.int64; expected bfloat16"),
    (lambda: stats(X.double(), X.double(), 1.0, 1.0, options=BF16), "precision is 'bf16'; float64 features req"),
    (lambda: TileOptions(precision="fp8"), "precision is 'fp8'; expected one of auto, float32, tf32, bf16"),
    (lambda: TileOptions(implementation="cuda"), "implementation is 'cuda'; expected one of auto, torch, triton"),
    (lambda: TileOptions(tile_budget_mib=0), "tile_budget_mib is 0; expected a number of MiB above 0"),
    (lambda: stats(X, X, 1.0, 1.0, options=TRITON), "implementation is 'triton', but the .*; set it to 'auto'"),
    (lambda: grads(X.double(), X.double(), ONE, ONE, options=TRITON), "'triton', but the .*; set it to 'auto'"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_fit_is_refused(case: int) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((7, 5), None, "the Triton kernels require compute capability 8.0; this GPU has 7.5"),
        ((9, 4), "6.4", "the Triton kernels require an NVIDIA GPU"),
        ((8, 0), None, ""),
    ],
)
def test_gpus_without_kernels_use_pytorch(
    capability: tuple[int, int], hip: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default "auto" must not select the kernels on a T4: they would spill up to 30 KB of registers per thread."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 99)  # the result is cached by device
    tiles.reason_without_kernels.cache_clear()
    try:
        features = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=device)
        expected = ("torch", reason) if reason else ("triton", "torch.float32 features on CUDA")
        assert tiles._automatic(features) == expected
        assert (rows._kernels(features) is None) == bool(reason)
        if reason:
            with pytest.raises(ConfigError, match=rf"implementation is 'triton', but {reason}; set it to 'auto'"):
                tiles.require_implementation("triton", device, torch.float32)
    finally:
        tiles.reason_without_kernels.cache_clear()
