"""The ring, the collectives and shared errors on 1 to 3 ranks, against what their descriptions say."""

import math
import re
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from megaclip import errors
from megaclip.comm import ring
from megaclip.comm.collectives import (
    gather_integers,
    gather_objects,
    gather_rows,
    raise_together,
    reduce_scatter_log_sum_exp,
    reduce_scatter_rows,
    sum_over_ranks,
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
    assert mine.tolist() == [[rank, 10], [rank, 20]], "an argument was written to"
    assert gather_integers([rank, -(2**40)], group=group) == [[owner, -(2**40)] for owner in range(size)]
    assert gather_objects({"rank": rank}, group=group) == [{"rank": owner} for owner in range(size)]

    rows = torch.arange(size * 2.0)[:, None] * (rank + 1)
    expected = [[(2 * rank + row) * size * (size + 1) / 2] for row in range(2)]
    assert reduce_scatter_rows(rows, group=group).tolist() == expected

    # Exponentials that overflow float32; element 1 has something on the last rank only, element 2 nowhere.
    values = torch.tensor([1000.0 + rank, -900.0 if rank == size - 1 else -math.inf, -math.inf]).repeat(size)
    merged = reduce_scatter_log_sum_exp(values, group=group).double()
    top = 1000 + math.log(sum(math.exp(owner) for owner in range(size)))
    assert_close(merged, torch.tensor([top, -900, -math.inf]).double(), WRITTEN)


def check_ring(group: Any = None) -> None:
    """Every block is seen once, own first; what is carried for it comes home with a part from every rank."""
    ranks = resolve(group)
    posted: list[str] = []
    batch_isend_irecv = dist.batch_isend_irecv

    def recording(operations: list[Any]) -> Any:
        posted.append("block" if operations[0].tag < 100 else "carried")
        return batch_isend_irecv(operations)

    ring.dist.batch_isend_irecv = recording
    seen = []
    carried = ring.Carried(lambda arrived, part: tuple(a + b for a, b in zip(arrived, part, strict=True)), group=group)
    block = torch.full((3, 2), float(ranks.rank)), torch.full((3,), ranks.rank + 0.5, dtype=torch.float64)
    for hop, (owner, (features, terms)) in enumerate(ring.circulate(block, group=group)):
        assert features.unique().tolist() == [owner] and terms.unique().tolist() == [owner + 0.5]
        # The next block is under way before this one is worked on; the last hop has no next.
        assert posted.count("block") == min(hop + 1, ranks.size - 1)
        seen.append(owner)
        carried.add((features + 10 * (ranks.rank + 1), torch.tensor([float(ranks.rank)])))
    total, visitors = carried.home()
    ring.dist.batch_isend_irecv = batch_isend_irecv
    assert seen == [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]
    assert posted.count("carried") == (ranks.size if ranks.size > 1 else 0)
    everyone = sum(range(ranks.size))
    assert total.unique().tolist() == [ranks.size * ranks.rank + 10 * (everyone + ranks.size)]
    assert visitors.tolist() == [everyone]


def check_raise_together() -> None:
    raise_together(None)
    last = group_size() - 1
    for error in (errors.DataError("expected shards, got none"), errors.ConfigError("x")):
        with pytest.raises(type(error), match=re.escape(str(error))):
            raise_together(error if group_rank() == last else None)
    with pytest.raises(errors.CheckpointError, match=r"^from rank 0$"):
        raise_together(errors.CheckpointError(f"from rank {group_rank()}"))

    # A bug keeps its own exception where it happened; its peers learn which rank to look at.
    bug = KeyError("oops") if group_rank() == last else None
    with pytest.raises(Exception) as caught:
        raise_together(bug)
    if bug is not None:
        assert caught.value is bug
    else:
        assert type(caught.value) is errors.MegaclipError
        assert str(caught.value).startswith(f"rank {last} failed with KeyError: 'oops'")


def check_everything() -> None:
    check_collectives()
    check_ring()
    check_raise_together()


def check_everything_logged() -> None:
    """As a run with "comms_logger" in its ds_config.json."""
    dist.configure(enabled=True, prof_all=True)
    check_everything()
    assert {"all_reduce", "batch_isend_irecv"} <= set(dist.comm.comms_logger.comms_dict)


def check_groups() -> None:
    """A group of some ranks, in another order than the job's."""
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            resolve(group)
        return
    check_collectives(group)
    check_ring(group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ring_collectives_and_errors(world_size: int) -> None:
    run_ranks(check_everything, world_size)


def test_they_run_under_deepspeeds_comms_logger() -> None:
    run_ranks(check_everything_logged, 2)


def test_groups_of_some_ranks() -> None:
    run_ranks(check_groups, 3)


def test_plain_python_is_a_group_of_one() -> None:
    assert not torch.distributed.is_initialized()
    check_everything()
    with pytest.raises(ValueError, match=r"neither deepspeed\.comm nor torch\.distributed is initialised"):
        resolve(object())
