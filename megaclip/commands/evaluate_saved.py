"""The work of `megaclip evaluate`: load the model and the data, evaluate, print the scores and write the files.

With --suite it runs the tasks of a folder. The results file has one JSON line per task, with the keys of DataComp's
eval_results.jsonl. Each line has a checksum of the model, of the names, sizes and times of the task's files, and of the
settings. At the start the lines whose checksum is still right are kept, and the other tasks are evaluated.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from PIL import Image
from tqdm import tqdm

from megaclip.checkpoint.output import prepare_file, prepare_folder, writing
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.commands.argument_types import reading_flags
from megaclip.data import LabelledDataset, PairDataset, check_image_root, open_labelled, open_pairs
from megaclip.data.index import INDEX_FOLDER
from megaclip.engine.equal_inputs import data_text, require_equal
from megaclip.engine.saved_model import SavedModel, load_saved_model
from megaclip.errors import REFUSED_EXIT_CODE, ConfigError, DataError, public
from megaclip.evaluation import Evaluation, Evaluator, ModelEncoder, example_pictures
from megaclip.evaluation.suite import DATACOMP_TASKS, Task, find_tasks, open_task, score_task
from megaclip.files import write_atomically
from megaclip.logging import common_warnings, format_count

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FORMAT = 1
"""Number that changes when the results of equal models and data change."""
Line = dict[str, Any]
"""Line of the results file."""


def evaluate_saved(arguments: argparse.Namespace) -> None:
    """Load the model and the data, evaluate, and report. Raises the same MegaclipError on every rank."""
    started = time.monotonic()
    with raise_on_all_ranks():
        if group_rank() == 0:
            if arguments.json is not None:
                prepare_file(arguments.json)
            if arguments.pictures is not None:
                prepare_folder(arguments.pictures)
    loaded = load_saved_model(arguments.model, tag=arguments.tag, tokenizer=arguments.tokenizer, ema=arguments.ema)
    with raise_on_all_ranks(), common_warnings():
        pairs = labelled = None
        if arguments.val_data:
            pairs = open_pairs(arguments.val_data, **reading_flags(arguments))
            check_image_root(arguments.image_root, pairs)
            if arguments.val_fraction is not None:
                _, pairs = pairs.split(arguments.val_fraction)
        if arguments.zeroshot_data:
            labelled = open_labelled(arguments.zeroshot_data)
    require_equal({"--val-data": data_text(pairs), "--zeroshot-data": data_text(labelled)})
    device = torch.device(get_accelerator().current_device_name())
    dtype = _DTYPES[arguments.precision]
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
        evaluate_suite(arguments, loaded, evaluator)
        return
    result = evaluator.evaluate(pairs, labelled, group_captions=arguments.group_captions)
    with raise_on_all_ranks():
        if group_rank() == 0:
            report(arguments, loaded.tag, result, pairs, labelled, time.monotonic() - started)


def report(
    arguments: argparse.Namespace,
    tag: str | None,
    result: Evaluation,
    pairs: PairDataset | None,
    labelled: LabelledDataset | None,
    seconds: float,
) -> None:
    """Print the scores, and write the files of --json and --pictures."""
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


def evaluate_suite(arguments: argparse.Namespace, model: SavedModel, evaluator: Evaluator) -> None:
    """Evaluate all tasks that have no result yet, and report. Every rank must call it.

    Raises:
        DataError: on every rank, after the report, if a task could not be evaluated.
        ConfigError: the results file is another file.
    """
    lines, checksums = dict[str, Line](), dict[str, str]()
    with raise_on_all_ranks():
        tasks = find_tasks(arguments.suite)
        counted = [task for task in tasks if task.is_counted]
        if group_rank() == 0 and arguments.json is not None:
            of_model = _model_checksum(model, f"{arguments.precision}, probe: {arguments.probe}")
            checksums = {task.key: _checksum(task, of_model) for task in counted}
            lines = _kept(arguments.json, checksums)
    require_equal({"--suite": f"tasks {', '.join(task.key for task in tasks)}"})
    lines, errors = gather_objects(lines)[0], dict[str, str]()

    def progress(batches: Iterable[Any], name: str) -> Iterable[Any]:
        return tqdm(batches, name, unit="batch", leave=False, disable=True if group_rank() else None)

    def write() -> None:
        with raise_on_all_ranks():
            if group_rank() == 0 and arguments.json is not None:
                with writing(arguments.json):
                    text = "".join(f"{json.dumps(lines[key])}\n" for key in sorted(lines))
                    write_atomically(arguments.json, public(text))

    evaluator.progress = progress
    write()  # without the results of an earlier run that are no longer right
    for task in counted:
        if task.key in lines:
            continue
        try:
            with raise_on_all_ranks():
                data = open_task(task)
            require_equal({f"the task {task.key}": data_text(data)})
            line = score_task(evaluator, task, data, probe=arguments.probe)
            lines[task.key] = line | {"checksum": checksums.get(task.key)}
        except DataError as error:
            errors[task.key] = str(error)
        else:
            write()
    if group_rank() == 0:
        _report(tasks, lines, errors, as_markdown=arguments.markdown)
        classified = [key for key, line in lines.items() if "acc1" in line["metrics"]]
        if arguments.probe and (without := [key for key in classified if "lp_acc1" not in lines[key]["metrics"]]):
            print(f"no probe of {', '.join(without)}: it requires a folder train beside test, and no other folders")
    if errors:
        failure = DataError(f"{len(errors)} of {len(counted)} tasks were not evaluated: {', '.join(errors)}")
        failure.exit_code = REFUSED_EXIT_CODE
        raise failure


def _model_checksum(model: SavedModel, settings: str) -> str:
    """Return a checksum of the weights, their description, the preprocessing, the tokenizer and the settings."""
    facts = _FORMAT, settings, model.model.config, model.transform, model.tokenizer.identity
    sums = hashlib.sha256(repr(facts).encode())
    for name, value in model.model.state_dict().items():
        sums.update(name.encode())
        sums.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sums.hexdigest()


def _checksum(task: Task, model: str) -> str:
    """Return a checksum of the model and of the names, sizes and times of the files of a task."""
    sums = hashlib.sha256(model.encode())
    for place, folders, files in os.walk(task.folder, followlinks=True):
        folders[:] = sorted(folder for folder in folders if folder != INDEX_FOLDER)
        for path in sorted(os.path.join(place, name) for name in files):
            if os.path.exists(path):
                facts = os.stat(path)
                sums.update(f"{os.path.relpath(path, task.folder)}/{facts.st_size}/{facts.st_mtime_ns}\n".encode())
    return sums.hexdigest()[:16]


def _kept(path: Path, checksums: dict[str, str]) -> dict[str, Line]:
    """Return the lines of the results file whose checksum is right, by key. Raises ConfigError for another file."""
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        return {line["key"]: line for line in found if line["checksum"] == checksums.get(line["key"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--json {str(path)!r} is not a results file of --suite; choose another path, or delete the file"
        ) from error


def _report(tasks: list[Task], lines: dict[str, Line], errors: dict[str, str], *, as_markdown: bool) -> None:
    """Print the table, the averages, and what is missing."""
    found = [lines[key] for key in sorted(lines)]
    rows = [["task", "metric", "score", "samples"], *([["---", "---", "---:", "---:"]] if as_markdown else [])]
    for line in found:
        value = line["metrics"]["main_metric"]
        score = "-" if value is None else f"{100 * value:.2f}"
        rows.append([line["dataset"], line["metric"], score, f"{line['samples']:,}"])
        for name in ("lp_acc1", "knn_acc1"):
            if name in line["metrics"]:
                rows.append(["", name, f"{100 * line['metrics'][name]:.2f}", ""])
    datacomp = [key for key, settings in DATACOMP_TASKS.items() if settings.get("main_metric", "") is not None]
    scores = {line["key"]: line["metrics"]["main_metric"] for line in found}
    for name, keys in (("average", list(scores)), ("average of DataComp", datacomp)):
        if values := [value for key, value in scores.items() if key in keys and value is not None]:
            rows.append([name, format_count(len(values), "task"), f"{100 * sum(values) / len(values):.2f}", ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = [f"{row[k]:{'<' if k < 2 else '>'}{width}}" for k, width in enumerate(widths)]
        print(f"| {' | '.join(cells)} |" if as_markdown else "  ".join(cells).rstrip())
    print()
    for line in found:
        for kind, count in line["bad_samples"].items():
            print(f"left out: {count} of {line['key']} ({kind})")
    missing = [key for key in datacomp if key not in [task.key for task in tasks]]
    if 0 < len(missing) < len(datacomp):
        print(f"not in the folder: {len(missing)} of DataComp's {len(datacomp)} tasks: {', '.join(missing)}")
    no_metric = {task.key: "DataComp has no main metric for it" for task in tasks if not task.is_counted}
    for key, reason in (no_metric | errors).items():
        print(f"not evaluated: {key}: {reason}")
