"""Compare the Triton kernels, compiled for the GPU, with the float64 reference.

The cases are those of the interpreter, and larger sizes that are too slow for the interpreter.
"""

import pytest
import torch

from megaclip.ops import rows, tiles, tiles_triton_blocks
from megaclip.ops.types import Terms, TileOptions
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
    features_of,
)

pytestmark = pytest.mark.gpu

LARGE_CASES = [
    *(TileCase(1000, 777, embedding) for embedding in (16, 384, 512, 640, 768, 1152, 2048)),
    TileCase(1000, 777, 70, layout="offset"),
    TileCase(1000, 777, 512, scale=100.0, dtype=torch.float16),
    TileCase(1000, 777, 512, scale=1000.0, diagonal=-100),
    TileCase(1000, 777, 512, scale=100.0, vectors="extreme"),
    TileCase(1000, 777, 512, per_sample_scales=True, layout="transposed"),
    TileCase(1000, 777, 512, dtype=torch.float32),
    TileCase(1000, 777, 512, dtype=torch.float32, scale=1000.0, layout="strided"),
    TileCase(1000, 777, 512, dtype=torch.float32, precision="tf32"),
    TileCase(1000, 777, 512, dtype=torch.float32, precision="bf16", budget_mib=1),
    TileCase(3000, 5000, 768, budget_mib=4, diagonal=1000),
    TileCase(4096, 32768, 512, scale=14.3, diagonal=8192),
    TileCase(32768, 63, 512),
]


@pytest.fixture(scope="module", autouse=True)
def cuda_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("case", [*SMALL_CASES, *LARGE_CASES], ids=str)
def test_statistics_and_gradients(case: TileCase) -> None:
    check_tile_case("triton", case, "cuda")


@pytest.mark.parametrize("bias", [-10.0, 0.0, 5.0])
@pytest.mark.parametrize("case", [c for c in [*SMALL_CASES, *LARGE_CASES] if not c.per_sample_scales], ids=str)
def test_sigmoid(case: TileCase, bias: float) -> None:
    check_sigmoid_case("triton", case, "cuda", bias)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the tiles of smaller GPUs, and pointers as on GPUs without a copy engine."""
    monkeypatch.setattr(tiles_triton_blocks, "tiles_of", lambda device: (tiles_triton_blocks.SMALL_TILES, True))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [*SMALL_CASES[::3], *LARGE_CASES], ids=str)
def test_statistics_and_gradients_of_smaller_gpus(case: TileCase) -> None:
    check_tile_case("triton", case, "cuda")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [c for c in LARGE_CASES if not c.per_sample_scales], ids=str)
def test_sigmoid_of_smaller_gpus(case: TileCase) -> None:
    check_sigmoid_case("triton", case, "cuda", -10.0)


@pytest.mark.parametrize("case", [*SIDES_CASES, TileCase(3000, 5000, 768, budget_mib=4)], ids=str)
def test_sides_and_accumulators(case: TileCase) -> None:
    check_sides_and_accumulators("triton", case, "cuda")


@pytest.mark.parametrize("batch", [63, 1000, 4096])
def test_converged_training(batch: int) -> None:
    check_converged_training("triton", batch, "cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_operations(dtype: torch.dtype) -> None:
    check_row_operations(rows, dtype, "cuda")
    check_softmax_pairs(rows, dtype, "cuda")


@pytest.mark.parametrize(
    "case",
    [
        *DISTILLATION_CASES,
        TileCase(1000, 1000, 70, dtype=torch.float32, scale=100.0),
        TileCase(4096, 4096, 512),
        TileCase(2049, 2049, 512, dtype=torch.float16, budget_mib=8),
    ],
    ids=str,
)
def test_distillation(case: TileCase) -> None:
    check_distillation_loss("triton", case, "cuda")


def test_two_runs_give_the_same_bits() -> None:
    x, y = features_of(TileCase(3000, 5000, 512), "cuda")
    options = TileOptions(implementation="triton", tile_budget_mib=8)

    def run() -> list[torch.Tensor]:
        stats = tiles.tile_stats(x, y, 20.0, 20.0, diagonal=0, options=options)
        grads = tiles.tile_grads(x, y, Terms(20.0, 5.0, 1e-3), Terms(20.0, 6.0, 1e-3), diagonal=0, options=options)
        sigmoid = tiles.tile_sigmoid(x, y, 20.0, -10.0, diagonal=0, options=options)
        return [*stats, *grads, *sigmoid]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("batch", [8192, 32768, 65536])
def test_memory_does_not_grow_with_the_batch(batch: int) -> None:
    x, y = features_of(TileCase(batch, batch, 256), "cuda")
    gradients_mib = 2 * batch * 256 * 4 / 2**20
    # Vectors with one value per sample, and the library's workspace.
    allowed_mib = 64 + 40 + gradients_mib
    options, terms = TileOptions(implementation="triton", tile_budget_mib=64), Terms(20.0, 5.0, 1.0)
    for run in (
        lambda: tiles.tile_stats(x, y, 20.0, 20.0, diagonal=0, options=options),
        lambda: tiles.tile_grads(x, y, terms, terms, diagonal=0, options=options),
        lambda: tiles.tile_sigmoid(x, y, 20.0, -10.0, diagonal=0, options=options),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        assert peak_mib <= allowed_mib
