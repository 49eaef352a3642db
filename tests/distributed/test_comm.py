"""The ring, the collectives, and errors that are raised on all ranks, on 1 to 3 ranks and on a group of some ranks."""

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from torch import Tensor

from megaclip import errors
from megaclip.comm import ring
from megaclip.comm.collectives import (
    gather_integers,
    gather_objects,
    gather_rows,
    raise_on_all_ranks,
    reduce_scatter_log_sum_exp,
    reduce_scatter_rows,
    sum_over_ranks,
    wait_for_all_ranks,
)
from megaclip.comm.groups import group_rank, group_size, resolve
from tests.distributed.harness import run_ranks
from tests.tolerances import WRITTEN, assert_close


def check_collectives(group: Any = None) -> None:
    rank, size = group_rank(group), group_size(group)
    mine = torch.tensor([[rank, 10.0], [rank, 20.0]])
    gathered = gather_rows(mine, group=group)
    assert gathered.tolist() == [[owner, value] for owner in range(size) for value in (10, 20)]
    assert sum_over_ranks(mine[0], group=group).tolist() == [size * (size - 1) / 2, 10 * size]
    assert mine.tolist() == [[rank, 10], [rank, 20]], "an argument was modified"
    assert gather_integers([rank, -(2**40)], group=group) == [[owner, -(2**40)] for owner in range(size)]
    assert gather_objects({"rank": rank}, group=group) == [{"rank": owner} for owner in range(size)]

    rows = torch.arange(size * 2.0)[:, None] * (rank + 1)
    expected = [[(2 * rank + row) * size * (size + 1) / 2] for row in range(2)]
    assert reduce_scatter_rows(rows, group=group).tolist() == expected

    # The exponentials overflow float32. Element 1 is finite on the last rank only, element 2 on no rank.
    values = torch.tensor([1000.0 + rank, -900.0 if rank == size - 1 else -math.inf, -math.inf]).repeat(size)
    merged = reduce_scatter_log_sum_exp(values, group=group).double()
    top = 1000 + math.log(sum(math.exp(owner) for owner in range(size)))
    assert_close(merged, torch.tensor([top, -900, -math.inf]).double(), WRITTEN)


@contextlib.contextmanager
def recorded_messages() -> Iterator[list[Any]]:
    """Record the operations that send a message in the body of the `with` statement."""
    sent: list[Any] = []
    batch_isend_irecv = dist.batch_isend_irecv

    def recording(operations: list[Any]) -> Any:
        sent.extend(operation for operation in operations if operation.op == "isend")
        return batch_isend_irecv(operations)

    with mock.patch.object(ring.dist, "batch_isend_irecv", recording):
        yield sent


def merged(arrived: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a + b for a, b in zip(arrived, part, strict=True))


def check_ring(group: Any = None) -> None:
    """Check that each rank sees every block once, its own first. A `Carried` returns with a part from every rank."""
    ranks = resolve(group)
    seen, carried = [], ring.Carried(merged, group=group)
    block = torch.full((3, 2), float(ranks.rank)), torch.full((3,), ranks.rank + 0.5, dtype=torch.float64)
    with recorded_messages() as sent:
        for hop, (owner, (features, terms)) in enumerate(ring.circulate(block, group=group)):
            assert features.unique().tolist() == [owner] and terms.unique().tolist() == [owner + 0.5]
            # The two tensors of the next block are already being sent when the caller receives this one. After the last
            # hop there is no next block.
            assert sum(message.tag < 100 for message in sent) == 2 * min(hop + 1, ranks.size - 1)
            seen.append(owner)
            carried.add((features + 10 * (ranks.rank + 1), torch.tensor([float(ranks.rank)])))
        total, visitors = carried.home()
    assert seen == [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]
    assert sum(message.tag >= 100 for message in sent) == (2 * ranks.size if ranks.size > 1 else 0)
    everyone = sum(range(ranks.size))
    assert total.unique().tolist() == [ranks.size * ranks.rank + 10 * (everyone + ranks.size)]
    assert visitors.tolist() == [everyone]


def check_wait_for_all_ranks(group: Any = None) -> None:
    """Check that no rank returns before the last one has entered."""
    if group_rank(group) == group_size(group) - 1:
        time.sleep(0.1)
    entered_at = time.monotonic()  # the ranks of one host share this clock
    wait_for_all_ranks(group=group)
    returned_at = time.monotonic()
    assert returned_at >= max(gather_objects(entered_at, group=group))


def broken() -> None:
    raise KeyError("oops")


def raised_on_all_ranks(body: Callable[[], Any], group: Any = None) -> Exception | None:
    """Return the exception that `raise_on_all_ranks` raises on this rank for this body, or None."""
    try:
        with raise_on_all_ranks(group=group):
            body()
    except Exception as error:
        return error
    return None


def fail_on(ranks: set[int], error: Exception, group: Any = None) -> Callable[[], None]:
    """Return a function that raises `error` on these ranks of the group."""

    def body() -> None:
        if group_rank(group) in ranks:
            raise error

    return body


def check_an_error_of_one_rank(group: Any = None) -> None:
    """Check that all ranks raise the class and message of that error, and know whether a restart may succeed."""
    last, failed = group_size(group) - 1, errors.DataError("the worker does not answer")
    failed.__cause__ = TimeoutError()
    for failing, error in (
        (last, errors.DataError("expected shards, got none")),
        (0, errors.ConfigError("x")),
        (last, failed),
    ):
        raised = raised_on_all_ranks(fail_on({failing}, error, group), group)
        assert (type(raised), str(raised)) == (type(error), str(error))
        assert isinstance(raised, errors.MegaclipError) and errors.is_temporary(raised) == (error is failed)


class OwnError(errors.DataError):
    """An error of a user's objective, whose arguments are not its message and cannot be pickled."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is wrong")
        self.value = value


def check_a_users_own_error(group: Any = None) -> None:
    """Check that all ranks raise a plain error with its message: no rank waits for one that cannot be sent."""
    raised = raised_on_all_ranks(fail_on({group_size(group) - 1}, OwnError("x", lambda: None), group), group)
    assert (type(raised), str(raised)) == (errors.MegaclipError, "x is wrong")


def check_errors_of_several_ranks(group: Any = None) -> None:
    """Check that all ranks raise the error of the lowest failing rank."""
    rank, size = group_rank(group), group_size(group)
    for first in range(size):
        failing = set(range(first, size))
        raised = raised_on_all_ranks(fail_on(failing, errors.CheckpointError(f"from rank {rank}"), group), group)
        assert (type(raised), str(raised)) == (errors.CheckpointError, f"from rank {first}")


def check_a_bug_of_one_rank(group: Any = None) -> None:
    """Check that the exception keeps its traceback on its own rank. The other ranks name that rank."""
    last = group_size(group) - 1
    raised = raised_on_all_ranks(broken if group_rank(group) == last else lambda: None, group)
    if group_rank(group) == last:
        assert type(raised) is KeyError
        assert "broken" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
    else:
        assert type(raised) is errors.MegaclipError
        assert str(raised).startswith(f"rank {last} failed with KeyError: 'oops'")


def check_a_bug_beside_a_users_error(group: Any = None) -> None:
    """The rank with the bug must raise it. The other ranks must raise the user's error of a higher rank."""
    rank, last = group_rank(group), group_size(group) - 1
    if last == 0:
        return
    raised = raised_on_all_ranks(broken if rank == 0 else fail_on({last}, errors.DataError("no shards"), group), group)
    assert (type(raised), str(raised)) == ((KeyError, "'oops'") if rank == 0 else (errors.DataError, "no shards"))


def check_everything(group: Any = None) -> None:
    check_collectives(group)
    check_ring(group)
    check_wait_for_all_ranks(group)
    assert raised_on_all_ranks(lambda: None, group) is None
    check_an_error_of_one_rank(group)
    check_a_users_own_error(group)
    check_errors_of_several_ranks(group)
    check_a_bug_of_one_rank(group)
    check_a_bug_beside_a_users_error(group)


def check_everything_logged() -> None:
    """Run all checks as in a run with "comms_logger" in its ds_config.json."""
    check_everything()
    dist.configure(enabled=True, prof_all=True)
    check_everything()
    assert {"all_reduce", "batch_isend_irecv"} <= set(dist.comm.comms_logger.comms_dict)


def check_groups() -> None:
    """Use all ranks, and a group of some ranks in an order that differs from the job's."""
    check_everything()
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            resolve(group)
    else:
        check_everything(group)
    check_nested_groups(group)


def check_nested_groups(group: Any) -> None:
    """An error on all ranks of a group must be raised on all ranks by the outer statement."""
    rank = dist.get_rank()

    def inner() -> None:
        if rank != 1:
            with raise_on_all_ranks(group=group):
                fail_on({2}, errors.DataError("from rank 2"))()

    raised = raised_on_all_ranks(inner)
    assert (type(raised), str(raised)) == (errors.DataError, "from rank 2")


@pytest.mark.parametrize(
    ("check", "world_size"), [(check_everything, 1), (check_everything_logged, 2), (check_groups, 3)]
)
def test_ring_collectives_and_errors(check: Callable[[], None], world_size: int) -> None:
    run_ranks(check, world_size)


def test_a_process_without_a_launcher_is_a_group_of_one() -> None:
    assert not torch.distributed.is_initialized()
    check_everything()
    with pytest.raises(ValueError, match=r"neither deepspeed\.comm nor torch\.distributed is initialised"):
        resolve(object())
