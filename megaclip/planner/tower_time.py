"""Seconds of a tower's kernels for one of a rank's samples, forward and backward.

Three kinds of kernels run one after the other: matrix products, attention, and kernels that only read and write memory
(norms, activation functions, sums). Products grow with the square of the width, the others with the width, so a wide
tower reaches a larger share of the GPU's product rate than a narrow one.

Numbers that the third kind reads and writes per token of a block, in units of the width C, with an MLP of width r C:

    forward   two norms 4, two residual sums 6, GELU 2 r
    backward  two norms 6, two sums of residual gradients 6, sums of the gradients of queries, keys and values 6, GELU
              3 r, gradients of the biases 5 + r

QuickGELU takes 7 r and 14 r, LayerScale 4 and 12 more. `tests/unit/planner/test_tower_time.py` compares the numbers
with PyTorch's operations. Attention is counted in whole tiles of tokens, and twice in the backward pass.

With tensor parallelism over T ranks, a chunk of m rows per rank is T m rows. Norms and residual sums are whole on every
rank; GELU and the gradients of the split biases are divided by T. Megatron-core's layers add their biases in kernels of
their own: 4 for the whole outputs of attention and MLP, 6 + 2 r for the split ones. The gradient of attention's input
is copied before it is summed: 2.
"""

import math
from typing import NamedTuple

from megaclip.planner.cluster import Rates
from megaclip.planner.constants import (
    ATTENTION_CHANNELS,
    ATTENTION_TILE,
    PRODUCT_SHARE,
    TEXT_FACTOR,
)
from megaclip.planner.towers import Tower, compiled_time, towers
from megaclip.planner.traced_towers import TracedTower
from megaclip.planner.workload import Workload


class PassSeconds(NamedTuple):
    """Seconds of one sample in each pass through a tower."""

    forward: float
    backward: float

    def times(self, factor: float) -> "PassSeconds":
        """Return the seconds of both passes times `factor`."""
        return PassSeconds(factor * self.forward, factor * self.backward)


def tower_seconds(workload: Workload, rates: Rates, *, with_graph: bool = False) -> tuple[PassSeconds, PassSeconds]:
    """Return one rank's seconds for one of its samples in the image tower and in the text tower.

    with_graph: of the parts of partly locked towers that have a graph. The backward pass runs over these only.
    """
    image_time, text_time = compiled_time(workload)
    image, text = (
        _pass_seconds(tower.part_with_graph if with_graph else tower.whole, rates, workload.compute_bytes)
        for tower in towers(workload, mean=True)
    )
    return image.times(image_time), text.times(TEXT_FACTOR * text_time)


def _pass_seconds(tower: Tower | TracedTower, rates: Rates, compute_bytes: int) -> PassSeconds:
    if isinstance(tower, TracedTower):
        traced = tower.trace(compute_bytes)
        operations = tower.graph_operations() if tower.unlocked_groups is not None else traced.operations
        products, activations = operations / (rates.product_flops * PRODUCT_SHARE), traced.kept / rates.memory
        return PassSeconds(forward=products + 2 * activations, backward=2 * products + 3 * activations)
    products = tower.product_operations() / (rates.product_flops * PRODUCT_SHARE)
    attention = attention_operations(tower) / rates.attention_flops
    moved = moved_numbers(tower)
    return PassSeconds(
        forward=products + attention + moved.forward * compute_bytes / rates.memory,
        backward=2 * (products + attention) + moved.backward * compute_bytes / rates.memory,
    )


def attention_operations(tower: Tower) -> float:
    """Return one rank's operations of attention for one of its samples in a forward pass, in whole tiles."""
    keys = _whole(tower.tokens, ATTENTION_TILE)
    width = tower.heads * _whole(tower.width // tower.heads, ATTENTION_CHANNELS)
    last = ATTENTION_TILE if tower.pooled else keys
    return 4 * ((tower.layers - 1) * keys + last) * keys * width


class MovedNumbers(NamedTuple):
    """Numbers that one rank's norms, activation functions and sums read and write for one of its samples."""

    forward: float
    backward: float


def moved_numbers(tower: Tower) -> MovedNumbers:
    """Return the numbers of the blocks. Of a pooled last block only the norm and the gradients of all tokens count."""
    ranks, ratio = tower.tensor_ranks, tower.hidden / tower.width
    scales, splits = tower.layer_scale, ranks > 1
    gelu_forward, gelu_backward = (7, 14) if tower.quick_gelu else (2, 3)

    def of_all_rows(whole: float, split: float) -> float:
        return ranks * whole + split

    block = MovedNumbers(
        of_all_rows(10 + 4 * scales + 4 * splits, gelu_forward * ratio + (6 + 2 * ratio) * splits),
        of_all_rows(20 + 12 * scales + 2 * splits, (gelu_backward + 1) * ratio + 3),
    )
    last = MovedNumbers(of_all_rows(2, 4 * splits), of_all_rows(9 + 2 * splits, 2)) if tower.pooled else block
    return MovedNumbers(
        *(
            tower.tokens * tower.width * ((tower.layers - 1) * every + once)
            for every, once in zip(block, last, strict=True)
        )
    )


def _whole(size: float, tile: int) -> int:
    return math.ceil(size / tile) * tile
