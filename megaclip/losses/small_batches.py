"""Loss and gradient sums of small batches on GPUs, recorded as CUDA graphs (`megaclip.comm.recording`).

Launching the kernels of a loss one by one takes the host about a millisecond. With a small batch the GPU is idle for
much of this time. From the third call with the same sizes on, such a loss replays a recording of the plain code. It
runs the same kernels, so its results have the same bits.

A recording keeps its buffers: the features, the sums of gradients and a tile of logits. So a loss keeps at most two of
them. MegaCLIP's own runs do not use them: there the host launches the loss while the GPU still computes the towers.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from megaclip.comm.recording import Recording
from megaclip.logging import get_logger, log_once
from megaclip.losses.sums import Evaluate, LossAndSums, LossInputs
from megaclip.losses.way import Way
from megaclip.ops.tiles import implementation_for
from megaclip.ops.types import accumulation_dtype

_MOST_OPERATIONS = 2**40
"""Operations (8 b*C*D) of the largest batch that is recorded. For larger batches the GPU takes longer than the host.
The C columns are the texts and the negatives of all ranks."""
_MOST_BYTES = 2**28
"""Bytes of the columns and their gradients, which a recording keeps, in the largest batch."""
_PLAIN_CALLS = 2
"""Number of calls with the same sizes before the call that records. They compile kernels and connect ranks."""
_MOST_RECORDINGS = 2

_logger = get_logger(__name__)


def is_small(x: Tensor, way: Way) -> bool:
    """Return whether steps with features like x (b, D) are recorded if they repeat; equal on all ranks."""
    b, embedding = x.shape
    columns = way.ranks.size * (b + way.negatives)
    return (
        x.is_cuda
        and 8 * b * columns * embedding <= _MOST_OPERATIONS
        and columns * embedding * (x.dtype.itemsize + accumulation_dtype(x).itemsize) <= _MOST_BYTES
        and (way.ranks.size == 1 or (way.exchange == "all_gather" and way.ranks.message_device.type == "cuda"))
        and implementation_for(way.tiles, x) == "triton"
        and not torch.cuda.is_current_stream_capturing()
    )


class Recordings:
    """The recordings of one loss, by the sizes of its arguments."""

    def __init__(self) -> None:
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, _SmallBatch] = {}

    def __reduce__(self) -> tuple[type["Recordings"], tuple[()]]:
        """Reduce to an empty object: a copy of a loss starts without recordings."""
        return Recordings, ()

    def evaluate(self, plain: Evaluate, way: Way, inputs: LossInputs) -> LossAndSums:
        """Return the result of `plain`, from a recording if these sizes repeat."""
        x = inputs.x
        stream = torch.cuda.current_stream(x.device).cuda_stream  # replays on two streams would share buffers
        # A scale or bias of any shape and device is copied; of the others the shape counts.
        shapes = tuple(None if tensor is None else tensor.shape for tensor in inputs[4:])
        key = (x.shape, x.dtype, x.device, shapes, stream, way)
        if key not in self._recordings:
            self._calls[key] += 1
            if self._calls[key] <= _PLAIN_CALLS:
                return plain(inputs)
            self._record(key, plain, inputs)
        return self._recordings[key](inputs)

    def _record(self, key: Any, plain: Evaluate, like: LossInputs) -> None:
        if len(self._recordings) == _MOST_RECORDINGS:
            oldest = next(iter(self._recordings))
            del self._recordings[oldest], self._calls[oldest]
        log_once(_logger.info, f"loss: the kernels of batches of {len(like.x)} per rank run as CUDA graphs")
        self._recordings[key] = _SmallBatch(plain, like)


class _SmallBatch:
    """A recording for inputs of these shapes, dtypes and devices."""

    def __init__(self, plain: Evaluate, like: LossInputs) -> None:
        scale, bias = (like.x.new_empty((), dtype=accumulation_dtype(like.x)) for _ in range(2))
        x, y, _, _, *others = (None if tensor is None else tensor.new_empty(tensor.shape) for tensor in like)
        assert x is not None and y is not None
        self._inputs = LossInputs(x, y, scale, None if like.logit_bias is None else bias, *others)
        with torch.cuda.device(like.x.device):
            self._recording = Recording(lambda: plain(self._inputs)[:-1])  # without `places`, which is None

    def __call__(self, inputs: LossInputs) -> LossAndSums:
        kept, new = ([tensor for tensor in tensors if tensor is not None] for tensors in (self._inputs, inputs))
        torch._foreach_copy_(kept, [tensor.reshape(old.shape) for tensor, old in zip(new, kept, strict=True)])
        self._recording.replay()
        results = [torch.empty_like(result) for result in self._recording.results]
        torch._foreach_copy_(results, list(self._recording.results))  # one kernel
        return LossAndSums(*results)
