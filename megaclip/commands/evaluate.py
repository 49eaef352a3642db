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

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megaclip.commands.argument_types import CommandParser, add_reading_flags, integer, reading_flags
from megaclip.config.command_line import DEFAULT_WORKERS, MOST_WORKERS
from megaclip.errors import MegaclipError, public
from megaclip.logging import format_count

if TYPE_CHECKING:
    from megaclip.data import LabelledDataset, PairDataset
    from megaclip.evaluation import Evaluation

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    arguments = parse_arguments()
    import deepspeed.comm as dist  # torch is imported after the flags are read

    from megaclip.engine.process_group import start_process_group

    try:
        start_process_group()
        evaluate_saved(arguments)
    except MegaclipError:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def evaluate_saved(arguments: argparse.Namespace) -> None:
    """Load the model and the data, evaluate, and report. Raises the same MegaclipError on every rank."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from megaclip.checkpoint.output import prepare_file, prepare_folder
    from megaclip.comm.collectives import raise_on_all_ranks
    from megaclip.comm.groups import group_rank
    from megaclip.engine.equal_inputs import data_text, require_equal
    from megaclip.engine.saved_model import load_saved_model
    from megaclip.evaluation import Evaluator, ModelEncoder

    started = time.monotonic()
    with raise_on_all_ranks():
        if group_rank() == 0:
            if arguments.json is not None:
                prepare_file(arguments.json)
            if arguments.pictures is not None:
                prepare_folder(arguments.pictures)
    loaded = load_saved_model(arguments.model, tag=arguments.tag, tokenizer=arguments.tokenizer, ema=arguments.ema)
    with raise_on_all_ranks():
        pairs, labelled = open_data(arguments)
    require_equal({"--val-data": data_text(pairs), "--zeroshot-data": data_text(labelled)})
    device = torch.device(get_accelerator().current_device_name())
    dtype = getattr(torch, PRECISIONS[arguments.precision])
    encode = ModelEncoder(
        loaded.model.to(device, dtype),
        loaded.transform.normalise,
        device=device,
        image_dtype=dtype,
        cut_captions=loaded.model.cut_captions,
    )
    evaluator = Evaluator(
        encode,
        loaded.transform,
        loaded.tokenizer,
        arguments.batch_size,
        arguments.workers,
        text_batch_size=arguments.batch_size,
    )
    if arguments.suite is not None:
        from megaclip.commands.evaluate_suite import evaluate_suite

        evaluate_suite(arguments, loaded, evaluator)
        return
    result = evaluator.evaluate(pairs, labelled, group_captions=arguments.group_captions)
    with raise_on_all_ranks():
        if group_rank() == 0:
            report(arguments, loaded.tag, result, pairs, labelled, time.monotonic() - started)


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
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="precision of the forward pass")
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


def open_data(arguments: argparse.Namespace) -> tuple[PairDataset | None, LabelledDataset | None]:
    """Return the image-text pairs of --val-data and the labelled images of --zeroshot-data, None without the flag."""
    from megaclip.data import check_image_root, open_labelled, open_pairs

    pairs = labelled = None
    if arguments.val_data:
        pairs = open_pairs(arguments.val_data, **reading_flags(arguments))
        check_image_root(arguments.image_root, pairs)
        if arguments.val_fraction is not None:
            _, pairs = pairs.split(arguments.val_fraction)
    if arguments.zeroshot_data:
        labelled = open_labelled(arguments.zeroshot_data)
    return pairs, labelled


def report(
    arguments: argparse.Namespace,
    tag: str | None,
    result: Evaluation,
    pairs: PairDataset | None,
    labelled: LabelledDataset | None,
    seconds: float,
) -> None:
    """Print the scores, and write the files of --json and --pictures."""
    from PIL import Image

    from megaclip.checkpoint.output import writing
    from megaclip.comm.groups import group_size
    from megaclip.evaluation import example_pictures

    metrics = result.metrics
    if labelled is not None:
        print(f"\nzero-shot, {format_count(len(labelled), 'image')}, {len(labelled.class_names)} classes")
        print_row("", "top-1", "top-5")
        print_row("accuracy", *(metrics[f"zero_shot_top{k}"] for k in (1, 5)))
    if pairs is not None and result.examples is not None:
        captions = format_count(result.captions, "caption")
        print(f"\nretrieval, {captions}, {format_count(result.examples.candidates, 'image')}")
        print_row("", "R@1", "R@5", "R@10")
        for name, way in (("image to text", "i2t"), ("text to image", "t2i")):
            print_row(name, *(metrics[f"retrieval_r{k}_{way}"] for k in (1, 5, 10)))
    for kind, count in result.bad_samples.items():
        print(f"left out: {format_count(count, 'sample')} ({kind})")
    print(f"\n{seconds:.1f} s on {format_count(group_size(), 'rank')}")
    if arguments.json:
        recorded = ("ema", "val_data", "val_fraction", "group_captions", "zeroshot_data", "precision")
        content = {
            "model": str(arguments.model),
            "tag": tag,
            **{name: getattr(arguments, name) for name in recorded},
            "world_size": group_size(),
            "bad_samples": result.bad_samples,
            "metrics": metrics,
        }
        with writing(arguments.json):
            arguments.json.write_text(public(json.dumps(content, indent=2)) + "\n", encoding="utf-8")
    if arguments.pictures and result.examples is not None and pairs is not None:
        for name, picture in example_pictures(result.examples, pairs).items():
            with writing(arguments.pictures / f"{name}.png"):
                Image.fromarray(picture.transpose(1, 2, 0)).save(arguments.pictures / f"{name}.png")


def print_row(name: str, *values: str | float) -> None:
    cells = (value if isinstance(value, str) else f"{100 * value:.2f} %" for value in values)
    print(f"  {name:<14}" + "".join(f"{cell:>10}" for cell in cells))
