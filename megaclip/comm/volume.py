"""Bytes that leave a rank, measured with DeepSpeed's comms logger.

The logger synchronises after every operation: never time with it. What it logs differs by operation (a whole input, one
rank's shard, what is sent and received); here all become the bytes that this rank sends in the bandwidth-optimal
algorithm: an all-reduce of n bytes is a reduce-scatter and an all-gather, 2 n (W-1)/W.
"""

from collections.abc import Callable
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
