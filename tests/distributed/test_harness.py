"""The harness returns results in rank order, and reports failed, dead and hanging ranks within the time limit."""

import os
import time

import deepspeed.comm as dist
import pytest
import torch

from tests.distributed.harness import RankFailure, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def stall() -> None:
    time.sleep(600)


def test_results_are_in_rank_order() -> None:
    assert run_ranks(sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"rank 1(.|\n)*fail_on_rank_1(.|\n)*KeyError: 'the reason'"):
        run_ranks(fail_on_rank_1, 2)


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RankFailure, match="rank 0 ---\nended without a report, exit code 7"):
        run_ranks(die_on_rank_0, 2)


def test_stalled_ranks_end_at_the_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not finish within 3 s"):
        run_ranks(stall, 2, time_limit_s=3)
    assert time.monotonic() - started < 300
