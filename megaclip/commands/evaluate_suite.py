"""`megaclip evaluate --suite`: run the tasks of a folder, resume from the results file, and print the table.

The results file has one JSON line per task, with the keys of DataComp's eval_results.jsonl. Each line has a checksum of
the model, of the names, sizes and times of the task's files, and of the settings. At the start the lines whose checksum
is still right are kept, and the other tasks are evaluated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megaclip.checkpoint.output import writing
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.comm.groups import group_rank
from megaclip.data.index import INDEX_FOLDER
from megaclip.engine.equal_inputs import data_text, require_equal
from megaclip.engine.saved_model import SavedModel
from megaclip.errors import REFUSED_EXIT_CODE, ConfigError, DataError, public
from megaclip.evaluation.encoder import Encode
from megaclip.evaluation.items import ItemSet
from megaclip.evaluation.suite import Task, TaskScorer, datacomp_keys, find_tasks, open_task
from megaclip.files import write_atomically

_FORMAT = 1
"""Number that changes when the results of equal models and data change."""
Line = dict[str, Any]
"""Line of the results file."""


def evaluate_suite(arguments: argparse.Namespace, model: SavedModel, model_checksum: str, encode: Encode) -> None:
    """Evaluate all tasks that have no result yet, and report. Every rank must call it.

    Raises:
        DataError: on every rank, after the report, if a task could not be evaluated.
        ConfigError: the results file is another file.
    """
    with raise_on_all_ranks():
        tasks = find_tasks(arguments.suite)
    keys = [task.key for task in tasks]
    require_equal({"--suite": f"tasks {', '.join(keys)}"})
    counted = [task for task in tasks if task.is_counted]

    def progress(batches: Iterable[Any], name: str) -> Iterable[Any]:
        return tqdm(batches, name, unit="batch", leave=False, disable=True if group_rank() else None)

    scorer = TaskScorer(
        encode,
        model.transform,
        model.tokenizer,
        batch_size=arguments.batch_size,
        num_workers=arguments.workers,
        progress=progress,
    )
    lines: dict[str, Line] = {}
    checksums: dict[str, str] = {}
    with raise_on_all_ranks():
        if group_rank() == 0:
            checksums = {task.key: _checksum(task, model_checksum) for task in counted}
            lines = _kept(arguments.json, checksums)
    lines = gather_objects(lines)[0]
    errors: dict[str, str] = {}
    for task in counted:
        if task.key in lines:
            continue
        try:
            if keys.count(task.key) > 1:
                raise DataError(f"several folders are {task.key}; keep one of them in the suite, or rename the others")
            with raise_on_all_ranks():
                data = open_task(task)
            text = f"{len(data)} images, {data.items}" if isinstance(data, ItemSet) else data_text(data)
            require_equal({f"the task {task.key}": hashlib.sha256(text.encode()).hexdigest()[:8]})
            result = scorer.score(task, data)
        except DataError as error:
            errors[task.key] = str(error)
            continue
        lines[task.key] = {
            "key": task.key,
            "dataset": task.dataset,
            "metrics": result.metrics,
            "metric": result.main_metric,
            "samples": result.samples,
            "bad_samples": result.bad_samples,
            "checksum": checksums.get(task.key),
        }
        with raise_on_all_ranks():
            if group_rank() == 0 and arguments.json is not None:
                _write(arguments.json, [lines[key] for key in keys if key in lines])
    if group_rank() == 0:
        _report(tasks, lines, errors, as_markdown=arguments.markdown)
    if errors:
        failure = DataError(f"{len(errors)} of {len(counted)} tasks were not evaluated: {', '.join(errors)}")
        failure.exit_code = REFUSED_EXIT_CODE
        raise failure


def model_checksum(model: SavedModel, precision: str) -> str:
    """Return a checksum of the weights, the preprocessing, the tokenizer and the precision."""
    sums = hashlib.sha256(repr((_FORMAT, precision, model.transform, model.tokenizer.identity)).encode())
    for name, value in model.model.state_dict().items():
        sums.update(name.encode())
        sums.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sums.hexdigest()


def _checksum(task: Task, model: str) -> str:
    """Return a checksum of the model and of the names, sizes and times of the files of a task."""
    sums = hashlib.sha256(model.encode())
    for place, folders, files in os.walk(task.folder, followlinks=True):
        folders[:] = sorted(folder for folder in folders if folder != INDEX_FOLDER)
        for name in sorted(files):
            path = os.path.join(place, name)
            if os.path.exists(path):
                facts = os.stat(path)
                sums.update(f"{os.path.relpath(path, task.folder)}/{facts.st_size}/{facts.st_mtime_ns}\n".encode())
    return sums.hexdigest()[:16]


def _kept(path: Path | None, checksums: dict[str, str]) -> dict[str, Line]:
    """Return the lines of the results file whose checksum is right, by key. Raises ConfigError for another file."""
    if path is None or not path.exists():
        return {}
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {line["key"]: line for line in found if line["checksum"] == checksums.get(line["key"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--json {str(path)!r} is not a results file of --suite; choose another path, or delete the file"
        ) from error


def _write(path: Path, lines: list[Line]) -> None:
    with writing(path):
        write_atomically(path, "".join(f"{public(json.dumps(line))}\n" for line in lines))


def _report(tasks: list[Task], lines: dict[str, Line], errors: dict[str, str], *, as_markdown: bool) -> None:
    """Print the table, the averages, and what is missing."""
    rows = [("task", "metric", "score", "samples")]
    for task in tasks:
        if line := lines.get(task.key):
            value = line["metrics"]["main_metric"]
            score = "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"
            rows.append((line["dataset"], line["metric"], score, f"{line['samples']:,}"))
    averages = [("average", list(lines)), ("average of DataComp", [task.key for task in tasks if task.is_datacomp])]
    for name, keys in averages:
        values = [lines[key]["metrics"]["main_metric"] for key in keys if key in lines]
        values = [value for value in values if value is not None]
        if values:
            rows.append((name, f"{len(values)} tasks", f"{100 * sum(values) / len(values):.2f}", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for number, row in enumerate(rows):
        name, metric = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        score, samples = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        cells = [name, metric, score, samples]
        print(f"| {' | '.join(cells)} |" if as_markdown else "  ".join(cells))
        if as_markdown and number == 0:
            print(f"| {'-' * widths[0]} | {'-' * widths[1]} | {'-' * (widths[2] - 1)}: | {'-' * (widths[3] - 1)}: |")
    print()
    for key, line in lines.items():
        for kind, count in line["bad_samples"].items():
            print(f"left out: {count} of {key} ({kind})")
    for task in tasks:
        if not task.is_counted:
            print(f"not evaluated: {task.key}: DataComp has no main metric for it")
    missing = [key for key in datacomp_keys() if key not in {task.key for task in tasks}]
    if any(task.is_datacomp for task in tasks) and missing:
        print(f"not in the folder: {len(missing)} of DataComp's {len(datacomp_keys())} tasks: {', '.join(missing)}")
    for key, error in errors.items():
        print(f"not evaluated: {key}: {error}")
