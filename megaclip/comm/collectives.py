"""Collectives of the losses and the evaluation: gather, reduce-scatter, sums, log-sum-exp, and errors shared by all
ranks.

None writes into its argument, though a group of one may hand it back; all take `group` as `megaclip.comm.groups` says,
and every rank of it must call them in the same order. Shapes: W ranks of the group, b rows of one rank.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip import errors
from megaclip.comm.groups import RankGroup, resolve


def gather_rows(rows: Tensor, *, group: Any = None, payload: torch.dtype | None = None) -> Tensor:
    """(b, ...) on each rank -> (W*b, ...) on all, in rank order. Every rank has the same b and dtype.

    payload: the dtype they travel in; None is their own, which they have again on arrival.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return rows
    sent = rows.to(payload or rows.dtype).contiguous()
    gathered = sent.new_empty(ranks.size * len(sent), *sent.shape[1:])
    dist.all_gather_into_tensor(gathered, sent, group=ranks.handle)
    return gathered.to(rows.dtype)


def reduce_scatter_rows(rows: Tensor, *, group: Any = None, payload: torch.dtype | None = None) -> Tensor:
    """(W*b, ...) on each rank -> the sum over ranks of this rank's b rows, (b, ...). payload: as for `gather_rows`."""
    ranks = resolve(group)
    if ranks.size == 1:
        return rows
    sent = rows.to(payload or rows.dtype).contiguous()
    own = sent.new_empty(len(sent) // ranks.size, *sent.shape[1:])
    dist.reduce_scatter_tensor(own, sent, group=ranks.handle)
    return own.to(rows.dtype)


def reduce_scatter_log_sum_exp(values: Tensor, *, group: Any = None) -> Tensor:
    """(W*b,) on each rank -> `log sum over ranks exp(values)` of this rank's b elements, (b,).

    An all-to-all, then one stable log-sum-exp: as much traffic as a reduce-scatter, and nothing can overflow on the
    way.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return values
    pieces = torch.empty_like(values)
    dist.all_to_all_single(pieces, values.contiguous(), group=ranks.handle)
    return torch.logsumexp(pieces.view(ranks.size, -1), dim=0)


def sum_over_ranks(values: Tensor, *, group: Any = None) -> Tensor:
    """The elementwise sum over ranks, on every rank; any shape."""
    ranks = resolve(group)
    if ranks.size == 1:
        return values
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ranks.handle)
    return total


def gather_integers(values: list[int], *, group: Any = None) -> list[list[int]]:
    """A few integers of each rank, on every rank's host: one list per rank. All ranks give equally many."""
    return gather_on_host(torch.tensor(values, dtype=torch.int64), group=group).tolist()


def gather_on_host(values: Tensor, *, group: Any = None) -> Tensor:
    """Values (k,) of each rank, on its host -> (W, k) on every rank's host. Every rank has the same k and dtype.

    On CUDA it runs on a stream of its own, so that the host waits for its peers but not for the work it has queued.
    """
    ranks = resolve(group)
    if ranks.size == 1:
        return values[None]
    device = ranks.message_device
    if device.type == "cpu":
        return _gather_on_host(values, ranks, device)
    with get_accelerator().stream(_side_stream(device)):
        return _gather_on_host(values, ranks, device)


def gather_objects(item: Any, *, group: Any = None) -> list[Any]:
    """A picklable object of each rank, on every rank: for errors and set-up, not for steps."""
    ranks = resolve(group)
    if ranks.size == 1:
        return [item]
    gathered: list[Any] = [None] * ranks.size
    # Not deepspeed.comm's, which ends the process where its comms_logger is on: it knows no bandwidth of objects.
    torch.distributed.all_gather_object(gathered, item, group=ranks.handle)
    return gathered


def sum_counts(counts: Mapping[str, int], *, group: Any = None) -> dict[str, int]:
    """Counts by name of each rank -> their sums over all ranks, on every rank, the most frequent first."""
    total = sum(map(Counter, gather_objects(dict(counts), group=group)), Counter[str]())
    return dict(total.most_common())


@contextlib.contextmanager
def raise_on_all_ranks(*, group: Any = None) -> Iterator[None]:
    """Run the body of a `with` statement on every rank; if it raises on any rank, end every rank with one error.

    The body may differ between ranks, and must not communicate: a rank that raises leaves it early. If any error is a
    `MegaclipError`, all ranks raise the error of the lowest such rank, with the same class and message. Any other
    exception is a bug: the rank that had it raises it unchanged, with its traceback, and the other ranks raise a
    `MegaclipError` that names the rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    raise_together(error, group=group)


def raise_together(error: Exception | None, *, group: Any = None) -> None:
    """End every rank with one readable error if any of them failed; return when none did.

    Each rank passes what went wrong there, or None. If any error is a `MegaclipError`, all ranks raise the lowest such
    rank's error, same class and message. Any other exception is a bug: the rank that had it raises it unchanged, with
    its traceback, and its peers raise a `MegaclipError` that names the rank.
    """
    ranks = resolve(group)
    failed = gather_integers([int(error is not None)], group=ranks)
    if any(flag for (flag,) in failed):
        described = (
            None if error is None else (type(error).__name__, str(error), isinstance(error, errors.MegaclipError))
        )
        _raise_first(error, gather_objects(described, group=ranks))


def _raise_first(own: Exception | None, described: list[tuple[str, str, bool] | None]) -> NoReturn:
    reports = [(rank, *report) for rank, report in enumerate(described) if report is not None]
    if own is not None and not isinstance(own, errors.MegaclipError):
        raise own
    for _, name, message, for_users in reports:
        if for_users:
            raise getattr(errors, name, errors.MegaclipError)(message) from own
    rank, name, message, _ = reports[0]
    raise errors.MegaclipError(f"rank {rank} failed with {name}: {message}; its traceback is in that rank's output")


def _gather_on_host(values: Tensor, ranks: RankGroup, device: torch.device) -> Tensor:
    gathered = torch.empty(ranks.size * len(values), dtype=values.dtype, device=device)
    dist.all_gather_into_tensor(gathered, values.to(device), group=ranks.handle)
    return gathered.view(ranks.size, -1).cpu()


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return get_accelerator().Stream(device)
