"""Losses of small batches, whose kernels run as CUDA graphs, equal plain losses bit by bit, on one and two ranks.

Most sizes have the same D, because each D compiles kernels of its own, for seconds.
"""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss, SigLipLoss
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.gpu

WAY = {"exchange": "all_gather", "reduction": "feature", "cuda_graphs": True}


def leaves(b: int, embedding: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return features of this rank, logit_scale and logit_bias. In every second step the scale is on the host."""
    generator = torch.Generator().manual_seed(1000 * seed + group_rank())
    x, y = (F.normalize(torch.randn(b, embedding, generator=generator), dim=1).to("cuda", dtype) for _ in range(2))
    scale = torch.tensor([10.0 + seed], device="cpu" if seed % 2 else "cuda")
    return [tensor.requires_grad_() for tensor in (x, y, scale, torch.tensor(-9.0, device="cuda"))]


def results(loss: ClipLoss | SigLipLoss, arguments: list[Tensor]) -> list[Tensor]:
    value = loss(*arguments)
    return [value.detach(), *torch.autograd.grad(3 * value, arguments)]


def recordings(loss: ClipLoss | SigLipLoss) -> int:
    return len(loss._recordings._recordings)


def check_sizes(kind: type, b: int, embedding: int, dtype: torch.dtype, reduction: str) -> None:
    way = {"exchange": "all_gather", "reduction": reduction}
    plain, loss = kind(cuda_graphs=False, **way), kind(cuda_graphs=True, **way)
    compiled = torch.compile(kind(cuda_graphs=True, **way), fullgraph=True)
    for step in range(5):
        arguments = leaves(b, embedding, dtype, step)
        expected = results(plain, arguments)
        for name, found in (("eager", results(loss, arguments)), ("compiled", results(compiled, arguments))):
            for index, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), f"{name} {kind.__name__} {b} {embedding} {dtype}, {step}, {index}"
        assert recordings(loss) == (step >= 2)
    # Two forward passes precede the first backward pass. Values without gradients are computed between them.
    first, second = (leaves(b, embedding, dtype, seed) for seed in (11, 12))
    values = [loss(*first), loss(*second)]
    with torch.no_grad():
        assert torch.equal(loss(*first), values[0])
    for value, arguments in zip(values, (first, second), strict=True):
        found = torch.autograd.grad(3 * value, arguments)
        assert all(map(torch.equal, found, results(plain, arguments)[1:]))
    assert recordings(plain) == 0 and recordings(copy.deepcopy(loss)) == 0


def check_ids(kind: type, meaning: str) -> None:
    """Check that recordings with ids, which change in every step, have the bits of plain losses."""
    plain, loss = (kind(**WAY | {"ids": meaning, "cuda_graphs": graphs}) for graphs in (False, True))
    for step in range(5):
        arguments = leaves(300, 512, torch.bfloat16, step)
        ids = torch.randint(40, (300,), generator=torch.Generator().manual_seed(step)).cuda()
        expected, found = (results(partial(function, ids=ids), arguments) for function in (plain, loss))
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"{kind.__name__} {meaning}, {step}, {index}"
        assert recordings(loss) == (step >= 2)


def check_limits() -> None:
    """Check that at most two recordings are kept, and that a large batch and the ring are not recorded."""
    loss = ClipLoss(**WAY)
    for b in (8, 9, 10):
        for seed in range(4):
            arguments = leaves(b, 512, torch.bfloat16, seed)
            results(loss, arguments)
    assert recordings(loss) == 2
    for settings, b in ((WAY, 20480), ({**WAY, "exchange": "ring"}, 8)):
        loss = ClipLoss(**settings)
        for seed in range(4):
            results(loss, leaves(b, 512, torch.bfloat16, seed))
        assert recordings(loss) == (group_size() == 1 and b == 8)  # one rank has no ring


def check_everything() -> None:
    for kind in (ClipLoss, SigLipLoss):
        for b, embedding, dtype, reduction in (
            (300, 512, torch.bfloat16, "feature"),
            (63, 70, torch.float32, "scalar"),
        ):
            torch._dynamo.reset()
            check_sizes(kind, b, embedding, dtype, reduction)
        for meaning in ("mask", "positive"):
            check_ids(kind, meaning)
    check_limits()
    gc.collect()
    loss = ClipLoss(exchange="all_gather")
    for seed in range(4):
        results(loss, leaves(8, 512, torch.bfloat16, seed))
    assert recordings(loss) == 1  # the default
    loss = ClipLoss(**WAY)
    for seed in range(4):
        results(loss, leaves(64, 512, torch.bfloat16, seed))
    globals()["kept"] = loss  # keeps a recording until the process group has ended


@pytest.mark.parametrize("world_size", [1, 2])
def test_recorded_losses_have_the_bits_of_plain_ones(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, this machine has {torch.cuda.device_count()}")
    run_ranks(check_everything, world_size, backend="nccl")
