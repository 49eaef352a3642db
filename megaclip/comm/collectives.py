"""Collectives over the ranks of a group: gather, reduce-scatter, sum, log-sum-exp, and one error on all ranks.

Every rank of the group must call them in the same order. `group` is a process group or None, as documented in
`megaclip.comm.groups`. No function writes into its argument, but a group of one may return the argument itself.

Shapes: W ranks in the group, b rows per rank.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip import errors
from megaclip.comm.groups import resolve
from megaclip.comm.recording import outside_of_recording


def gather_rows(rows: Tensor, *, group: Any = None, payload: torch.dtype | None = None) -> Tensor:
    """Gather the rows of all ranks: (b, ...) on each rank -> (W*b, ...) on every rank, in rank order.

    All ranks must pass the same b and dtype.
    payload: dtype in which the rows are sent. The result has the dtype of `rows`. None: the dtype of `rows`.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return rows
    sent = rows.to(payload or rows.dtype).contiguous()
    gathered = sent.new_empty(ranks.size * len(sent), *sent.shape[1:])
    outside_of_recording(dist.all_gather_into_tensor, gathered, sent, group=ranks.handle)
    return gathered.to(rows.dtype)


def reduce_scatter_rows(rows: Tensor, *, group: Any = None, payload: torch.dtype | None = None) -> Tensor:
    """Sum over ranks and return this rank's share: (W*b, ...) on each rank -> (b, ...).

    payload: dtype in which the rows are sent, as for `gather_rows`.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return rows
    sent = rows.to(payload or rows.dtype).contiguous()
    own = sent.new_empty(len(sent) // ranks.size, *sent.shape[1:])
    outside_of_recording(dist.reduce_scatter_tensor, own, sent, group=ranks.handle)
    return own.to(rows.dtype)


def reduce_scatter_log_sum_exp(values: Tensor, *, group: Any = None) -> Tensor:
    """Return `log(sum over ranks of exp(values))` for this rank's share: (W*b,) on each rank -> (b,).

    It is an all-to-all followed by one stable log-sum-exp. It sends as many bytes as a reduce-scatter, and no
    intermediate value can overflow.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return values
    pieces = torch.empty_like(values)
    outside_of_recording(dist.all_to_all_single, pieces, values.contiguous(), group=ranks.handle)
    return torch.logsumexp(pieces.view(ranks.size, -1), dim=0)


def sum_over_ranks(values: Tensor, *, group: Any = None) -> Tensor:
    """Return the elementwise sum over ranks on every rank. `values` may have any shape."""
    ranks = resolve(group)
    if ranks.size == 1:
        return values
    total = values.clone(memory_format=torch.contiguous_format)
    outside_of_recording(dist.all_reduce, total, op=dist.ReduceOp.SUM, group=ranks.handle)
    return total


def average_over_ranks(tensors: list[Tensor], *, group: Any = None) -> None:
    """Replace the values of tensors by their mean over ranks, in place. Integer tensors stay unchanged.

    All ranks must pass tensors of the same shapes and dtypes, in the same order.
    """
    ranks, averaged = resolve(group), [tensor for tensor in tensors if tensor.is_floating_point()]
    if ranks.size == 1 or not averaged:
        return
    flat = sum_over_ranks(torch.cat([tensor.flatten() for tensor in averaged]), group=ranks) / ranks.size
    for tensor, mean in zip(averaged, flat.split([tensor.numel() for tensor in averaged]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def gather_integers(values: list[int], *, group: Any = None) -> list[list[int]]:
    """Gather a few integers of each rank: returns one list per rank, on every rank's host.

    All ranks must pass equally many integers.
    """
    return gather_on_host(torch.tensor(values, dtype=torch.int64), group=group).tolist()


def gather_on_host(values: Tensor, *, group: Any = None) -> Tensor:
    """Gather values that are in host memory: (k,) on each rank -> (W, k) on every rank.

    All ranks must pass the same k and dtype. On CUDA the gather runs on a separate stream, so the host waits for its
    peers but not for GPU work that is already queued.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return values[None]
    device = ranks.message_device
    on_host = device.type == "cpu"
    with contextlib.nullcontext() if on_host else get_accelerator().stream(_side_stream(device)):
        gathered = torch.empty(ranks.size * len(values), dtype=values.dtype, device=device)
        dist.all_gather_into_tensor(gathered, values.to(device), group=ranks.handle)
        return gathered.view(ranks.size, -1).cpu()


def gather_objects(item: Any, *, group: Any = None) -> list[Any]:
    """Gather one picklable object of each rank, on every rank. This is slow: do not call it in every step."""
    ranks = resolve(group)
    if ranks.size == 1:
        return [item]
    gathered: list[Any] = [None] * ranks.size
    # deepspeed.comm's function ends the process when comms_logger is on, because it cannot compute its bandwidth.
    torch.distributed.all_gather_object(gathered, item, group=ranks.handle)
    return gathered


def sum_counts(counts: Mapping[str, int], *, group: Any = None) -> dict[str, int]:
    """Return the sums of the counts of all ranks by name, the largest first, on every rank."""
    total = sum(map(Counter, gather_objects(dict(counts), group=group)), Counter[str]())
    return dict(total.most_common())


def wait_for_all_ranks(*, group: Any = None) -> None:
    """Return when every rank of the group has called this function.

    Call it where a rank may exit while others are still busy. A rank that is still connecting fails if its peer has
    exited, and a launcher ends the other ranks when one exits. The host itself waits, even with NCCL.
    """
    gather_integers([0], group=group)


@contextlib.contextmanager
def raise_on_all_ranks(*, group: Any = None) -> Iterator[None]:
    """Run the body of a `with` statement on every rank; if it raises on any rank, raise one error on all ranks.

    The body may differ between ranks. It must not communicate, because a rank that raises leaves it early. If any error
    is a `MegaclipError`, all ranks raise the error of the lowest such rank, with the same class and message. Any other
    exception is a bug. The rank that raised it always raises it again unchanged, with its traceback. Without a
    `MegaclipError`, the other ranks raise one that names that rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:  # kept until every rank knows of it; raised again below, on all ranks
        error = problem
    ranks = resolve(group)
    failed = gather_integers([int(error is not None)], group=ranks)
    if any(flag for (flag,) in failed):
        sent: Any = None if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, errors.MegaclipError):
            # A class of the user's code, or its arguments, may not be readable on the other ranks.
            sent = getattr(errors, type(error).__name__, errors.MegaclipError)(str(error))
            sent.is_temporary = errors.is_temporary(error)
        received = gather_objects(sent, group=ranks)
        if error is not None and not isinstance(error, errors.MegaclipError):
            raise error
        for first in received:
            if isinstance(first, errors.MegaclipError):
                raise first from error
        rank, text = next((rank, text) for rank, text in enumerate(received) if text is not None)
        raise errors.MegaclipError(f"rank {rank} failed with {text}; see that rank's output")


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return get_accelerator().Stream(device)
