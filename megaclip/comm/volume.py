"""Bytes that leave a rank: measured with DeepSpeed's comms logger, and the formulas to hold them against.

`bytes_sent` runs a function with the logger on. The logger synchronises after every operation: never time with it. What
it logs differs by operation (a whole input, one rank's shard, what is sent and received); here all become the bytes
that this rank sends in the bandwidth-optimal algorithm: an all-reduce of n bytes is a reduce-scatter and an all-gather,
2 n (W-1)/W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist

from megaclip.comm.groups import resolve

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

    @property
    def total(self) -> float:
        return self.features + self.gradients + self.scalars


def contrastive_traffic(
    exchange: str,
    reduction: str,
    *,
    world_size: int,
    batch: int,
    embedding: int,
    feature_bytes: int,
    gradient_bytes: int = 4,
    sum_bytes: int = 4,
) -> Traffic:
    """InfoNCE's traffic (docs/mathematics.md), forward and backward, on W ranks with b = `batch` local rows.

    feature_bytes, gradient_bytes, sum_bytes: of an element of features, gradients and per-sample values, as they
    travel. Included are the four int64 that ranks compare before the exchange, and the sums of the loss and of
    logit_scale's gradient.
    """
    hops, rows = world_size - 1, batch * embedding
    # Units of b*D features, b*D gradients, b per-sample values. In the ring one hop more brings results home.
    features, gradients, values = {
        ("ring", "feature"): (2 * hops, hops + 1, 3 * hops + 2),
        ("ring", "scalar"): (3 * hops, 0, 3 * hops + 1),
        ("all_gather", "feature"): (hops, hops, 3 * hops),
        ("all_gather", "scalar"): (2 * hops, 0, 3 * hops),
    }[exchange, reduction]
    few = hops * 4 * 8 + 2 * 2 * hops / world_size * sum_bytes
    if world_size == 1:
        return Traffic(0, 0, 0)
    return Traffic(features * rows * feature_bytes, gradients * rows * gradient_bytes, values * batch * sum_bytes + few)


def open_clip_traffic(*, world_size: int, batch: int, embedding: int, feature_bytes: int) -> Traffic:
    """open_clip with --local-loss --gather-with-grad: both features gathered, both gradients reduce-scattered."""
    side = (world_size - 1) * batch * embedding * feature_bytes
    return Traffic(features=2 * side, gradients=2 * side, scalars=0)


def disco_clip_traffic(*, world_size: int, batch: int, embedding: int, feature_bytes: int) -> Traffic:
    """DisCo-CLIP (arXiv:2304.08480): both features gathered, both gradients all-reduced whole."""
    side = (world_size - 1) * batch * embedding * feature_bytes
    return Traffic(features=2 * side, gradients=4 * side, scalars=0)
