"""Find differences between hosts in the reports of all ranks (`megaclip.hosts.facts`), and print a table."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from megaclip.hosts.facts import Report

CLOCK_LIMIT_S = 2.0
"""Largest allowed difference of a clock from the median clock, in seconds."""
SLOW_FACTOR = 1.5
"""A rank is slow if its matrix product takes more than this many times as long as the median."""
SLOW_LINK_FACTOR = 2.0
"""A host's network is slow if its rate is this many times lower than the median."""
_ADVICE = {
    "commit": "check out the same commit without changes on all hosts",
    "accelerators": "leave out the host, or look for a failed GPU with nvidia-smi",
    "data": "mount the same data there",
}
"""What to do about a difference, by the first word of the property. For all others: install the same version."""


def find_problems(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Return (host, description of a fault and what to do) for all faults, in the order of the ranks.

    reports: one per rank, in the order of the ranks.
    """
    order = list(dict.fromkeys(one.host for one in reports))
    found = [(one.host, text) for one in reports for text in one.problems]
    for differences in (_properties, _clocks, _devices, _networks):
        found += differences(reports)
    return sorted(found, key=lambda problem: order.index(problem[0]))


def _properties(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Yield the hosts that differ from the most frequent value, or from the first of equally frequent values."""
    for name in dict.fromkeys(name for one in reports for name in one.properties):
        values = {one.host: one.properties[name] for one in reports if name in one.properties}
        usual = Counter(values.values()).most_common(1)[0][0]
        advice = _ADVICE.get(name.split()[0], "install the same version on all hosts")
        for host, value in values.items():
            if value != usual:
                yield host, f"{name}: {value}, most hosts have {usual}; {advice}"


def _clocks(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    times_s = {one.host: one.time_s for one in reports if one.properties}
    middle_s = statistics.median_low(times_s.values())
    for host, time_s in times_s.items():
        if abs(time_s - middle_s) > CLOCK_LIMIT_S:
            yield host, f"its clock differs by {time_s - middle_s:+.1f} s; synchronise it, for example with chrony"


def _devices(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    timed = [(one, one.product_ms) for one in reports if one.product_ms is not None]
    middle_ms = statistics.median_low([product_ms for _, product_ms in timed] or [0.0])
    for one, product_ms in timed:
        if product_ms > SLOW_FACTOR * middle_ms:
            slow = f"slow: a matrix product of local rank {one.local_rank} takes {product_ms:g} ms"
            advice = "end other programs there, check for power or temperature limits, or leave out the host"
            yield one.host, f"{slow}, on most ranks {middle_ms:g} ms; {advice}"


def _networks(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    rates = {one.host: one.mib_per_s for one in reports if one.mib_per_s is not None}
    middle = statistics.median_high(rates.values() or [0.0])
    for host, rate in rates.items():
        if rate * SLOW_LINK_FACTOR < middle:
            text = f"slow network: {rate:.0f} MiB/s, most hosts {middle:.0f}"
            yield host, f"{text}; check its cable, switch and interface"


def table(reports: Sequence[Report], problems: Sequence[tuple[str, str]]) -> str:
    """Return the text of the report: a line per host, then a line per problem."""
    columns = ("accelerators", "Python", "torch", "commit")
    rows: list[tuple[str, ...]] = [("host", "ranks", *columns, "product ms", "MiB/s", "state")]
    bad = {host for host, _ in problems}
    for one in reports:
        if one.properties:
            own = [other for other in reports if other.host == one.host]
            product = f"{max(other.product_ms or 0.0 for other in own):g}"
            rate = "-" if one.mib_per_s is None else f"{one.mib_per_s:.0f}"
            values = (one.properties[column] for column in columns)
            rows.append((one.host, str(len(own)), *values, product, rate, "problem" if one.host in bad else "ok"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{host}: {text}" for host, text in problems)])
