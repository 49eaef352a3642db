"""Costs of ClipLoss: memory of one tile, each tile computed once, and no more traffic than the exchange requires.

These tests count operations, allocations and messages exactly; test_clip_loss.py tests the results.
"""

import itertools
from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megaclip.comm.groups import group_size
from megaclip.losses import ClipLoss
from megaclip.losses.costs import LOSS_COSTS
from tests.distributed.harness import run_ranks

WAYS = list(itertools.product(("ring", "all_gather"), ("feature", "scalar")))


def two_phases(batch: int, embedding: int, **options: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the functions forward and backward of a ClipLoss on random local features (batch, embedding)."""
    x, y = torch.randn(2, batch, embedding).unbind()
    x.requires_grad_()
    y.requires_grad_()
    losses: list[Tensor] = []
    loss = ClipLoss(**options)
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
    """Check the products, in units of b*B*D multiplications and additions.

    Forward takes 2. Backward takes 6, or 8 if ranks send no gradients. In the ring a rank's own block serves both
    sides, which saves 2 of its b*b*D there.
    """
    batch, embedding, size = 12, 8, group_size()
    unit = batch * batch * size * embedding
    expected = {
        ("ring", "feature"): 8 * unit,
        ("all_gather", "feature"): 8 * unit,
        ("ring", "scalar"): 10 * unit - 2 * unit // size,
        ("all_gather", "scalar"): 10 * unit,
    }
    for reduction, products in LOSS_COSTS["clip"].products.items():
        assert products * unit == expected["all_gather", reduction], reduction
    for exchange, reduction in WAYS:
        forward, backward = two_phases(batch, embedding, exchange=exchange, reduction=reduction)
        with FlopCounterMode(display=False) as counter:
            forward()
        assert counter.get_total_flops() == expected[exchange, reduction], (exchange, reduction)
        with FlopCounterMode(display=False) as counter:
            backward()
        assert counter.get_total_flops() == 0, (exchange, reduction)


def elements_sent() -> dict[str, float]:
    """Return the float32 elements sent by this rank since the last reset of DeepSpeed's comms logger, by operation."""
    size = group_size()
    share = {  # share of a logged message that leaves this rank
        "batch_isend_irecv": 0.5,  # logged: sent and received elements
        "all_gather_into_tensor": size - 1,  # logged: this rank's shard
        "reduce_scatter_tensor": (size - 1) / size,  # logged: the whole input
        "all_to_all_single": (size - 1) / size,
    }
    logged = dist.comm.comms_logger.comms_dict
    return {
        name: share[name] * sum(size_bytes * record[0] for size_bytes, record in sizes.items()) / 4
        for name, sizes in logged.items()
        if name != "all_reduce"  # the loss and one temperature gradient: one element each
    }


def check_traffic() -> None:
    """Check features and per-sample values sent per rank and step, in elements. Shapes take 4 int64 per step."""
    batch, embedding, hops = 16, 24, group_size() - 1
    features, agreement = batch * embedding, 4 * 2 * hops
    expected = {
        # y, then the column statistics, which need one more hop to return. Gradients: y with its shifts, and dy.
        ("ring", "feature"): {
            "batch_isend_irecv": (hops * features + (hops + 1) * batch)
            + hops * (features + batch)
            + (hops + 1) * features,
            "all_gather_into_tensor": agreement,
        },
        # Statistics as above. Gradients: x and y with one shift each, and no gradient.
        ("ring", "scalar"): {
            "batch_isend_irecv": (hops * features + (hops + 1) * batch) + hops * 2 * (features + batch),
            "all_gather_into_tensor": agreement,
        },
        # Statistics: y. Gradients: column shifts; dy is reduced.
        ("all_gather", "feature"): {
            "all_gather_into_tensor": hops * (features + batch) + agreement,
            "all_to_all_single": hops * batch,
            "reduce_scatter_tensor": hops * features,
        },
        # Statistics: y. Gradients: x and both shifts, and no gradient.
        ("all_gather", "scalar"): {
            "all_gather_into_tensor": hops * 2 * (features + batch) + agreement,
            "all_to_all_single": hops * batch,
        },
    }
    dist.configure(enabled=True, prof_all=True)
    for exchange, reduction in WAYS:
        dist.reset_log()
        for run in two_phases(batch, embedding, exchange=exchange, reduction=reduction):
            run()
        assert elements_sent() == expected[exchange, reduction], (exchange, reduction)


def check_everything() -> None:
    check_memory()
    check_products()
    if group_size() > 1:
        check_traffic()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_products_and_traffic(world_size: int) -> None:
    run_ranks(check_everything, world_size)
