"""Ranks that the batch cannot use: how many take part, and how the others learn the end of the run."""

import threading
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


def test_a_spare_rank_ends_with_the_exit_code_of_the_first_rank(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_ranks(monkeypatch, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    codes = []
    waiting = threading.Thread(target=lambda: codes.append(spare_ranks.wait_if_spare(Config())))
    waiting.start()
    waiting.join(1.0)
    assert codes == []  # the run has not ended
    monkeypatch.setattr(spare_ranks, "rank_from_environment", lambda: 0)
    monkeypatch.setattr(spare_ranks.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("MEGACLIP_SPARE_RANKS", "1")
    spare_ranks.end_spare_ranks(75)
    waiting.join(10.0)
    assert codes == [75]
