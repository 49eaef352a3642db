"""Check the hosts of a run: software, GPUs, clocks, disks, data, network and speed. Start it as the run:

    megaclip launch --nnodes 4 --nproc-per-node 8 --rdzv-endpoint node-0:29400 check-hosts --logs /shared/runs
    megaclip launch ... check-hosts -- --deepspeed_config zero3 ...        # the arguments of megaclip train
    deepspeed --hostfile launch/hostfile --module megaclip check-hosts -- --deepspeed_config zero3 ...

Every rank reports its facts, multiplies matrices and exchanges messages. The first rank compares the ranks, and prints
one line per host and one per problem. The exit code is 1 if there is a problem.
"""

import argparse
import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

from pydantic import ValidationError
from torch.distributed import DistError, TCPStore

from megaclip.commands.argument_types import CommandParser, number
from megaclip.config import load_training_config, parse_arguments
from megaclip.engine.process_group import connect, quiet_deepspeed
from megaclip.errors import ConfigError, MegaclipError
from megaclip.files import write_atomically
from megaclip.hosts import compare, network
from megaclip.hosts.facts import Report, report
from megaclip.logging import rank_from_environment
from megaclip.zero.optimizers import needed_ops

_LIMIT_S = 300.0
"""Seconds to wait for other ranks; they import PyTorch from a shared file system."""


def main(argv: list[str] | None = None) -> int:
    quiet_deepspeed()
    try:
        return check(argument_parser().parse_args(argv))
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def argument_parser() -> argparse.ArgumentParser:
    parser = CommandParser(__doc__)
    parser.add_argument("--logs", type=Path, help="folder that all hosts must share")
    parser.add_argument("--train-data", nargs="*", default=[], metavar="DATA", help="data that all hosts must see")
    parser.add_argument(
        "--min-free-gib", type=number(0), default=10.0, help="required free space in --logs, in GiB (default: 10)"
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, help="arguments of megaclip train, after --")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def check(arguments: argparse.Namespace) -> int:
    """Run this rank's part of the check, and print the table on the first rank; return the exit code.

    Raises:
        ConfigError: the command line is refused, or the first rank cannot be reached.
    """
    logs, data, ops = arguments.logs, arguments.train_data, []
    if arguments.training:
        run = parse_arguments(arguments.training[arguments.training[0] == "--" :])
        logs, data = Path(run.logs), [*run.train_data, *run.val_data]
        ops = needed_ops(load_training_config(run.deepspeed_config, run.set))
    logs = logs.absolute() if logs is not None else None
    rank, ranks = rank_from_environment(), int(os.environ.get("WORLD_SIZE", "1"))
    store = connect(2 * _LIMIT_S)  # the first rank waits as long before it gives its sign
    store.set(f"ready/{rank}", "")
    with token_file(logs) if rank == 0 and logs is not None else nullcontext(("", "")) as (name, token):
        if rank == 0:
            store.set("sign", json.dumps([name, absent(store, "ready", ranks)]))
        name, not_ready = json.loads(store.get("sign"))  # arrives on all ranks at once: clocks are read now
        if not_ready:
            if rank == 0:
                print(f"ranks {not_ready} have not started within {_LIMIT_S:.0f} s; see the output of their launchers")
            return leave(store, rank, ranks, 1)
        own = report(shared=logs, token=name, data=data, ops=ops)
        store.set(f"facts/{rank}", own.model_dump_json())
        absent(store, "facts", ranks)
    reports = [_read(store.get(f"facts/{other}")) for other in range(ranks)]
    others = [other for other, one in enumerate(reports) if other and one.facts is not None]
    problem, rate = network.measure(store, rank, ranks, others)
    store.set(f"network/{rank}", json.dumps({"network": problem, "mib_per_s": rate}))
    if rank != 0:
        return leave(store, rank, ranks, 0)
    absent(store, "network", ranks)
    reports = [one.model_copy(update=json.loads(store.get(f"network/{other}"))) for other, one in enumerate(reports)]
    problems = compare.find_problems(reports, token=token, min_free_gib=arguments.min_free_gib)
    print(compare.table(reports, problems))
    return leave(store, rank, ranks, int(bool(problems)))


def absent(store: TCPStore, key: str, ranks: int) -> list[int]:
    """Wait until all ranks have set their `key`; return the ranks that have not done so in time."""
    keys = [f"{key}/{rank}" for rank in range(ranks)]
    with suppress(DistError):
        store.wait(keys, timedelta(seconds=_LIMIT_S))
    return [rank for rank, one in enumerate(keys) if not store.check([one])]


def leave(store: TCPStore, rank: int, ranks: int, exit_code: int) -> int:
    """End all ranks with the exit code of the first one, which may contain the store and ends last."""
    if rank == 0:
        store.set("exit code", str(exit_code))
    exit_code = int(store.get("exit code"))
    store.set(f"left/{rank}", "")
    if rank == 0:
        absent(store, "left", ranks)
    return exit_code


def _read(text: bytes) -> Report:
    try:
        return Report.model_validate_json(text)
    except ValidationError:
        raise ConfigError("ranks run different versions of MegaCLIP; install the same version on all hosts") from None


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
