"""Compare ClipLoss over NCCL, one GPU per rank, with the loss and gradients of one process.

tests/distributed checks the arithmetic with gloo. This file checks NCCL's ordering, streams and GPU tensors.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss
from megaclip.ops import reference
from tests.distributed.harness import run_ranks
from tests.tolerances import norm_error

pytestmark = pytest.mark.gpu

# Norm of the difference, relative to the norm of the expected gradient. bfloat16 features have P in bfloat16.
GRADIENT_NORM = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 6e-3}
# Absolute, because the gradient is a mean of p_ij*(s_ij - s_ii): terms of order 1 that cancel near the best scale.
TEMPERATURE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-4}


def check(batch: int, embedding: int, dtype: torch.dtype, implementation: str) -> None:
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
        for _ in range(3):  # consecutive steps without a pause, which reuse buffers
            x.grad = y.grad = alpha.grad = None
            loss = loss_function(x, y, alpha)
            loss.backward()
        case = (exchange, reduction, size, batch, dtype, implementation)
        assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5), case
        assert x.grad is not None and y.grad is not None and alpha.grad is not None
        assert norm_error(x.grad / size, expected.d_image.chunk(size)[rank]) < GRADIENT_NORM[dtype], case
        assert norm_error(y.grad / size, expected.d_text.chunk(size)[rank]) < GRADIENT_NORM[dtype], case
        temperature_error = abs(alpha.grad.item() - expected.d_logit_scale.item())
        assert temperature_error < TEMPERATURE[dtype], (temperature_error, expected.d_logit_scale.item(), case)


def check_everything() -> None:
    for batch, embedding, dtype in (
        (63, 70, torch.float64),
        (1000, 512, torch.float32),
        (63, 70, torch.bfloat16),
        (4096, 512, torch.bfloat16),
    ):
        for implementation in ("auto", "torch"):
            check(batch, embedding, dtype, implementation)
    features = torch.randn(4 + (group_rank() == group_size() - 1), 8, device="cuda")
    if group_size() > 1:
        with pytest.raises(ValueError, match="same local batch"):
            ClipLoss()(features, features, torch.tensor(1.0, device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, this machine has {torch.cuda.device_count()}")
    run_ranks(check_everything, world_size, backend="nccl")
