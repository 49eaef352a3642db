"""Find problems of hosts, and differences between hosts, in the facts that `megaclip.hosts.facts` has collected."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaclip.hosts.facts import HUB, Facts
from megaclip.hosts.hostfile import Host

CLOCK_LIMIT_S = 2.0
"""Largest allowed difference of a clock from the median clock, in seconds."""
SLOW_FACTOR = 1.5
"""A host is slow if its matrix product takes more than this many times as long as the median."""
SLOW_LINK_FACTOR = 2.0
"""A host's network is slow if its rate is this many times lower than the median."""


@dataclass(frozen=True)
class Problem:
    """One fault of one host."""

    host: str
    text: str
    """Description of the fault, and what to do."""


@dataclass(frozen=True)
class Report:
    """The facts of one host, or the reason why they are missing."""

    host: Host
    facts: Facts | None = None
    """None: the host could not be asked."""
    failure: str = ""
    """Reason why it could not be asked."""
    clock_s: float = 0.0
    """Its clock minus the clock of the machine that asks, in seconds."""
    clock_error_s: float = 0.0
    """Largest error of `clock_s`: half the time of the question and its answer."""
    network: str = ""
    """Reason why the host could not take part in the collectives, "" if it could."""
    mib_per_s: float | None = None
    """Rate of its data exchange with the first host, in MiB/s. None: the first host, or no test."""


def find_problems(reports: Sequence[Report], *, token: str, needed_gib: Mapping[str, float]) -> list[Problem]:
    """Return the problems of all hosts, in the order of the hosts.

    Args:
        reports: one per host.
        token: content of the token file, which every host must see; "" if it was not written.
        needed_gib: GiB that must be free, by folder.
    """
    known = {report.host.name: report.facts for report in reports if report.facts is not None}
    found = [Problem(report.host.name, _failure(report)) for report in reports if report.facts is None]
    found += _differences(known)
    for report in reports:
        if report.facts is not None:
            found += [Problem(report.host.name, text) for text in _own_problems(report, token, needed_gib)]
    found += _slow_hosts(known)
    found += _unequal_data(known)
    found += _clocks(reports)
    found += _networks(reports)
    place = {report.host.name: number for number, report in enumerate(reports)}
    return sorted(found, key=lambda problem: place[problem.host])


def _failure(report: Report) -> str:
    return f"cannot be asked: {report.failure}; `ssh {report.host.name} true` and the same paths must work"


def unusual(values: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (host, its value, the usual value) for each host that differs from the most frequent value.

    Of equally frequent values, that of the first host is the usual one.
    """
    if not values:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    yield from ((host, value, usual) for host, value in values.items() if value != usual)


def _differences(known: Mapping[str, Facts]) -> Iterator[Problem]:
    """Yield the hosts that differ from most others in a property that must be equal."""
    packages = sorted({package for facts in known.values() for package in facts.packages})
    advice = "install the same version on all hosts"
    compared = {"Python": ({name: facts.python for name, facts in known.items()}, advice)}
    for package in packages:
        compared[package] = ({name: facts.packages.get(package, "missing") for name, facts in known.items()}, advice)
    compared["commit"] = (
        {name: facts.commit for name, facts in known.items()},
        "check out the same commit without changes on all hosts",
    )
    compared["accelerators"] = (
        {name: facts.accelerator for name, facts in known.items()},
        "leave out the host, or look for a failed GPU with nvidia-smi",
    )
    compared["driver"] = (
        {name: facts.driver for name, facts in known.items()},
        "install the same driver on all hosts",
    )
    for what, (values, advice_here) in compared.items():
        for name, value, usual in unusual(values):
            yield Problem(name, f"{what}: {value or 'none'}, most hosts have {usual or 'none'}; {advice_here}")


def _own_problems(report: Report, token: str, needed_gib: Mapping[str, float]) -> Iterator[str]:
    """Yield the problems of one host that need no comparison."""
    facts = report.facts
    assert facts is not None
    if 0 < facts.accelerators < report.host.slots:
        yield (
            f"{facts.accelerators} GPUs for slots={report.host.slots}; correct the hostfile, or CUDA_VISIBLE_DEVICES"
        )
    if missing := sorted(name for name, built in facts.ops.items() if not built):
        if facts.can_compile:
            yield (
                f"{', '.join(missing)} not compiled; run  megaclip build-ops  there, or set TORCH_EXTENSIONS_DIR in "
                ".deepspeed_env"
            )
        else:
            yield f"{', '.join(missing)} not compiled, and g++ or ninja is not on PATH; install them, or set PATH"
    if not facts.matmul_is_right:
        yield "a matrix product is wrong: the GPU, processor or memory is broken; leave out the host"
    for folder, least in needed_gib.items():
        if (free := facts.free_gib.get(folder, 0.0)) < least:
            yield f"{free:g} GiB free in {folder}, {least:g} needed; delete files, or choose another folder"
    if token and facts.token != token:
        yield "does not see a file that this machine has written to --logs; mount the same file system there"
    for reason in _unseen(facts):
        yield f"{reason}; mount the data under the same path on all hosts"


def _slow_hosts(known: Mapping[str, Facts]) -> Iterator[Problem]:
    slowest = {name: max(facts.matmul_ms) for name, facts in known.items() if facts.matmul_ms}
    every = [milliseconds for facts in known.values() for milliseconds in facts.matmul_ms]
    if len(every) > 1:
        middle = statistics.median_low(every)
        for name, milliseconds in slowest.items():
            if milliseconds > SLOW_FACTOR * middle:
                which = known[name].matmul_ms.index(milliseconds)
                device = f"GPU {which}: " if known[name].accelerators else ""
                yield Problem(
                    name,
                    f"slow: {device}a matrix product takes {milliseconds:g} ms, on most hosts {middle:g} ms; end other "
                    "programs there, check for power or temperature limits, or leave out the host",
                )


def _unequal_data(known: Mapping[str, Facts]) -> Iterator[Problem]:
    """Yield the hosts that see another number of files than most others."""
    counts = {name: ", ".join(facts.data.values()) for name, facts in known.items() if not _unseen(facts)}
    for name, count, usual in unusual(counts):
        yield Problem(name, f"sees {count} of the data, and most hosts see {usual}; mount the same data there")


def _unseen(facts: Facts) -> list[str]:
    """Return the reasons why patterns of data match nothing on a host."""
    return [files for files in facts.data.values() if not files.endswith(" files") and files != HUB]


def _clocks(reports: Sequence[Report]) -> Iterator[Problem]:
    known = [report for report in reports if report.facts is not None]
    if not known:
        return
    middle = sorted(known, key=lambda report: report.clock_s)[(len(known) - 1) // 2]
    for report in known:
        difference_s = report.clock_s - middle.clock_s
        if abs(difference_s) > CLOCK_LIMIT_S + report.clock_error_s + middle.clock_error_s:
            yield Problem(
                report.host.name,
                f"its clock differs by {difference_s:+.1f} s; synchronise it, for example with chrony",
            )


def _networks(reports: Sequence[Report]) -> Iterator[Problem]:
    for report in reports:
        if report.network:
            yield Problem(report.host.name, report.network)
    rates = {report.host.name: report.mib_per_s for report in reports if report.mib_per_s is not None}
    if len(rates) < 2:
        return
    middle = statistics.median_high(rates.values())
    for name, rate in rates.items():
        if rate * SLOW_LINK_FACTOR < middle:
            yield Problem(
                name, f"slow network: {rate:.0f} MiB/s, most hosts {middle:.0f}; check its cable, switch and interface"
            )


def table(reports: Sequence[Report], problems: Sequence[Problem]) -> str:
    """Return the text of the report: a line per host, then a line per problem."""
    header = ("host", "slots", "accelerators", "Python", "torch", "commit", "clock s", "product ms", "MiB/s", "state")
    bad = {problem.host for problem in problems}
    rows: list[Sequence[str]] = [header]
    for report in reports:
        facts, state = report.facts, "problem" if report.host.name in bad else "ok"
        if facts is None:
            rows.append((report.host.name, str(report.host.slots), *["?"] * 7, state))
            continue
        rate = "-" if report.mib_per_s is None else f"{report.mib_per_s:.0f}"
        versions = (facts.accelerator, facts.python, facts.packages.get("torch", "missing"), facts.commit)
        product = f"{max(facts.matmul_ms, default=0.0):g}"
        rows.append(
            (report.host.name, str(report.host.slots), *versions, f"{report.clock_s:+.1f}", product, rate, state)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{problem.host}: {problem.text}" for problem in problems)])
