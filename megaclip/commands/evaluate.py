"""Evaluate a model: zero-shot classification, retrieval or a whole suite, exact, on one process or all ranks.

    megaclip evaluate OUT_DIR --val-data 'val/{00..09}.tar' --zeroshot-data imagenet_val --json scores.json
    deepspeed --module megaclip evaluate runs/NAME --val-data 'val/{00..09}.tar'
    megaclip evaluate OUT_DIR --suite datacomp_evaluation/ --json results.jsonl

MODEL is an exported open_clip directory, a run (runs/NAME) or its checkpoints folder; --tag selects the step of a run.
Ties count against the model. Pairs with equal images count as one image with several captions, and all captions of a
list are used. --group-captions takes every line of a text as a caption. --pictures writes the similarity heat map and
the retrieved images that training shows in TensorBoard. --suite evaluates every sub-folder of a folder with the metric
that papers report (`megaclip show evaluation`). With --json it resumes: tasks whose results are in the file are not
evaluated again, unless the model or their data has changed.
"""

import argparse
from pathlib import Path

from megaclip.commands.argument_types import CommandParser, add_reading_flags, integer, reading_flags
from megaclip.config.command_line import DEFAULT_WORKERS, MOST_WORKERS
from megaclip.errors import MegaclipError


def main() -> None:
    arguments = parse_arguments()
    import deepspeed.comm as dist  # torch is imported after the flags are read

    from megaclip.commands.evaluate_saved import evaluate_saved
    from megaclip.engine.process_group import start_process_group

    try:
        start_process_group()
        evaluate_saved(arguments)
    except MegaclipError:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="exported directory, run, its checkpoints or one of them"
    )
    parser.add_argument("--tag", help="checkpoint of the run, such as step_00000100 (default: the latest)")
    parser.add_argument("--ema", action="store_true", help="evaluate the moving average of a run's weights (ema_decay)")
    parser.add_argument("--val-data", nargs="+", default=[], metavar="SPEC", help="image-text pairs for retrieval")
    parser.add_argument(
        "--val-fraction",
        type=float,
        help="evaluate only what a run with this --val-fraction holds out of the data",
    )
    add_reading_flags(parser)
    parser.add_argument(
        "--group-captions", action="store_true", help="take every line of a text as a caption (COCO, Flickr)"
    )
    parser.add_argument("--zeroshot-data", metavar="FOLDER", help="labelled images for zero-shot classification")
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="folder with one sub-folder per task")
    parser.add_argument("--probe", action="store_true", help="--suite: also a linear probe and nearest neighbours")
    parser.add_argument("--markdown", action="store_true", help="print the table of --suite in Markdown")
    parser.add_argument(
        "--tokenizer",
        help="'clip', a sentencepiece .model file or a Hugging Face tokenizer's folder (default: from the model card)",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the forward pass")
    parser.add_argument(
        "--batch-size",
        type=integer(1),
        default=64,
        help="number of images, and of prompts, that a rank encodes at once",
    )
    parser.add_argument(
        "--workers", type=integer(0, MOST_WORKERS), default=DEFAULT_WORKERS, help="data worker processes per rank"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores to a file; --suite resumes from it")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write similarity.png and retrieval.png to this folder"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # from the deepspeed launcher
    arguments = parser.parse_args()
    if not arguments.val_data and not arguments.zeroshot_data and arguments.suite is None:
        parser.error("no data to evaluate on; give --val-data, --zeroshot-data or both, or --suite")
    if arguments.suite is not None and (arguments.val_data or arguments.zeroshot_data):
        parser.error("--suite cannot be combined with --val-data or --zeroshot-data; run two commands")
    if arguments.val_fraction is not None and not 0 < arguments.val_fraction < 1:
        parser.error(f"--val-fraction is {arguments.val_fraction:g}; use a fraction between 0 and 1")
    of_pairs = ["pictures", "val_fraction", "group_captions", *reading_flags(arguments)]
    for needed, flags in (("suite", ["markdown", "probe"]), ("val_data", of_pairs)):
        for flag in flags:
            if getattr(arguments, flag) != parser.get_default(flag) and not getattr(arguments, needed):
                name, other = (f"--{word.replace('_', '-')}" for word in (flag, needed))
                parser.error(f"{name} has no effect without {other}; add {other}, or leave it out")
    return arguments
