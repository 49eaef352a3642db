"""Plan a run before it starts: memory by part, largest batch that fits, and step time with its longest term.

    megaclip plan --deepspeed_config ds_configs/zero3.json --model ViT-L-14 --gpu h200 --gpus 8 --hosts 4
    megaclip plan ... --here                                 # this machine, with its free memory
    megaclip plan ... --batch 1048576 --micro-batch 256      # with another batch size
    megaclip plan ... --train-num-samples 400000000 --epochs 32                # with the hours of the run
    megaclip plan ... --gpu-memory 80GiB --host-memory 900GiB --disk 2TB --link 200GB --network 25GB
    megaclip plan ... --rates rates.json                     # with rates measured by tools/measure_rates.py

It needs no GPU and starts nothing.
"""

import argparse

from megaclip.commands.argument_types import CommandParser, integer, number
from megaclip.config.command_line import DEFAULT_EPOCHS, DEFAULT_WORKERS

SETTINGS = {
    "--batch": "train_batch_size",
    "--micro-batch": "train_micro_batch_size_per_gpu",
    "--tensor-parallel": "megaclip.tensor_parallel_size",
}
"""Flags that are short for --set -> setting of ds_config.json."""


def main() -> int:
    arguments = plan_parser().parse_args()
    from megaclip.commands.planned_run import described_run, print_plan  # torch is imported after the flags are read

    return print_plan(*described_run(arguments))


def plan_parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    """Return the parser of the flags that describe a run and its machines."""
    parser = CommandParser(description)
    what = parser.add_argument_group("run")
    what.add_argument("--deepspeed_config", "--deepspeed-config", required=True, help="ds_config.json")
    what.add_argument("--model", required=True, help="as in training: a name, the path of a model JSON, or a directory")
    what.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="as in training")
    for flag, setting in SETTINGS.items():
        what.add_argument(flag, type=integer(1), help=f"short for --set {setting}=N")
    what.add_argument(
        "--workers", type=integer(0), default=DEFAULT_WORKERS, help="loader processes per rank (default %(default)s)"
    )
    what.add_argument(
        "--train-num-samples",
        type=integer(0),
        default=0,
        help="samples of the dataset, for the hours of the run and the FastCLIP losses' state",
    )
    what.add_argument("--epochs", type=integer(1), help=f"with --train-num-samples (default {DEFAULT_EPOCHS})")
    what.add_argument(
        "--text-positions-saved",
        type=float,
        metavar="SHARE",
        help="share of token positions saved by cutting captions, as a run logs it (default: times of captions of 8 to "
        "77 tokens, memory for captions of full length, `megaclip show planning`)",
    )
    what.add_argument(
        "--train-steps", type=integer(1), help="steps of the run, instead of --epochs (without both: many)"
    )
    what.add_argument(
        "--val-num-samples", type=integer(0), default=0, help="number of image-caption pairs of the evaluation"
    )
    what.add_argument("--async-save", action="store_true", help="checkpoints are written from a copy in host memory")
    what.add_argument(
        "--lock-image", type=integer(0), nargs="?", const=0, help="freeze the image tower except its last N groups"
    )
    what.add_argument(
        "--lock-text", type=integer(0), nargs="?", const=0, help="freeze the text tower except its last N layers"
    )
    where = parser.add_argument_group("machines")
    where.add_argument("--here", action="store_true", help="this machine: its GPUs, and the memory that is free now")
    where.add_argument(
        "--gpus", type=integer(1), help="GPUs per host (default 8; with --here all of them, one rank on a CPU)"
    )
    where.add_argument("--hosts", type=integer(1), help="hosts, all alike (default 1)")
    where.add_argument(
        "--cores", type=integer(1), help="CPU cores of a host (default: one per worker; --here: its own)"
    )
    where.add_argument(
        "--samples-per-core",
        type=number(1),
        help="samples that the loader reads per second and core, as `megaclip inspect` reports (default 340, for JPEG "
        "files with a shorter side of 384)",
    )
    add_machine_flags(where)
    return parser


def add_machine_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags that `described_cluster` reads."""
    parser.add_argument("--gpu", help="a GPU by name (default h200); an unknown name is refused with the list")
    parser.add_argument("--gpu-memory", help="memory of one GPU, for example 80GiB")
    parser.add_argument("--host-memory", help="free memory of one host (default 1000GiB)")
    parser.add_argument("--disk", help="free disk of one host (default 4TB)")
    parser.add_argument("--link", help="bytes per second that one GPU sends inside a host, for example 300GB")
    parser.add_argument("--network", help="bytes per second that one GPU sends to other hosts")
    parser.add_argument("--rates", help="file that tools/measure_rates.py has written on such a machine")
