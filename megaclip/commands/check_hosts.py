"""Check the hosts of a run: software, GPUs, clocks, disks, data, network and speed. Start it as the run:

    megaclip launch --nnodes 4 --nproc-per-node 8 --rdzv-endpoint node-0:29400 check-hosts --logs /shared/runs
    megaclip launch ... check-hosts -- --deepspeed_config zero3 ...        # the arguments of megaclip train
    deepspeed --hostfile launch/hostfile --module megaclip check-hosts -- --deepspeed_config zero3 ...

Every rank reports its facts, multiplies matrices and exchanges messages. All ranks compare the reports. The first one
prints a line per host and a line per problem. The exit code is 1 if there is a problem.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.utils.store import synchronize

from megaclip.commands.argument_types import CommandParser, number
from megaclip.config import load_training_config, parse_arguments
from megaclip.engine.process_group import meet_all_ranks, quiet_deepspeed
from megaclip.errors import ConfigError, os_errors_as
from megaclip.hosts.check import Report, find_problems, measure, report, table
from megaclip.logging import rank_from_environment
from megaclip.zero.optimizers import needed_ops

_LIMIT_S = 300.0
"""Seconds to wait for other ranks; they import PyTorch from a shared file system."""


def main(argv: list[str] | None = None) -> int:
    quiet_deepspeed()
    parser = CommandParser(__doc__)
    parser.add_argument("--logs", type=Path, help="folder that all hosts must share")
    parser.add_argument("--train-data", nargs="*", default=[], metavar="DATA", help="data that all hosts must see")
    parser.add_argument(
        "--min-free-gib", type=number(0), default=10.0, help="required free GiB in --logs (default: 10)"
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, help="arguments of megaclip train, after --")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes it
    return check(parser.parse_args(argv))


def check(arguments: argparse.Namespace) -> int:
    """Run this rank's part of the check, and print the table on the first rank; return the exit code, equal on all.

    Raises ConfigError if the command line is refused, or ranks cannot be reached.
    """
    logs, data, ops = arguments.logs, arguments.train_data, []
    if arguments.training:
        run = parse_arguments(arguments.training[arguments.training[0] == "--" :])
        logs, data = Path(run.logs), [*run.train_data, *run.val_data]
        ops = needed_ops(load_training_config(run.deepspeed_config, run.set))
    rank, ranks = rank_from_environment(), int(os.environ.setdefault("WORLD_SIZE", "1"))
    store = meet_all_ranks(_LIMIT_S)
    with sign_in(logs) if rank == 0 and logs is not None else nullcontext() as file:
        name = "" if file is None else Path(file.name).name
        sign = exchange(store, "start", name, rank, ranks)[0]  # arrives on all ranks at once: clocks are read now
        own = report(shared=logs, sign=sign, min_free_gib=arguments.min_free_gib, data=data, ops=ops)
        reports = read(exchange(store, "facts", own.model_dump_json(), rank, ranks))
    others = [other for other, one in enumerate(reports) if other and one.local_rank == 0]
    problem, own.mib_per_s = measure(store, rank, ranks, others)
    own.problems += [f"local rank {own.local_rank}: {problem}"] if problem else []
    reports = read(exchange(store, "network", own.model_dump_json(), rank, ranks))
    found = find_problems(reports)
    if rank == 0:
        print(table(reports, found))
    return int(bool(found))


def exchange(store: TCPStore, key: str, text: str, rank: int, ranks: int) -> list[str]:
    """Return the texts of all ranks. The first rank, which may contain the store, returns last.

    Raises ConfigError if ranks have not sent their text in time.
    """
    try:
        texts = synchronize(store, text.encode(), rank, ranks, f"{key}/", _LIMIT_S)
    except DistError:
        absent = [other for other in range(ranks) if not store.check([f"{key}/{other}"])]
        late = f"ranks {absent} have sent no {key} message within {_LIMIT_S:.0f} s"
        raise ConfigError(f"{late}; see the output of their launchers") from None
    return [text.decode() for text in texts]


def read(texts: list[str]) -> list[Report]:
    return [Report.model_validate_json(text) for text in texts]


def sign_in(folder: Path) -> IO:
    """Return a new file in `folder`. It is deleted when it is closed, and no other folder contains its name."""
    with os_errors_as(ConfigError, f"--logs {str(folder)!r}: cannot write there", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        return NamedTemporaryFile(prefix=".megaclip-check-", dir=folder)
