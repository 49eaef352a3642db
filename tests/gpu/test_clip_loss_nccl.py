"""Compare ClipLoss over NCCL, one GPU per rank, with the loss and gradients of one process.

tests/distributed tests the arithmetic with gloo. This file tests NCCL's ordering, streams and GPU tensors.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss
from tests import reference
from tests.distributed.harness import run_ranks
from tests.tolerances import NCCL_GRADIENT, NCCL_TEMPERATURE, NCCL_VALUE, assert_close

pytestmark = pytest.mark.gpu


def check(batch: int, embedding: int, dtype: torch.dtype, implementation: str, mode: str | None = None) -> None:
    """Check every exchange and reduction. mode: mode of torch.compile. None: the loss is not compiled."""
    torch._dynamo.reset()
    size, rank, device = group_size(), group_rank(), torch.device("cuda")
    generator = torch.Generator().manual_seed(batch)
    base, noise = torch.randn(2, batch * size, embedding, generator=generator, dtype=torch.float64).to(device)
    whole = [F.normalize(features, dim=1).to(dtype) for features in (base, base + 3 * noise)]
    scale = torch.tensor([20.0], device=device, dtype=torch.promote_types(dtype, torch.float32))
    expected = reference.info_nce(*whole, scale)
    for exchange, reduction in itertools.product(("ring", "all_gather"), ("feature", "scalar")):
        x, y = (features.chunk(size)[rank].clone().requires_grad_() for features in whole)
        alpha = scale.clone().requires_grad_()
        loss_function = ClipLoss(
            exchange=exchange, reduction=reduction, implementation=implementation, tile_budget_mib=8
        )
        if mode is not None:
            loss_function = torch.compile(loss_function, mode=mode, fullgraph=True)
        for _ in range(3):  # consecutive steps that reuse buffers without a pause
            x.grad = y.grad = alpha.grad = None
            loss = loss_function(x, y, alpha)
            loss.backward()
        case = f"{exchange} {reduction} W={size} b={batch} {dtype} {implementation}"
        assert_close(loss, expected.loss, NCCL_VALUE, f"loss {case}")
        assert x.grad is not None and y.grad is not None and alpha.grad is not None
        assert_close(x.grad / size, expected.d_image.chunk(size)[rank], NCCL_GRADIENT[dtype], f"d_image {case}")
        assert_close(y.grad / size, expected.d_text.chunk(size)[rank], NCCL_GRADIENT[dtype], f"d_text {case}")
        # A mean of p_ij * (s_ij - s_ii): terms of size 1, which cancel at the right temperature.
        bound = NCCL_TEMPERATURE[dtype]
        assert_close(alpha.grad.squeeze(), expected.d_logit_scale.squeeze(), bound, f"logit_scale {case}", size=1)


def check_everything() -> None:
    for batch, embedding, dtype in (
        (63, 70, torch.float64),
        (1000, 512, torch.float32),
        (63, 70, torch.bfloat16),
        (4096, 512, torch.bfloat16),
    ):
        for implementation in ("auto", "torch"):
            check(batch, embedding, dtype, implementation)
    for mode in ("default", "reduce-overhead"):
        check(1000, 512, torch.bfloat16, "auto", mode)
    features = torch.randn(4 + (group_rank() == group_size() - 1), 8, device="cuda")
    if group_size() > 1:
        with pytest.raises(ValueError, match="same local batch"):
            ClipLoss()(features, features, torch.tensor(1.0, device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, this machine has {torch.cuda.device_count()}")
    run_ranks(check_everything, world_size, backend="nccl")
