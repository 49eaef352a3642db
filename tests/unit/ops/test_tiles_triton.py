"""Run the Triton kernels in Triton's interpreter, on the CPU, and compare them with the float64 reference.

Triton selects the interpreter when it is imported, for the whole process. So this file runs pytest on itself in a
second process with TRITON_INTERPRET=1. The cases below exist in that process only.
"""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tile_cases import (
    DISTILLATION_CASES,
    SIDES_CASES,
    SMALL_CASES,
    TileCase,
    check_converged_training,
    check_distillation_loss,
    check_row_operations,
    check_sides_and_accumulators,
    check_sigmoid_case,
    check_softmax_pairs,
    check_tile_case,
)
from tests.tolerances import GRADIENT, GRADIENT_TRUNCATED, TILE_GRADIENT, VALUE, assert_close

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_under_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"}
        root = Path(__file__).parents[3]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    from megaclip.ops import rows_triton, tiles, tiles_triton_blocks
    from megaclip.ops.types import Terms, TileOptions
    from tests import reference

    TRITON = TileOptions(implementation="triton")

    def cut(case: TileCase) -> TileCase:
        """Return a case of at most three by two of the interpreter's tiles. Large cases have three by three tiles."""
        size = {"m": min(case.m, 66), "n": min(case.n, 130 if case.m == 200 else 70)}
        return replace(case, **size, diagonal=case.diagonal and case.diagonal * 66 // max(case.m, 66))

    # GPUs run the cases with large embeddings and with more scales, and all cases at full size (tests/gpu).
    SMALL = [case for case in SMALL_CASES if case.embedding < 100 and case.scale != 100]
    CASES = [cut(case) for case in SMALL if case.scale == 10 or not case.id_values]
    UNIFORM = [case for case in CASES if not case.per_sample_scales and case.n < 130]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_statistics_and_gradients(case: TileCase) -> None:
        check_tile_case("triton", case, "cpu")

    @pytest.mark.parametrize(("case", "bias"), zip(UNIFORM[2::3], itertools.cycle((-10.0, 0.0, 5.0))), ids=str)
    def test_sigmoid(case: TileCase, bias: float) -> None:
        check_sigmoid_case("triton", case, "cpu", bias)

    @pytest.fixture
    def pointers(monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the kernels pointers instead of tensor descriptors, as on GPUs without a copy engine."""
        tiles_of, _ = tiles_triton_blocks.tiles_of(torch.device("cpu"))
        monkeypatch.setattr(tiles_triton_blocks, "tiles_of", lambda device: (tiles_of, True))

    @pytest.mark.usefixtures("pointers")
    @pytest.mark.parametrize("case", CASES[2::4], ids=str)
    def test_statistics_and_gradients_by_pointers(case: TileCase) -> None:
        check_tile_case("triton", case, "cpu")

    @pytest.mark.usefixtures("pointers")
    @pytest.mark.parametrize("case", UNIFORM[::6], ids=str)
    def test_sigmoid_by_pointers(case: TileCase) -> None:
        check_sigmoid_case("triton", case, "cpu", -2.0)

    @pytest.mark.parametrize("case", [replace(case, m=33, n=min(case.n, 66)) for case in SIDES_CASES], ids=str)
    def test_sides_and_accumulators(case: TileCase) -> None:
        check_sides_and_accumulators("triton", case, "cpu")

    def test_converged_training() -> None:
        check_converged_training("triton", 70, "cpu")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_row_operations(dtype: torch.dtype) -> None:
        bound = GRADIENT_TRUNCATED if dtype == torch.bfloat16 else GRADIENT[dtype]
        check_row_operations(rows_triton, dtype, "cpu", bound)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_softmax_pairs(dtype: torch.dtype) -> None:
        check_softmax_pairs(rows_triton, dtype, "cpu")

    @pytest.mark.parametrize("case", DISTILLATION_CASES, ids=str)
    def test_distillation(case: TileCase) -> None:
        check_distillation_loss("triton", case, "cpu")

    def test_dots_that_are_not_requested() -> None:
        x, y = torch.randn(33, 24), torch.randn(40, 24)
        terms = Terms(1.0, 5.0, 0.5), Terms(1.0, 4.0, 0.25)
        dx, dy, row_dot, col_dot = tiles.tile_grads(x, y, *terms, options=TRITON)
        bare = tiles.tile_grads(x, y, *terms, need_dots=False, options=TRITON)
        assert torch.equal(bare[0], dx) and torch.equal(bare[1], dy) and bare[2:] == (None, None)
        # The sum of both dots is the gradient of the temperature, which can also be computed from dx.
        assert_close((x * dx).sum(), row_dot.sum() + col_dot.sum(), VALUE[torch.float32])

    @pytest.mark.parametrize("sign", [1, -1])
    def test_shifts_far_from_a_tiles_logits(sign: int) -> None:
        """exp(shift) and exp(-shift) are outside the range of float32. exp(scale * s - shift) is inside."""
        x, y = torch.zeros(33, 16), torch.zeros(40, 16)
        x[:, 0], x[:, 1], y[:, 0] = 0.5 * sign, 0.75**0.5, 1.0  # s = sign / 2
        terms = Terms(100.0, 100.0 * sign, 0.5)
        got = tiles.tile_grads(x, y, terms, terms, options=TRITON)
        for ours, wanted in zip(got, reference.tile_grads(x, y, terms, terms), strict=True):
            assert_close(ours, wanted, TILE_GRADIENT["float32"].magnified(5))  # the scale is 100, not 20

    def test_no_rows() -> None:
        x, y = torch.randn(0, 24), torch.randn(40, 24)
        row_lse, col_lse = tiles.tile_stats(x, y, 1.0, 1.0, options=TRITON)
        assert row_lse.shape == (0,) and torch.equal(col_lse, torch.full((40,), -torch.inf))
        terms = Terms(1.0, 0.0, 1.0)
        dx, dy, _, col_dot = tiles.tile_grads(x, y, terms, terms, options=TRITON)
        assert dx.shape == (0, 24) and not dy.any() and not col_dot.any()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(("rows", "cols"), [(1000, 1000), (8192, 8192), (100_000, 3000), (60_000, 60_000)])
    def test_buffers_stay_within_the_budget(rows: int, cols: int, dtype: torch.dtype) -> None:
        """Cut the blocks without launching a kernel. Only P and staged features grow with the size of a block."""
        x, y = torch.zeros(1, 64, dtype=dtype).expand(rows, 64), torch.zeros(1, 64, dtype=dtype).expand(cols, 64)
        tiling = tiles_triton_blocks.Tiling(x, y, "grads", 0, None, TileOptions("bf16", tile_budget_mib=16))
        area = 0
        for block in tiling.blocks(2, keeps_tile=True):
            staged = sum(side.kernel.untyped_storage().nbytes() for side in (block.x, block.y))
            assert block.p.untyped_storage().nbytes() + staged <= 16 * 2**20
            area += block.m * block.n
        assert area == rows * cols
