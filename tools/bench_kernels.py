"""List the GPU time of a step for tools/bench_train.py --kernels: groups of kernels, kernels, and pauses.

A pause is a time in which no kernel runs, because the host has not yet launched the next kernel or waits for the GPU.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GROUPS = {
    "attention": r"sdpa|fmha|flash",
    "loss": r"_tile_|_rows_kernel",
    "fused by torch.compile": r"^triton_",
    "products": r"gemm|nvjet|cutlass|cublas|splitk|xmma",
    "optimizer and norms of gradients": r"adam|multi_tensor|lpnorm|foreach",
    "copies": r"memcpy|memset|copy_kernel|CatArray|fill",
    "communication": r"nccl",
}
"""Group -> pattern of its kernels' names, in the order in which they are tried."""
SHORTEST_PAUSE_MS = 0.02


class Span(NamedTuple):
    """One kernel or copy on the GPU: its name, start and end in ms."""

    name: str
    start: float
    end: float


@dataclass
class StepKernels:
    """The GPU's time in one step, in ms."""

    total: float
    """Time from the start of the first kernel to the end of the last kernel."""
    busy: float
    """Time in which at least one kernel runs."""
    launches: int
    groups: dict[str, float] = field(default_factory=dict)
    kernels: list[tuple[str, float, int]] = field(default_factory=list)
    """Name, time and number of calls of each kernel, longest time first."""
    pauses: list[tuple[float, str, str]] = field(default_factory=list)
    """Length of each pause, with the kernels before and after it, longest first."""


def step_kernels(step: Callable[[], Any]) -> StepKernels:
    """Run one step on a GPU and return its kernels."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return summary([Span(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events])


def summary(spans: Sequence[Span]) -> StepKernels:
    """Return the sums over the kernels of a step, which may run at the same time on several streams."""
    spans = sorted(spans, key=lambda span: span.start)
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    groups: dict[str, float] = defaultdict(float)
    pauses = []
    busy, last, ended = 0.0, spans[0], spans[0].start
    for span in spans:
        times[span.name] += span.end - span.start
        counts[span.name] += 1
        groups[group_of(span.name)] += span.end - span.start
        if span.start - ended > SHORTEST_PAUSE_MS:
            pauses.append((span.start - ended, last.name, span.name))
        busy += max(0.0, span.end - max(span.start, ended))
        if span.end > ended:
            last, ended = span, span.end
    return StepKernels(
        total=ended - spans[0].start,
        busy=busy,
        launches=len(spans),
        groups=dict(sorted(groups.items(), key=lambda one: -one[1])),
        kernels=[(name, time, counts[name]) for name, time in sorted(times.items(), key=lambda one: -one[1])],
        pauses=sorted(pauses, reverse=True),
    )


def group_of(name: str) -> str:
    """Return the group of a kernel."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def table(kernels: StepKernels, most: int) -> str:
    """Return the groups, the `most` longest kernels and the `most` longest pauses as text."""
    lines = [
        f"  {kernels.total:9.2f} ms from the first kernel to the last, {kernels.busy:.2f} ms busy, "
        f"{kernels.total - kernels.busy:.2f} ms in pauses, {kernels.launches} launches"
    ]
    lines += [f"  {time:9.2f} ms  {group}" for group, time in kernels.groups.items()]
    lines += [f"  {time:9.2f} ms {count:6} x {name[:110]}" for name, time, count in kernels.kernels[:most]]
    for length, before, after in kernels.pauses[:most]:
        lines.append(f"  {length:9.2f} ms pause between {before[:50]} and {after[:50]}")
    return "\n".join(lines)
