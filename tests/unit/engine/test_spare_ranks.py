"""Ranks that the batch cannot use: how many take part, and how the others learn the end of the run."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from megaclip.engine import spare_ranks
from megaclip.errors import ConfigError


class Config:
    """A configuration whose batch of 32 is divided by 1, 2, 4 or 8 ranks."""

    path = "ds_config.json"

    def batch_layout(self, ranks):
        if ranks not in (1, 2, 4, 8):
            raise ConfigError("train_batch_size is not divisible")
        return SimpleNamespace()


def test_the_largest_number_of_ranks_that_divides_the_batch_takes_part():
    assert [spare_ranks.usable_ranks(Config(), ranks) for ranks in (1, 3, 7, 8, 9)] == [1, 2, 4, 8, 8]


def set_ranks(monkeypatch, rank, **variables):
    values = {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "3", "RANK": str(rank), **variables}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_takes_part_sees_the_smaller_world(monkeypatch):
    set_ranks(monkeypatch, 1)
    assert spare_ranks.wait_if_spare(Config()) is None
    assert spare_ranks.os.environ["WORLD_SIZE"] == "2"


def test_a_store_that_survives_restarts_is_refused(monkeypatch):
    set_ranks(monkeypatch, 2, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        spare_ranks.wait_if_spare(Config())


def test_a_spare_rank_ends_with_the_exit_code_of_the_first_rank_and_not_with_sigusr1(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_ranks(monkeypatch, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), MEGACLIP_SPARE_RANKS="1")
    ended = []

    def end_the_run() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm does before the time limit
        monkeypatch.setattr(spare_ranks, "rank_from_environment", lambda: 0)
        monkeypatch.setattr(spare_ranks.torch.distributed, "is_initialized", lambda: True)
        ended.append(time.monotonic())
        spare_ranks.end_spare_ranks(75)

    before = signal.getsignal(signal.SIGUSR1)
    first_rank = threading.Timer(1.0, end_the_run)
    first_rank.start()
    try:
        assert spare_ranks.wait_if_spare(Config()) == 75
        assert ended and time.monotonic() >= ended[0]  # it has waited for the run
    finally:
        first_rank.join()
        signal.signal(signal.SIGUSR1, before)
