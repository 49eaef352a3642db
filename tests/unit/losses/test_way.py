"""The choice of exchange and reduction for "auto": the cost model in cases whose best choice is evident."""

import pytest
import torch

from megaclip import logging
from megaclip.comm.groups import NodeGroup, RankGroup
from megaclip.comm.machine import CPU, Machine, machine_of
from megaclip.losses import way
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.settings import LossSettings

FAST_LINKS = Machine(link_bytes_per_s=1e15, flops_per_s=1e12, free_bytes=2**36)
SLOW_LINKS = Machine(link_bytes_per_s=1e6, flops_per_s=1e18, free_bytes=2**36)
BALANCED = Machine(link_bytes_per_s=1e10, flops_per_s=1e13, free_bytes=2**36)


PAIR = RankGroup(handle=None, rank=0, size=2)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    batch: int,
    exchange: str = "auto",
    reduction: str = "auto",
    nodes: int = 2,
    loss: str = "clip",
) -> tuple[str, str]:
    """Return the exchange and reduction for 4 ranks of such machines on this many nodes."""
    monkeypatch.setattr(way, "machine_of", lambda ranks, device: machine)
    on_two_nodes = NodeGroup(handle=None, rank=0, size=4, inner=PAIR, outer=PAIR)
    monkeypatch.setattr(way, "by_node", lambda ranks: on_two_nodes if nodes == 2 else ranks)
    made = way.make_way(
        torch.empty(batch, 512, dtype=torch.bfloat16, device="meta"),
        ranks=RankGroup(handle=None, rank=0, size=4),
        settings=LossSettings.model_validate({"exchange": exchange, "reduction": reduction}),
        tiles=way.TileOptions(),
        cost=LOSS_COSTS[loss],
    )
    return made.exchange, made.reduction


def test_each_way_is_chosen_where_it_is_evidently_best(monkeypatch: pytest.MonkeyPatch) -> None:
    # Links cost nothing, so the fewest products win, and no hops.
    assert chosen(monkeypatch, FAST_LINKS, 1024) == ("all_gather", "feature")
    # Products cost nothing, so the fewest bytes win (2 x 2 bytes per element against 2 + 4).
    assert chosen(monkeypatch, SLOW_LINKS, 1024) == ("all_gather", "scalar")
    # Both cost time, and tiles take long enough to hide the exchange of a ring. Within a node a ring hides nothing.
    assert chosen(monkeypatch, BALANCED, 16384) == ("ring", "feature")
    assert chosen(monkeypatch, BALANCED, 16384, nodes=1) == ("all_gather", "feature")


def test_the_sigmoid_loss_costs_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sigmoid loss needs fewer products and fewer bytes than InfoNCE.

    Bytes per element: ring 3 x 2 + 4 x 4 = 22 (InfoNCE 28), all_gather 3 x 2 + 3 x 4 = 18. At these rates 6 products
    take as long as 6.7 bytes, and 8 as long as 9. A ring hides the exchange, all_gather adds it: max(6.7, 22) < 6.7 +
    18, but max(9, 28) > 9 + 18.
    """
    between = Machine(link_bytes_per_s=1e10, flops_per_s=5.8e14, free_bytes=2**36)
    assert chosen(monkeypatch, between, 16384, reduction="feature") == ("all_gather", "feature")
    assert chosen(monkeypatch, between, 16384, reduction="feature", loss="siglip") == ("ring", "feature")


def test_memory_and_settings_limit_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    little = FAST_LINKS._replace(free_bytes=2**20)
    assert chosen(monkeypatch, little, 1024) == ("ring", "feature")
    # Features of 4 ranks with 2 bytes and gradients with 4 bytes: 4 x 1024 x 512 x 6 bytes are 12 MiB.
    assert chosen(monkeypatch, FAST_LINKS._replace(free_bytes=23 * 2**20), 1024) == ("ring", "feature")
    assert chosen(monkeypatch, FAST_LINKS._replace(free_bytes=25 * 2**20), 1024) == ("all_gather", "feature")
    assert chosen(monkeypatch, little, 1024, exchange="all_gather") == ("all_gather", "feature")
    assert chosen(monkeypatch, SLOW_LINKS, 1024, exchange="ring") == ("ring", "scalar")
    assert chosen(monkeypatch, FAST_LINKS, 1024, reduction="scalar") == ("all_gather", "scalar")


def test_the_choice_and_its_estimates_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging, "_seen", set())
    monkeypatch.setattr(way._logger, "info", lines.append)
    chosen(monkeypatch, BALANCED, 16384)
    chosen(monkeypatch, BALANCED, 16384)
    line, ring = lines
    assert ring == "ring: inside each of 2 hosts, and from host to host"
    assert line.startswith("loss: ring + feature (estimates: ring + feature ")
    assert (
        "all_gather + scalar" in line and "links 10 GB/s, products 10 TFLOP/s" in line and "65536 MiB are free" in line
    )


def test_the_figures_of_a_cpu_are_fixed_so_that_runs_repeat() -> None:
    assert machine_of(RankGroup(handle=None, rank=0, size=4), torch.device("cpu")) is CPU
