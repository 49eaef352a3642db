"""Evaluate the tasks of a suite, a folder with one sub-folder per set of images, with the metric that papers report.

The files of a sub-folder select what is computed (`open_task`). Its name, `wds_<task>_test` or the task alone, selects
an entry of datacomp_tasks.json: the name of the task in DataComp (Gadre et al. 2023), its main metric, and the groups
of its images. Other sets have the main metric of their kind, such as accuracy.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import LabelledDataset, PairDataset, open_pairs
from megaclip.data.labelled import (
    CLASS_NAMES_FILE,
    open_labelled,
    refuse_damaged_shards,
    split_names,
    split_shards,
    text_lines,
)
from megaclip.data.patterns import literal
from megaclip.errors import DataError, os_errors_as
from megaclip.evaluation import task_metrics
from megaclip.evaluation.encoder import image_features, of_all_ranks
from megaclip.evaluation.items import ItemSet, item_files, open_items
from megaclip.evaluation.probe import HELD_OUT, linear_probe, nearest_neighbours
from megaclip.evaluation.retrieval import RECALL_AT, retrieval
from megaclip.evaluation.scores import Evaluator, count_bad_samples, evaluate_pairs
from megaclip.evaluation.task_metrics import Metrics
from megaclip.evaluation.zero_shot import classify

DATACOMP_TASKS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("datacomp_tasks.json").read_text(encoding="utf-8")
)
"""Tasks of DataComp by key. A `main_metric` of None: DataComp has no main metric for the task."""


@dataclass(frozen=True)
class Task:
    """One task of a suite."""

    key: str
    """DataComp's key, such as "vtab/caltech101"; for other sets the name of the folder without wds_ and _test."""
    folder: Path
    items: Path | None = None
    """File of a set of items."""

    @property
    def settings(self) -> dict[str, Any]:
        """Entry of datacomp_tasks.json, empty for other sets."""
        return DATACOMP_TASKS.get(self.key, {})

    @property
    def is_counted(self) -> bool:
        """False for the tasks for which DataComp has no main metric. They are not evaluated."""
        return self.settings.get("main_metric", "") is not None


def find_tasks(suite: Path) -> list[Task]:
    """Return the tasks in the sub-folders of a folder, sorted by key.

    Raises DataError if there are none, or two with the same key.
    """
    tasks = []
    with os_errors_as(DataError, f"cannot read the suite {str(suite)!r}"):
        for folder in sorted(entry for entry in suite.iterdir() if entry.is_dir() and entry.name[0] != "."):
            items = [Task(key, folder, path) for key, path in item_files(folder)]
            tasks += items or [Task(_key_of(folder.name.removeprefix("wds_").removesuffix("_test")), folder)]
    if not tasks:
        raise DataError(f"the suite {str(suite)!r} has no sub-folders; expected one per task, such as wds_cars_test")
    if split_names(suite) or item_files(suite):
        raise DataError(f"the suite {str(suite)!r} is one set; give the folder that contains it, or rename its folders")
    tasks.sort(key=lambda task: task.key)
    for task, after in pairwise(tasks):
        if task.key == after.key:
            raise DataError(f"several folders are {task.key}; keep one of them in the suite, or rename the others")
    return tasks


def _key_of(name: str) -> str:
    for key, settings in DATACOMP_TASKS.items():
        if name.lower() in (key.replace("/", "-"), key.rpartition("/")[2], *settings.get("folders", ())):
            return key
    return name


TaskData = LabelledDataset | PairDataset | ItemSet


def open_task(task: Task) -> TaskData:
    """Open the data of a task: the items of `items`, captioned images for retrieval, or labelled images.

    Raises DataError, with one line, if the data is missing or cannot be read.
    """
    if task.items is not None:
        return open_items(task.key, task.items)
    with os_errors_as(DataError, f"cannot read {task.folder}"):
        shards, type_file = split_shards(task.folder), task.folder / "dataset_type.txt"
        kind = "".join(text_lines(type_file)).lower()
        if kind not in ("", "classification", "multilabel", "retrieval"):
            raise DataError(f"{type_file} is {kind[:20]!r}; expected classification, multilabel or retrieval")
        has_no_names = not kind and shards and not (task.folder / CLASS_NAMES_FILE).is_file()
    if kind != "retrieval" and not has_no_names:
        facts = 0 if kind == "multilabel" else len(task.settings.get("fields", ())) or None
        return open_labelled(task.folder, split="test", facts=facts)
    try:
        pairs = open_pairs([f"{literal(shards[0].parent)}/*.tar" if shards else str(task.folder)])
        refuse_damaged_shards(task.folder, pairs.accounts)
    except DataError as error:
        reason = "" if kind else f"{task.folder} has no {CLASS_NAMES_FILE}, so its samples are pairs for retrieval: "
        raise DataError(f"{reason}{error}") from error
    return pairs


def open_suite(suite: Path) -> list[tuple[Task, TaskData]]:
    """Return the tasks of a folder that have a main metric, with their data. Raises DataError if one cannot be read."""
    return [(task, open_task(task)) for task in find_tasks(suite) if task.is_counted]


def score_task(evaluator: Evaluator, task: Task, data: TaskData, *, probe: bool = False) -> dict[str, Any]:
    """Return the line of a task in the results file, equal on every rank. Every rank must call it.

    Raises DataError on every rank.

    data: from `open_task`. probe: fit a linear probe and find nearest neighbours for classification sets with a train
    split.
    """
    dataset = task.settings.get("dataset", task.key)
    loader = evaluator.loader(data)
    batches, lost = evaluator.progress(loader, dataset), dict[str, int]()
    metrics: Metrics
    if isinstance(data, LabelledDataset):
        metrics, samples, lost = _classification(evaluator, task, data, batches, probe)
    elif isinstance(data, ItemSet):
        metrics, samples = _items(evaluator, data, batches)
        lost = {"items with an unreadable image": len(data.items) - samples} if samples < len(data.items) else {}
    else:
        result = evaluate_pairs(evaluator.encode, batches)
        assert result.examples is not None, "evaluate_pairs returns examples"
        metrics, samples = {**_recall(result.metrics)}, result.examples.candidates
    main = task.settings.get("main_metric", next(iter(metrics)))
    if main not in metrics:
        raise DataError(
            f"{task.folder}: the metric of {dataset} is {main}, but this set gives {', '.join(metrics)}; rename "
            "the folder if it holds another set"
        )
    metrics["main_metric"] = metrics[main]
    line = {"key": task.key, "dataset": dataset, "metrics": metrics}
    return line | {"metric": main, "samples": samples, "bad_samples": count_bad_samples(loader) | lost}


def _classification(
    evaluator: Evaluator, task: Task, data: LabelledDataset, batches: Iterable[Any], probe: bool
) -> tuple[Metrics, int, dict[str, int]]:
    """Return metrics, the number of images, and that of the images of the train split that are left out, by kind."""
    weights, images = evaluator.class_weights(data), image_features(evaluator.encode, batches)
    if data.has_several_labels:
        features, rows = of_all_ranks(images)
        if not len(features):
            raise DataError(f"{task.folder}: the images or labels of all {len(data)} samples are missing or unreadable")
        scores = (features.double() @ weights.double().T).cpu().numpy()
        precision = task_metrics.mean_average_precision(scores, _numbers(data, rows[:, 0].tolist()) == 1)
        return {"mean_average_precision": precision}, len(scores), {}
    kept = list(images) if probe and "train" in split_names(task.folder) else None
    found = classify(images if kept is None else kept, weights)
    metrics, lost = task_metrics.accuracy_metrics(found, len(weights)), dict[str, int]()
    if groups := task.settings.get("groups", {}):
        columns = dict(zip(task.settings["fields"], _numbers(data, found.ids.tolist()).T, strict=True))
        for name, worst in groups.items():
            metrics |= task_metrics.group_metrics(found, columns[name], name, worst)
    if kept is not None:
        probed, lost = _probe(evaluator, task, data, *of_all_ranks(kept))
        metrics |= probed
    return metrics, len(found.ids), lost


def _probe(
    evaluator: Evaluator, task: Task, data: LabelledDataset, test: torch.Tensor, test_rows: torch.Tensor
) -> tuple[Metrics, dict[str, int]]:
    """Return the metrics on frozen features, and the number of training images that are left out, by kind."""
    with raise_on_all_ranks():
        train = open_labelled(task.folder, split="train")
        if train.class_names != data.class_names:
            raise DataError(f"{task.folder}: the train split has other classes than the test split")
    loader = evaluator.loader(train)
    features, rows = of_all_ranks(image_features(evaluator.encode, evaluator.progress(loader, task.key)))
    if len(features) < HELD_OUT or len(rows[:, 1].unique()) < 2:
        raise DataError(
            f"{task.folder}: the train split has {len(features)} readable images of {len(rows[:, 1].unique())} "
            f"classes; --probe requires {HELD_OUT} images of 2 classes or more"
        )
    lost = {f"{kind}, in the train split": count for kind, count in count_bad_samples(loader).items()}
    arguments = features, rows[:, 1], test, len(data.class_names)
    labels, (linear, strength) = test_rows[:, 1].cpu().numpy(), linear_probe(*arguments)
    recalls = [float(np.mean((linear == label)[labels == label])) for label in np.unique(labels)]
    metrics: Metrics = {
        "lp_acc1": float(np.mean(linear == labels)),
        "lp_mean_per_class_recall": float(np.mean(recalls)),
        "lp_C": strength,
        "knn_acc1": float(np.mean(nearest_neighbours(*arguments) == labels)),
    }
    return metrics, lost


def _items(evaluator: Evaluator, data: ItemSet, batches: Iterable[Any]) -> tuple[Metrics, int]:
    """Return the metrics of items, and the number of items whose images can be read."""
    features, rows = of_all_ranks(image_features(evaluator.encode, batches))
    row = {data.images[image]: number for number, image in enumerate(rows[:, 0].tolist())}
    items = [item for item in data.items if all(image in row for image in item.images)]
    if not items:
        raise DataError(f"{data.name}: the images of all {len(data.items)} items are missing or unreadable")
    captions = list(dict.fromkeys(caption for item in data.items for caption in item.captions))
    texts, text_row = evaluator.text_features(captions), {caption: number for number, caption in enumerate(captions)}
    if items[0].language:
        pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for item in items:
            pairs[item.language].append((row[item.images[0]], text_row[item.captions[0]]))
        return _languages(pairs, features, texts), len(items)
    image_rows, text_rows = (each.double().cpu().numpy() for each in (features, texts))
    similarities = [
        image_rows[[row[image] for image in item.images]] @ text_rows[[text_row[text] for text in item.captions]].T
        for item in items
    ]
    if items[0].right:
        is_right = [np.isin(item.images, item.right) for item in items]
        return task_metrics.association_metrics([values[:, 0] for values in similarities], is_right), len(items)
    return task_metrics.selection_metrics(similarities), len(items)


def _languages(pairs: dict[str, list[tuple[int, int]]], images: torch.Tensor, texts: torch.Tensor) -> Metrics:
    """Return recalls of each language, as `image_retrieval_recall@1/en`, and their means over the languages.

    pairs: rows of an image in `images` and of its caption in `texts`, by language.
    """
    found: dict[str, dict[str, float]] = {}
    for language, of_language in sorted(pairs.items()):
        own = torch.tensor(of_language, device=images.device)[group_rank() :: group_size()]
        image_rows, text_rows = own.unbind(1)
        found[language] = _recall(retrieval(images[image_rows], texts[text_rows], image_rows))
    names = next(iter(found.values()))
    means: Metrics = {name: float(np.mean([of[name] for of in found.values()])) for name in names}
    return means | {f"{name}/{language}": of[name] for language, of in found.items() for name in names}


def _recall(metrics: dict[str, float]) -> dict[str, float]:
    """Return recalls under CLIP_benchmark's names, the mean first. Text retrieval finds the captions of an image."""
    result = {"mean_recall@1": (metrics["retrieval_r1_i2t"] + metrics["retrieval_r1_t2i"]) / 2}
    for way, name in (("i2t", "text"), ("t2i", "image")):
        result |= {f"{name}_retrieval_recall@{k}": metrics[f"retrieval_r{k}_{way}"] for k in RECALL_AT}
    return result


def _numbers(data: LabelledDataset, ids: list[int]) -> np.ndarray:
    """Return the numbers in the `.npy` files of images, (n, F) int64, on every rank."""
    with raise_on_all_ranks():
        return np.array([data.facts(sample_id) for sample_id in ids])
