"""Find problems of hosts, and differences between hosts, in the reports of all ranks (`megaclip.hosts.facts`)."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megaclip.hosts.facts import HUB, HostFacts, Report

CLOCK_LIMIT_S = 2.0
"""Largest allowed difference of a clock from the median clock, in seconds."""
SLOW_FACTOR = 1.5
"""A rank is slow if its matrix product takes more than this many times as long as the median."""
SLOW_LINK_FACTOR = 2.0
"""A host's network is slow if its rate is this many times lower than the median."""


def find_problems(reports: Sequence[Report], *, token: str, min_free_gib: float) -> list[tuple[str, str]]:
    """Return (host, description of a fault and what to do) for all faults, in the order of the ranks.

    Args:
        reports: one per rank, in the order of the ranks.
        token: content of the token file, which every host must see; "" if it was not written.
        min_free_gib: GiB that must be free in --logs.
    """
    hosts = {report.host: report.facts for report in reports if report.facts is not None}
    first = [report for report in reports if report.facts is not None]
    found = list(_differences(hosts))
    for name, facts in hosts.items():
        found += [(name, text) for text in _own_problems(facts, token, min_free_gib)]
    found += [(report.host, text) for report in reports for text in _device_problems(report)]
    found += _slow_devices(reports)
    counts = {name: ", ".join(facts.data.values()) for name, facts in hosts.items() if not _unseen(facts)}
    for name, count, usual in _unusual(counts):
        found.append((name, f"sees {count} of the data, and most hosts see {usual}; mount the same data there"))
    middle_s = statistics.median_low(report.time_s for report in first)
    for report in first:
        if abs(difference_s := report.time_s - middle_s) > CLOCK_LIMIT_S:
            text = f"its clock differs by {difference_s:+.1f} s; synchronise it, for example with chrony"
            found.append((report.host, text))
    found += _slow_networks(reports)
    return sorted(found, key=lambda problem: list(hosts).index(problem[0]))


def _unusual(values: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (host, its value, the usual value) for each host that differs from the most frequent value.

    Of equally frequent values, that of the first host is the usual one.
    """
    if not values:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    yield from ((host, value, usual) for host, value in values.items() if value != usual)


def _differences(hosts: Mapping[str, HostFacts]) -> Iterator[tuple[str, str]]:
    """Yield the hosts that differ from most others in a property that must be equal."""
    install = "install the same version on all hosts"
    compared = {"Python": ({name: facts.python for name, facts in hosts.items()}, install)}
    for package in sorted({package for facts in hosts.values() for package in facts.packages}):
        compared[package] = ({name: facts.packages.get(package, "missing") for name, facts in hosts.items()}, install)
    for what, field, advice in (
        ("commit", "commit", "check out the same commit without changes on all hosts"),
        ("accelerators", "accelerators", "leave out the host, or look for a failed GPU with nvidia-smi"),
        ("driver", "driver", "install the same driver on all hosts"),
    ):
        compared[what] = ({name: getattr(facts, field) for name, facts in hosts.items()}, advice)
    for what, (values, advice) in compared.items():
        for name, value, usual in _unusual(values):
            yield name, f"{what}: {value or 'none'}, most hosts have {usual or 'none'}; {advice}"


def _own_problems(facts: HostFacts, token: str, min_free_gib: float) -> Iterator[str]:
    """Yield the problems of one host that need no comparison."""
    if missing := ", ".join(sorted(name for name, built in facts.ops.items() if not built)):
        if facts.can_compile:
            yield f"{missing} not compiled; run  megaclip build-ops  there, or set TORCH_EXTENSIONS_DIR"
        else:
            yield f"{missing} not compiled, and g++ or ninja is not on PATH; install them, or set PATH"
    if facts.free_gib is not None and facts.free_gib < min_free_gib:
        yield f"{facts.free_gib:g} GiB free in --logs, {min_free_gib:g} needed; delete files, or choose another folder"
    if token and facts.token != token:
        yield "does not see a file that the first host has written to --logs; mount the same file system there"
    for reason in _unseen(facts):
        yield f"{reason}; mount the data under the same path on all hosts"


def _device_problems(report: Report) -> Iterator[str]:
    if report.matmul_ms is None:
        yield f"no GPU for local rank {report.local_rank}; correct --nproc-per-node, or CUDA_VISIBLE_DEVICES"
    if not report.matmul_is_right:
        device = f"local rank {report.local_rank}"
        yield f"a matrix product of {device} is wrong: the GPU, processor or memory is broken; leave out the host"
    if report.network:
        yield f"local rank {report.local_rank}: {report.network}"


def _slow_devices(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    known = {(one.host, one.local_rank): one.matmul_ms for one in reports if one.matmul_ms is not None}
    if len(known) > 1:
        middle = statistics.median_low(known.values())
        for (host, local_rank), milliseconds in known.items():
            if milliseconds > SLOW_FACTOR * middle:
                yield (
                    host,
                    f"slow: a matrix product of local rank {local_rank} takes {milliseconds:g} ms, on most ranks "
                    f"{middle:g} ms; end other programs there, check for power or temperature limits, or leave out the "
                    "host",
                )


def _slow_networks(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    rates = {report.host: report.mib_per_s for report in reports if report.mib_per_s is not None}
    if len(rates) > 1:
        middle = statistics.median_high(rates.values())
        for host, rate in rates.items():
            if rate * SLOW_LINK_FACTOR < middle:
                text = f"{rate:.0f} MiB/s, most hosts {middle:.0f}; check its cable, switch and interface"
                yield host, f"slow network: {text}"


def _unseen(facts: HostFacts) -> list[str]:
    """Return the reasons why patterns of data match nothing on a host."""
    return [files for files in facts.data.values() if not files.endswith(" files") and files != HUB]


def table(reports: Sequence[Report], problems: Sequence[tuple[str, str]]) -> str:
    """Return the text of the report: a line per host, then a line per problem."""
    rows = [("host", "ranks", "accelerators", "Python", "torch", "commit", "product ms", "MiB/s", "state")]
    bad = {host for host, _ in problems}
    for report in reports:
        if (facts := report.facts) is None:
            continue
        own = [other for other in reports if other.host == report.host]
        product = f"{max(other.matmul_ms or 0.0 for other in own):g}"
        rate = "-" if report.mib_per_s is None else f"{report.mib_per_s:.0f}"
        versions = (facts.accelerators, facts.python, facts.packages.get("torch", "missing"), facts.commit)
        state = "problem" if report.host in bad else "ok"
        rows.append((report.host, str(len(own)), *versions, product, rate, state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{host}: {text}" for host, text in problems)])
