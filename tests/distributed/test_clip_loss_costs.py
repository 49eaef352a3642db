"""Costs of the losses: memory of one tile, and each tile computed once. test_volume.py tests the traffic."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megaclip.comm.groups import group_size
from megaclip.losses import LOSSES
from megaclip.losses.costs import LOSS_COSTS
from tests.distributed.harness import run_ranks

WAYS = list(itertools.product(("ring", "all_gather"), ("feature", "scalar")))


def two_phases(
    batch: int, embedding: int, kind: str = "clip", **options: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the functions forward and backward of a loss on random local features (batch, embedding)."""
    x, y = torch.randn(2, batch, embedding).unbind()
    x.requires_grad_()
    y.requires_grad_()
    losses: list[Tensor] = []
    loss = LOSSES[kind](**options)
    return (lambda: losses.append(loss(x, y, torch.tensor(2.0)))), (lambda: losses[0].backward())


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return result


def check_memory() -> None:
    """Check that no tensor of a step exceeds the tile budget. b x b and b x B exceed it many times."""
    batch, budget_mib = 200, 0.05
    budget = int(budget_mib * 2**20 / 4)
    assert budget < batch * batch / 2
    for exchange, reduction in WAYS:
        options = {"exchange": exchange, "reduction": reduction, "tile_budget_mib": budget_mib}
        with LargestTensor() as largest:
            for run in two_phases(batch, 4, **options):
                run()
        assert budget / 8 < largest.elements <= budget, f"{largest.elements} elements with {options}"


def check_products() -> None:
    """Check the products of a step, in units of b*B*D multiplications and additions, all of them in the forward pass.

    In the ring with the reduction "scalar" a rank's own block serves both sides, which saves 2 of its b*b*D.
    """
    batch, embedding, size = 12, 8, group_size()
    for kind, (exchange, reduction) in itertools.product(("clip", "siglip"), WAYS):
        expected = LOSS_COSTS[kind].products[reduction] * batch * batch * size * embedding
        if (exchange, reduction) == ("ring", "scalar"):
            expected -= 2 * batch * batch * embedding
        forward, backward = two_phases(batch, embedding, kind, exchange=exchange, reduction=reduction)
        for run, flops in ((forward, expected), (backward, 0)):
            with FlopCounterMode(display=False) as counter:
                run()
            assert counter.get_total_flops() == flops, (kind, exchange, reduction)
    assert LOSS_COSTS["clip"].products == {"feature": 8, "scalar": 10}


def check_everything() -> None:
    check_memory()
    check_products()


@pytest.mark.parametrize("world_size", [1, 3])
def test_memory_and_products(world_size: int) -> None:
    run_ranks(check_everything, world_size)
