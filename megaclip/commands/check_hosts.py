"""Check the hosts of a hostfile before a run: software, GPUs, clocks, disks, data, network, and speed.

    megaclip check-hosts --hostfile launch/hostfile --logs /shared/runs --train-data '/shared/shards/*.tar'
    megaclip check-hosts --hostfile launch/hostfile -- --deepspeed_config zero3 ...     # the arguments of a run

asks all hosts through pdsh, compares them, and prints one line per host and one per problem. It measures a matrix
product on every GPU and the network of every host, so that a slow host is named. `launch/multi_node.sh --check_hosts`
does the same before it starts the run. The exit code is 1 if there is a problem.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megaclip.commands.argument_types import integer, number
from megaclip.config import parse_arguments
from megaclip.errors import ConfigError, MegaclipError
from megaclip.files import write_atomically
from megaclip.hosts import compare, network
from megaclip.hosts.compare import Report
from megaclip.hosts.facts import Facts, collect
from megaclip.hosts.hostfile import Host, read_hostfile
from megaclip.hosts.network import NetworkResult
from megaclip.hosts.remote import run_on_host

Answer = TypeVar("Answer", bound=BaseModel)

FACTS_LIMIT_S = 300.0
"""Seconds that a host has to answer; it imports PyTorch from a shared file system."""
MARK = "MEGACLIP_ANSWER "
"""Prefix of the line with a host's answer. Login shells may print other lines."""


def main(argv: list[str] | None = None) -> int:
    arguments = argument_parser().parse_args(argv)
    if arguments.on_host is not None:
        print(MARK + answer(json.loads(arguments.on_host)).model_dump_json())
        return 0
    try:
        return check(arguments)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hostfile", type=Path, default=Path("launch/hostfile"), help="default: %(default)s")
    parser.add_argument("--master_addr", default="", help="address of the first host (default: its name)")
    parser.add_argument("--master_port", type=integer(1), default=29500, help="port to test (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder that all hosts must share")
    parser.add_argument("--train-data", nargs="*", default=[], metavar="DATA", help="data that all hosts must see")
    parser.add_argument(
        "--min-free-gib", type=number(0), default=10.0, help=("required free space in --logs, in GiB (default: 10)")
    )
    parser.add_argument("--on_host", metavar="JSON", help=argparse.SUPPRESS)  # the part that runs on each host
    parser.add_argument("training", nargs=argparse.REMAINDER, help="arguments of launch/train.py, after --")
    return parser


def answer(question: dict[str, Any]) -> BaseModel:
    """Return this host's answer to a question of `check`."""
    if question["what"] == "network":
        return network.measure(question["rank"], question["hosts"], question["address"], question["port"])
    shared = Path(question["shared"]) if question["shared"] else None
    return collect(shared=shared, token=question["token"], data=question["data"])


def check(arguments: argparse.Namespace) -> int:
    """Check all hosts, print the table, and return the exit code.

    Raises:
        ConfigError: the hostfile or the command line is refused.
    """
    hosts = read_hostfile(arguments.hostfile)
    logs, data = arguments.logs, arguments.train_data
    if arguments.training:
        run = parse_arguments(arguments.training[arguments.training[0] == "--" :])
        logs, data = Path(run.logs), [*run.train_data, *run.val_data]
    logs = logs.absolute() if logs is not None else None
    with token_file(logs) if logs is not None else nullcontext(("", "")) as (name, token):
        reports = ask_for_facts(hosts, {"what": "facts", "shared": str(logs or ""), "token": name, "data": data})
    reports = test_network(reports, arguments.master_addr, arguments.master_port)
    needed = {str(logs): arguments.min_free_gib} if logs is not None else {}
    problems = compare.find_problems(reports, token=token, needed_gib=needed)
    print(compare.table(reports, problems))
    return int(bool(problems))


@contextmanager
def token_file(folder: Path) -> Iterator[tuple[str, str]]:
    """Write a file that only hosts that share `folder` can see; yield its name and content, and delete it."""
    name, token = f".megaclip-check-{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, token)
    except OSError as error:
        raise ConfigError(f"--logs {str(folder)!r}: cannot write there: {error}; choose another folder") from None
    try:
        yield name, token
    finally:
        (folder / name).unlink(missing_ok=True)


def ask(host: Host, question: dict[str, Any], kind: type[Answer], limit_s: float) -> tuple[Answer | None, str]:
    """Return the answer of a host, and the reason if there is none."""
    output, problem = run_on_host(host, ["check-hosts", "--on_host", json.dumps(question)], limit_s=limit_s)
    for line in output.splitlines():
        if line.startswith(MARK):
            try:
                return kind.model_validate_json(line.removeprefix(MARK)), ""
            except ValidationError:
                return None, "its answer cannot be read, because it runs another version of MegaCLIP"
    return None, problem or "it has not answered"


def ask_for_facts(hosts: Sequence[Host], question: dict[str, Any]) -> list[Report]:
    """Return the facts of all hosts. All are asked at the same time."""

    def one(host: Host) -> Report:
        began = time.monotonic()
        facts, failure = ask(host, question, Facts, FACTS_LIMIT_S)
        if facts is None:
            return Report(host, failure=failure)
        # Duration of question and answer together. The host read its clock between them.
        way_s = time.monotonic() - began - facts.ran_s
        return Report(host, facts, clock_s=facts.time_s - (time.time() - way_s / 2), clock_error_s=way_s / 2)

    with ThreadPoolExecutor(min(128, len(hosts))) as pool:
        return list(pool.map(one, hosts))


def test_network(reports: Sequence[Report], master_addr: str, port: int) -> list[Report]:
    """Return `reports` with the results of the network test between the hosts that have answered."""
    present = [report for report in reports if report.facts is not None]
    if len(present) < 2:
        return list(reports)
    first = present[0].host
    address = master_addr if master_addr and first == reports[0].host else first.address

    def one(rank: int) -> tuple[NetworkResult | None, str]:
        question = {"what": "network", "rank": rank, "hosts": len(present), "address": address, "port": port}
        return ask(present[rank].host, question, NetworkResult, network.LIMIT_S * 4)

    with ThreadPoolExecutor(len(present)) as pool:
        results = list(pool.map(one, range(len(present))))
    return merge_network(reports, [report.host.name for report in present], results)


def merge_network(
    reports: Sequence[Report], present: Sequence[str], results: Sequence[tuple[NetworkResult | None, str]]
) -> list[Report]:
    """Return `reports` with the network results of the hosts `present`."""
    problems: dict[str, str] = {}
    rates: dict[str, float | None] = {}
    for name, (result, failure) in zip(present, results, strict=True):
        problems[name] = f"the network test failed: {failure}" if result is None else result.problem
        rates[name] = None if result is None else result.mib_per_s
    for result, _ in results:
        for rank in result.absent if result is not None else []:
            problems[present[rank]] = problems[present[rank]] or "did not connect to the first host"
    return [
        replace(report, network=problems.get(report.host.name, ""), mib_per_s=rates.get(report.host.name))
        for report in reports
    ]
