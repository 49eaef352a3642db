"""Measured traffic equals the formulas on 4 ranks, for every exchange and reduction, FastCLIP, and both baselines.

Features are in bfloat16 and in float32, with several sizes. The proportions of features, gradients and per-sample
values differ between them, so a formula with a wrong proportion fails.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megaclip.comm.groups import group_size
from megaclip.losses import LOSSES
from megaclip.losses.costs import LOSS_COSTS, Sizes, Traffic
from megaclip.losses.settings import VARIANTS
from tests.distributed.harness import run_ranks
from tools.bench_comm import FastClipStep, disco_clip_step, measure, open_clip_step, schemes
from tools.peers import disco_clip_traffic, open_clip_traffic
from tools.volume import bytes_sent

SHAPES = [(4, 8, torch.bfloat16), (12, 24, torch.float32)]
VALUES = [("auto", "ignore"), ("bf16", "ignore"), ("auto", "mask"), ("auto", "positive")]
"""Payload and ids."""


def run(loss: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> None:
    loss(*arguments, **named).backward()


def check_formulas() -> list[str]:
    found: list[str] = []

    def check(name: str, step: Callable[[], Any], formula: Traffic) -> None:
        if (got := sum(bytes_sent(step).values())) != formula.total:
            found.append(f"{name} with {dtype}: sent {got}, formula {formula.total}")

    for batch, embedding, dtype in SHAPES:
        sizes = Sizes(group_size(), batch, embedding, feature_bytes=dtype.itemsize)
        x, y = (torch.randn(batch, embedding, dtype=dtype).requires_grad_() for _ in range(2))
        for exchange, reduction in itertools.product(("ring", "all_gather"), ("feature", "scalar")):
            way = f"{exchange} + {reduction}"
            for kind, (payload, ids) in itertools.product(("clip", "siglip"), VALUES):
                loss = LOSSES[kind](exchange=exchange, reduction=reduction, payload=payload, ids=ids)
                given = {} if ids == "ignore" else {"ids": torch.arange(batch)}
                step = partial(run, loss, x, y, torch.tensor(5.0), **given)
                wire = replace(sizes, ids=ids)
                wire = replace(wire, feature_bytes=2, gradient_bytes=2) if payload == "bf16" else wire
                formula = LOSS_COSTS[kind].traffic(exchange, reduction, wire)
                check(f"{kind}, {payload}, {ids}, {way}", step, formula)
            for variant in VARIANTS:
                step = partial(FastClipStep(variant, exchange, reduction), x, y)
                check(f"{variant}, {way}", step, LOSS_COSTS[variant].traffic(exchange, reduction, sizes))
        for step, formula in ((open_clip_step, open_clip_traffic), (disco_clip_step, disco_clip_traffic)):
            check(step.__name__, partial(step, x.detach(), y.detach()), formula(sizes))
    return found


def check_parts() -> list[str]:
    """Compare each part that the benchmark measures with its formula."""
    return [
        f"{name}: measured {measured}, formula {formula}"
        for name, step, formula in schemes(4, 8)
        if (measured := measure(step, 4, 8)) != formula
    ]


def check_all() -> list[str]:
    return check_formulas() + check_parts()


def test_measured_bytes_equal_the_formulas() -> None:
    assert run_ranks(check_formulas, 1) == [[]]  # one rank sends nothing
    assert run_ranks(check_all, 4) == [[]] * 4
