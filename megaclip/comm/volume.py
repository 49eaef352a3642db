"""Bytes that leave a rank: measured with DeepSpeed's comms logger, and the formulas to hold them against.

`bytes_sent` runs a function with the logger on. The logger synchronises after every operation: never time with it. What
it logs differs by operation (a whole input, one rank's shard, what is sent and received); here all become the bytes
that this rank sends in the bandwidth-optimal algorithm: an all-reduce of n bytes is a reduce-scatter and an all-gather,
2 n (W-1)/W.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist

from megaclip.comm.groups import resolve
from megaclip.fastclip_variants import VARIANTS

# Bytes sent per byte logged, by operation, for W ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "batch_isend_irecv": lambda w: 0.5,  # logged: sent and received
    "all_gather_into_tensor": lambda w: w - 1,  # logged: this rank's shard
    "reduce_scatter_tensor": lambda w: (w - 1) / w,  # logged: the whole input
    "all_to_all_single": lambda w: (w - 1) / w,
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "broadcast": lambda w: (w - 1) / w,  # passed from rank to rank, the last one sends nothing: the mean
}


def bytes_sent(run: Callable[[], Any], *, group: Any = None) -> dict[str, float]:
    """What this rank sends while `run()` runs, by operation of deepspeed.comm.

    Calls of torch.distributed that do not go through deepspeed.comm are not seen. Every rank must call it.

    Raises:
        ValueError: an operation was logged whose bytes this table cannot tell.
    """
    world_size = resolve(group).size
    dist.configure(enabled=True, prof_all=True)
    dist.comm.comms_logger.comms_dict.clear()
    try:
        run()
        logged = dict(dist.comm.comms_logger.comms_dict)
    finally:
        dist.configure(enabled=False)
    sent = {}
    for name, sizes in logged.items():
        if name not in _SENT:
            raise ValueError(f"no rule says how many bytes {name!r} sends; add it to megaclip/comm/volume.py")
        sent[name] = _SENT[name](world_size) * sum(size * record[0] for size, record in sizes.items())
    return sent


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends per step."""

    features: float
    gradients: float
    scalars: float
    state: float = 0  # of the samples, to and from their owners

    @property
    def total(self) -> float:
        return self.features + self.gradients + self.scalars + self.state


@dataclass(frozen=True)
class Sizes:
    """What the features of one rank are, and in how many bytes an element of each kind travels."""

    world_size: int
    batch: int
    """Local rows b."""
    embedding: int
    feature_bytes: int
    gradient_bytes: int = 4
    sum_bytes: int = 4
    """Of values per sample and of sums."""

    @property
    def hops(self) -> int:
        """To the other ranks."""
        return self.world_size - 1

    @property
    def side(self) -> int:
        """Bytes of one tower's features, sent to every other rank."""
        return self.hops * self.batch * self.embedding * self.feature_bytes


def contrastive_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """InfoNCE's traffic (docs/mathematics.md), forward and backward.

    Included are the four int64 that ranks compare before the exchange, and the sums of the loss and of logit_scale's
    gradient.
    """
    moved = _tile_traffic(exchange, reduction, sizes, scales=0, terms=1)
    return replace(moved, scalars=moved.scalars + sizes.hops * 4 * 8 + _all_reduced(2, sizes))


def sigmoid_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """The sigmoid loss's traffic: one pass, and no value of a sample goes along with its features.

    The scalars are the four int64 that ranks compare, and the sums of the loss and both scalars' gradients.
    """
    feature = reduction == "feature"
    home = 1 if exchange == "ring" and sizes.hops else 0  # one hop more brings dy back
    gradients = sizes.hops + home if feature else 0
    return Traffic(
        features=sizes.side if feature else 2 * sizes.side,
        gradients=gradients * sizes.batch * sizes.embedding * sizes.gradient_bytes,
        scalars=sizes.hops * 4 * 8 + _all_reduced(3, sizes),
    )


def global_contrastive_traffic(variant: str, exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """`contrastive_traffic` of a step of FastClipLoss: forward, backward, and its update of the samples' state.

    Per-sample temperatures (isogclr, fastclip_v2) move three terms of the gradient tile per sample (scale, shift,
    weight), where the others move one, and a scale for the statistics; their state has four columns to fetch and to
    write back instead of two. State is counted for ids spread evenly over their owners, as random ids are in the mean:
    (W-1)/W of the rows move. It includes the int64 ids, which all ranks gather.
    """
    hops, individual = sizes.hops, VARIANTS[variant].individual
    sums = 4 if VARIANTS[variant].temperature == "global" else 2  # loss and mean of log tau; the temperature's gradient
    moved = _tile_traffic(exchange, reduction, sizes, scales=1 if individual else 0, terms=3 if individual else 1)
    columns = 4 if individual else 2
    return replace(
        moved,
        scalars=moved.scalars + hops * (4 + 1) * 8 + _all_reduced(sums, sizes),
        state=sizes.batch * (8 * hops + 2 * columns * 4 * hops / sizes.world_size),
    )


def _tile_traffic(exchange: str, reduction: str, sizes: Sizes, *, scales: int, terms: int) -> Traffic:
    """What the two passes of `megaclip.losses.distributed_tiles` send.

    scales: per-sample values that a column takes along for the statistics; terms: that a row, and a column, takes
    along for the gradient (its log-normaliser is one).
    """
    if sizes.world_size == 1:
        return Traffic(0, 0, 0)
    hops, rows = sizes.hops, sizes.batch * sizes.embedding
    # Units of b*D features, b*D gradients, b per-sample values. In the ring one hop more brings results home.
    features, gradients, values = {
        ("ring", "feature"): (2 * hops, hops + 1, (scales + 1 + terms + 1) * hops + 2),
        ("ring", "scalar"): (3 * hops, 0, (scales + 1 + 2 * terms) * hops + 1),
        ("all_gather", "feature"): (hops, hops, (scales + 1 + terms + 1) * hops),
        ("all_gather", "scalar"): (2 * hops, 0, (scales + 1 + 2 * terms) * hops),
    }[exchange, reduction]
    return Traffic(
        features * rows * sizes.feature_bytes,
        gradients * rows * sizes.gradient_bytes,
        values * sizes.batch * sizes.sum_bytes,
    )


def _all_reduced(elements: int, sizes: Sizes) -> float:
    """Bytes that a rank sends in an all-reduce of so many sums."""
    return elements * sizes.sum_bytes * 2 * sizes.hops / sizes.world_size


def open_clip_traffic(sizes: Sizes) -> Traffic:
    """open_clip with --local-loss --gather-with-grad: both features gathered, both gradients reduce-scattered."""
    return Traffic(features=2 * sizes.side, gradients=2 * sizes.side, scalars=0)


def disco_clip_traffic(sizes: Sizes) -> Traffic:
    """DisCo-CLIP (arXiv:2304.08480): both features gathered, both gradients all-reduced whole."""
    return Traffic(features=2 * sizes.side, gradients=4 * sizes.side, scalars=0)
