"""Measured traffic equals the formulas on 4 ranks, for every exchange and reduction, FastCLIP, and both baselines.

Features are in bfloat16 and in float32, with several sizes. The proportions of features, gradients and per-sample
values differ between them, so a formula with a wrong proportion fails.
"""

import itertools
from dataclasses import replace
from functools import partial

import torch

from megaclip.comm.groups import group_size
from megaclip.losses import LOSSES, ClipLoss, SigLipLoss
from megaclip.losses.costs import LOSS_COSTS, Sizes
from megaclip.losses.fastclip_variants import VARIANTS
from tests.distributed.harness import run_ranks
from tools.bench_comm import FastClipStep, disco_clip_step, measure, open_clip_step, schemes
from tools.peers import disco_clip_traffic, open_clip_traffic
from tools.volume import bytes_sent

SHAPES = [(4, 8, torch.bfloat16), (12, 24, torch.float32)]


def check_formulas() -> list[str]:
    found = []
    for batch, embedding, dtype in SHAPES:
        sizes = Sizes(group_size(), batch, embedding, feature_bytes=dtype.itemsize)
        half = replace(sizes, feature_bytes=2, gradient_bytes=2)
        x, y = (torch.randn(batch, embedding, dtype=dtype).requires_grad_() for _ in range(2))
        for exchange, reduction in itertools.product(("ring", "all_gather"), ("feature", "scalar")):
            loss = ClipLoss(exchange=exchange, reduction=reduction)
            got = sum(bytes_sent(lambda loss=loss, x=x, y=y: loss(x, y, torch.tensor(5.0)).backward()).values())
            expected = LOSS_COSTS["clip"].traffic(exchange, reduction, sizes).total
            if got != expected:
                found.append(f"{exchange} + {reduction} at {sizes}: sent {got}, formula {expected}")
            loss = ClipLoss(exchange=exchange, reduction=reduction, payload="bf16")
            got = sum(bytes_sent(lambda loss=loss, x=x, y=y: loss(x, y, torch.tensor(5.0)).backward()).values())
            if got != (expected := LOSS_COSTS["clip"].traffic(exchange, reduction, half).total):
                found.append(f"{exchange} + {reduction} in bf16 at {sizes}: sent {got}, formula {expected}")
            for payload, wire in (("auto", sizes), ("bf16", half)):
                sigmoid = SigLipLoss(exchange=exchange, reduction=reduction, payload=payload)
                scale, bias = torch.tensor(5.0), torch.tensor(-3.0)
                got = sum(bytes_sent(lambda loss=sigmoid, x=x, y=y: loss(x, y, scale, bias).backward()).values())  # noqa: B023
                if got != (expected := LOSS_COSTS["siglip"].traffic(exchange, reduction, wire).total):
                    found.append(f"sigmoid, {exchange} + {reduction}, {payload} at {sizes}: {got}, formula {expected}")
            for kind, meaning in itertools.product(("clip", "siglip"), ("mask", "positive")):
                loss = LOSSES[kind](exchange=exchange, reduction=reduction, ids=meaning)
                run = partial(loss, x, y, torch.tensor(5.0), ids=torch.arange(batch))
                got = sum(bytes_sent(lambda run=run: run().backward()).values())
                expected = LOSS_COSTS[kind].traffic(exchange, reduction, replace(sizes, ids=meaning)).total
                if got != expected:
                    found.append(f"{kind} {meaning}, {exchange} + {reduction} at {sizes}: {got}, formula {expected}")
            for variant in VARIANTS:
                step = FastClipStep(variant, exchange, reduction)
                got = sum(bytes_sent(lambda step=step, x=x, y=y: step(x, y)).values())
                expected = LOSS_COSTS[variant].traffic(exchange, reduction, sizes).total
                if got != expected:
                    found.append(f"{variant}, {exchange} + {reduction} at {sizes}: sent {got}, formula {expected}")
        for step, formula in ((open_clip_step, open_clip_traffic), (disco_clip_step, disco_clip_traffic)):
            got = sum(bytes_sent(lambda step=step, x=x, y=y: step(x.detach(), y.detach())).values())
            if got != formula(sizes).total:
                found.append(f"{step.__name__} at {sizes}: sent {got}, formula {formula(sizes).total}")
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
