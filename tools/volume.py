"""Measure the bytes that a rank sends, with DeepSpeed's comms logger.

The logger synchronises the device after every operation, so never measure time while it is on. It logs a different
size for each operation: a whole input, one rank's shard, or bytes sent plus received. This module converts all of them
to the bytes that one rank sends in the bandwidth-optimal algorithm. For example, an all-reduce of n bytes over W ranks
is a reduce-scatter and an all-gather: 2 n (W-1)/W bytes.
"""

from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist

from megaclip.comm.groups import resolve

# Operation -> bytes sent per byte logged, as a function of the number of ranks W.
_SENT: dict[str, Callable[[int], float]] = {
    "batch_isend_irecv": lambda w: 0.5,  # logs bytes sent plus bytes received
    "all_gather_into_tensor": lambda w: w - 1,  # logs this rank's shard
    "reduce_scatter_tensor": lambda w: (w - 1) / w,  # logs the whole input
    "all_to_all_single": lambda w: (w - 1) / w,
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "broadcast": lambda w: (w - 1) / w,  # mean over ranks: a chain in which the last rank sends nothing
}


def bytes_sent(run: Callable[[], Any], *, group: Any = None) -> dict[str, float]:
    """Return the bytes that this rank sends while `run()` runs, by operation of deepspeed.comm.

    Every rank must call it. Calls of torch.distributed that do not go through deepspeed.comm are not counted.

    Raises:
        ValueError: an operation was logged that `_SENT` does not contain.
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
            raise ValueError(f"the bytes that {name!r} sends are unknown; add it to _SENT in tools/volume.py")
        sent[name] = _SENT[name](world_size) * sum(size * record[0] for size, record in sizes.items())
    return sent
