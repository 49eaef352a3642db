"""Costs of one of a rank's samples in one tower: the counts that the planner multiplies by samples, chunks and rates.

`planner.own_towers` calculates them for MegaCLIP's towers by formulas, which also know compiled towers, selective
recomputation and tensor parallelism. `planner.traced_towers` traces open_clip's modules on the meta device.

A locked tower whose last groups are trained keeps a graph of these groups only: its part with a graph. The part of any
other tower is the whole tower.
"""

from typing import NamedTuple


class TowerMemory(NamedTuple):
    """Bytes of one sample on the GPU. With tensor parallelism they include the replica's other ranks' rows."""

    forward_peak: float
    """Peak of a forward pass without a graph: the input, one block's working set and what its callers hold."""
    graph: float
    """Bytes that a graph keeps until its backward pass, without the input."""
    forward_peak_with_graph: float
    """Peak of a partly locked tower's forward pass that makes a graph, or an upper bound of it."""
    backward_peak: float
    """Peak of input, activations and their gradients during the backward pass, without gradients of parameters."""
    block_inputs: float
    """Bytes of the inputs of the blocks with a graph, which activation checkpointing keeps."""


class PassCosts(NamedTuple):
    """Work of one sample's passes through a tower, or through its part with a graph."""

    layers: int
    """Number of blocks."""
    block_inputs: float
    """Bytes of the inputs of the blocks."""
    products: float
    """Operations of matrix products in a forward pass; a multiply-add is two. The backward pass has twice as many."""
    attention: float
    """Operations of attention in a forward pass, in whole tiles; 0 if `products` includes them."""
    forward_bytes: float
    """Bytes that norms, activation functions and sums read and write in a forward pass."""
    backward_bytes: float
    """Bytes that they read and write in a backward pass."""
    forward_sum: float = 0.0
    """Numbers that tensor-parallel ranks add up if every block has one sum in a forward pass."""
    backward_sums: float = 0.0
    """Numbers that tensor-parallel ranks add up in a backward pass, where every block has two sums."""

    def times(self, share: float) -> "PassCosts":
        """Return the costs for `share` of the tokens."""
        return PassCosts(self.layers, *(share * cost for cost in self[1:]))
