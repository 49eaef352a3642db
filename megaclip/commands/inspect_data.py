"""Report the contents, the problems and the loading speed of a dataset.

    megaclip inspect 'shards/{00000..00331}.tar' --tokenizer tokenizer.model
    megaclip inspect 'shards/*.tar' --model ViT-L-14-336 --pictures sheet.png    # draws samples as the model sees them
    megaclip inspect hf:nlphuji/flickr30k:test --json

The command opens the data as --train-data does, decodes evenly spread samples, shows three of them, and measures the
speed of the training loader on one core. With --model it reports how many cores each GPU needs. `--list FILE` writes
the names of all bad samples and of what is left out. The exit code is 1 if training would refuse the data.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclip.commands.argument_types import CommandParser, add_reading_flags, integer, number, reading_flags
from megaclip.config import TrainArguments
from megaclip.errors import ConfigError, DataError, os_errors_as

if TYPE_CHECKING:
    from megaclip.data.inspection import Look
    from megaclip.data.source import Account

DEFAULT_MODEL = "ViT-B-32"
"""Model whose tokens and pixels are used without --model."""
GPUS_TO_FEED = ("a100", "h100", "h200", "b200")
"""GPUs for which the report gives the number of cores."""


def print_report(report: dict[str, Any], indent: str = "") -> None:
    """Print the report. Dictionaries of numbers and text take one line each."""
    for name, value in report.items():
        label = indent + name.replace("_", " ")
        if name == "sample":
            print(f"{label}:")
            print_report(value, "  ")
            continue
        is_list = isinstance(value, list)
        for index, entry in enumerate(value if is_list else [value]):
            print(f"{label}{f' {index}' * is_list}: {_on_one_line(entry)}")


def _on_one_line(value: Any) -> str:
    if isinstance(value, dict):
        parts = (f"{key} {content!r}" if key == "caption" else f"{key} {content}" for key, content in value.items())
        return ", ".join(parts) if value else "none"
    return str(value)


def parse_arguments() -> argparse.Namespace:
    limit = TrainArguments.model_fields["max_bad_fraction"].default
    parser = CommandParser(__doc__)
    parser.add_argument("data", nargs="+", help="patterns, folders or hf:NAME, as for --train-data")
    add_reading_flags(parser)
    parser.add_argument("--model", help="as in training: its tokenizer and pixels (default: ViT-B-32)")
    parser.add_argument("--tokenizer", help="'clip', a sentencepiece .model file or a Hugging Face tokenizer's folder")
    parser.add_argument(
        "--samples", type=integer(0), default=1000, help="number of samples to decode (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=number(0), default=3.0, help="seconds to time the loader for (default: %(default)s)"
    )
    parser.add_argument(
        "--max-bad-fraction", type=number(0, 1), default=limit, help="as in training (default: %(default)s)"
    )
    parser.add_argument("--pictures", metavar="FILE.png", help="draw 48 samples as the model sees them")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the names of bad samples and what is left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    from megaclip.data import ImageTransform, check_image_root, open_pairs  # torch is imported after the flags are read
    from megaclip.data.inspection import Look, describe_dataset, time_loader
    from megaclip.engine.inputs import model_preprocessing

    tokenizer, pixels = model_preprocessing(arguments.model or DEFAULT_MODEL, arguments.tokenizer)
    # The report shows what is left out.
    dataset = open_pairs(arguments.data, max_bad_fraction=1.0, **reading_flags(arguments))
    check_image_root(arguments.image_root, dataset)
    look, limit = Look(dataset, tokenizer, ImageTransform(**pixels), arguments.samples), arguments.max_bad_fraction
    report = {**describe_dataset(dataset), "sample": look.report(), "shown": look.shown}
    reasons = [
        account.reason_to_refuse(entry["samples"], limit)
        for account, entry in zip(dataset.accounts, report["datasets"], strict=True)
    ]
    reasons.append(look.reason_to_refuse(limit))
    try:
        report["loader"] = time_loader(dataset, tokenizer, ImageTransform(**pixels, training=True), arguments.seconds)
        if arguments.model is not None:
            per_core = report["loader"]["samples_per_s_per_core"]
            report["cores_per_gpu"] = cores_per_gpu(arguments.model, per_core)
    except DataError as error:
        report["loader"] = {"failed": str(error)}
        reasons.append(str(error))
    refused = "; ".join(filter(None, reasons))
    report["refused"] = refused or None
    if arguments.list:
        write_list(dataset.accounts, look.bad, arguments.list)
    if arguments.pictures:
        draw_pictures(look, len(dataset), arguments.pictures)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        del report["refused"]
        print_report(report)
        print(f"training would REFUSE this data: {refused}" if refused else "training would accept this data")
    return 1 if refused else 0


def cores_per_gpu(model: str, samples_per_s_per_core: float) -> dict[str, int]:
    """Return the number of cores that keep up with a GPU that trains this model on batches of 4,096, by GPU."""
    from megaclip.config import load_training_config
    from megaclip.models import load_model_config
    from megaclip.planner import Workload, describe, plan_time

    config = load_training_config("zero1")
    workload = Workload.of(load_model_config(model, config.megaclip.towers), config, 1)
    steps = {gpu: plan_time(workload, describe(gpu=gpu, gpus=1)) for gpu in GPUS_TO_FEED}
    return {gpu: math.ceil(step.samples_per_s_without_data / samples_per_s_per_core) for gpu, step in steps.items()}


def write_list(accounts: list[Account], bad: dict[str, list[str]], path: Path) -> None:
    """Write one line per bad sample or part that is left out: the reason and, after a tab, the name."""
    from megaclip.checkpoint.output import writing

    lines = [f"{kind}\t{detail}" for kind, details in bad.items() for detail in details]
    for account in accounts:
        for reason, (count, _, names) in account.left_out.items():
            lines += [f"{reason}\t{name}" for name in names]
            lines += [f"{reason}\t{count - len(names):,} more names"] * (count > len(names))
    with writing(path):
        path.write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")


def draw_pictures(look: Look, samples: int, path: str) -> None:
    """Write the contact sheet. Raises ConfigError if the file cannot be written."""
    from PIL import Image

    from megaclip.evaluation.pictures import contact_sheet

    sheet = contact_sheet(f"{len(look.pictures)} of {samples:,} samples, as the model sees them", look.pictures)
    problem = f"--pictures {path!r} cannot be written"
    with os_errors_as(ConfigError, problem, "use a name such as sheet.png", also=ValueError):
        Image.fromarray(sheet.transpose(1, 2, 0)).save(path)
