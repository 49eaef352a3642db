"""Evaluate the tasks of a suite, a folder with one sub-folder per set of images, with the metric that papers report.

The files of a sub-folder select what is computed:

| files | task |
| --- | --- |
| tar shards, `classnames.txt` | zero-shot classification; several labels if `dataset_type.txt` is `multilabel` |
| one image folder per class | zero-shot classification |
| tar shards with captions, one per line | retrieval |
| files of Winoground, SugarCrepe, WinoGAViL, Crossmodal-3600 | as `items` describes |

The name of a sub-folder (`wds_<task>_test`, or the task alone) selects an entry of `datacomp_tasks.json`: the name of
the task in DataComp (Gadre et al. 2023), its main metric, and its groups of images. Other sets have the main metric of
their kind, such as accuracy.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaclip.comm.collectives import raise_on_all_ranks, sum_counts
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer, open_pairs
from megaclip.data.batch import BadSample
from megaclip.data.labelled import CLASS_NAMES_FILE, open_labelled, split_shards
from megaclip.errors import DataError, os_reason
from megaclip.evaluation.datasets import Progress, evaluate_datasets
from megaclip.evaluation.encoder import Encode, encode_images, encode_texts
from megaclip.evaluation.items import Item, ItemSet, item_files, open_items
from megaclip.evaluation.retrieval import RECALL_AT, retrieval
from megaclip.evaluation.task_metrics import (
    Metrics,
    accuracy_metrics,
    association_metrics,
    group_metrics,
    mean_average_precision,
    selection_metrics,
)
from megaclip.evaluation.zero_shot import class_weights, classify

DATASET_TYPE_FILE = "dataset_type.txt"
_UNREADABLE_ITEM = "items with an unreadable image"
TaskData = LabelledDataset | PairDataset | ItemSet


def _datacomp_tasks() -> dict[str, dict]:
    return json.loads(Path(__file__).with_name("datacomp_tasks.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Task:
    """One task of a suite."""

    key: str
    """DataComp's key, such as "vtab/caltech101"; the name of the folder for other sets, without wds_ and _test."""
    dataset: str
    """DataComp's name, such as "Caltech-101"; the name of the folder for other sets."""
    folder: Path
    items: Path | None = None
    """File of a set of items."""
    is_counted: bool = True
    """False for the tasks for which DataComp has no main metric. They are not evaluated."""
    is_datacomp: bool = False
    """Whether DataComp's average includes the task."""
    main_metric: str | None = None
    """Main metric, if it is not that of the kind of the task."""
    fields: Sequence[str] = ()
    """Names of the numbers in the `.npy` file of each image."""
    groups: dict[str, str] = field(default_factory=dict)
    """Name of the worst accuracy of the groups by a field."""


@dataclass(frozen=True)
class TaskResult:
    """Result of a task, equal on every rank."""

    metrics: Metrics
    """Metrics by name. `main_metric` is the one that counts."""
    main_metric: str
    """Name of the main metric."""
    samples: int
    """Number of images, or of items."""
    bad_samples: dict[str, int]
    """Number of samples that were left out, by kind."""


def find_tasks(suite: Path) -> list[Task]:
    """Return the tasks in the sub-folders of a folder, sorted by key. Raises DataError if there are none."""
    try:
        folders = sorted(entry for entry in suite.iterdir() if entry.is_dir() and entry.name[0] != ".")
        tasks = [task for folder in folders for task in _tasks_of(folder)]
    except OSError as error:
        raise DataError(f"cannot read the suite {str(suite)!r}: {os_reason(error)}") from error
    if not tasks:
        raise DataError(f"the suite {str(suite)!r} has no sub-folders; expected one per task, such as wds_cars_test")
    return sorted(tasks, key=lambda task: task.key)


def datacomp_keys() -> list[str]:
    """Return the keys of the tasks that DataComp's average includes."""
    return [key for key, settings in _datacomp_tasks().items() if settings.get("main_metric", "acc1") is not None]


def _tasks_of(folder: Path) -> list[Task]:
    table, counted = _datacomp_tasks(), datacomp_keys()

    def task(key: str, items: Path | None = None) -> Task:
        settings = {name: value for name, value in table.get(key, {"dataset": key}).items() if name != "folders"}
        is_counted = key in counted or key not in table
        return Task(key=key, folder=folder, items=items, is_counted=is_counted, is_datacomp=key in counted, **settings)

    if found := item_files(folder):
        return [task(key, path) for key, path in found]
    name = folder.name.removeprefix("wds_").removesuffix("_test")
    for key, settings in table.items():
        if name.lower() in (key.replace("/", "-"), key.rpartition("/")[2], *settings.get("folders", ())):
            return [task(key)]
    return [task(name)]


def open_task(task: Task) -> TaskData:
    """Open the data of a task. Raises DataError, with one line, if it is missing or cannot be read."""
    if task.items is not None:
        return open_items(task.key, task.items)
    shards, kind = split_shards(task.folder), ""
    try:
        if (task.folder / DATASET_TYPE_FILE).is_file():
            kind = (task.folder / DATASET_TYPE_FILE).read_text(encoding="utf-8").strip().lower()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {task.folder / DATASET_TYPE_FILE}: {error}") from error
    if kind not in ("", "classification", "multilabel", "retrieval"):
        raise DataError(
            f"{task.folder / DATASET_TYPE_FILE} is {kind[:20]!r}; expected classification, multilabel or retrieval"
        )
    if kind == "retrieval" or (not kind and shards and not (task.folder / CLASS_NAMES_FILE).is_file()):
        return open_pairs([f"{shards[0].parent}/*.tar" if shards else str(task.folder)])
    facts = 0 if kind == "multilabel" else len(task.fields) or None
    return open_labelled(task.folder, split="test", facts=facts)


class TaskScorer:
    """Computes the metrics of tasks with one model. Every rank must call it for the same tasks.

    Class embeddings are computed once for all tasks with the same class names and templates.

    Args:
        encode: the model.
        transform: preprocessing of the images.
        batch_size: number of images, and of texts, that a rank encodes at once.
        num_workers: number of data worker processes per rank.
        progress: shows the progress over the batches.
    """

    def __init__(
        self,
        encode: Encode,
        transform: ImageTransform,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        num_workers: int,
        progress: Progress = lambda batches, _: batches,
    ) -> None:
        self._encode, self._transform, self._tokenizer = encode, transform, tokenizer
        self._batch_size, self._num_workers, self._progress = batch_size, num_workers, progress
        self._weights: dict[tuple[tuple[str, ...], tuple[str, ...]], torch.Tensor] = {}

    def score(self, task: Task, data: TaskData) -> TaskResult:
        """Return the result of a task. data: from `open_task`. Raises DataError on every rank."""
        if isinstance(data, PairDataset):
            return self._retrieval(task, data)
        loader = EvaluationLoader(
            data,
            self._transform,
            None,
            batch_size=self._batch_size,
            rank=group_rank(),
            world_size=group_size(),
            num_workers=self._num_workers,
        )
        batches = self._progress(loader, task.dataset)
        if isinstance(data, ItemSet):
            features, facts = encode_images(self._encode, batches)
            metrics, main, samples = self._items(task, data, features, facts[:, 0].tolist())
        else:
            metrics, main, samples = self._classification(task, data, batches)
        bad_samples = sum_counts(loader.bad_counts)
        if isinstance(data, ItemSet) and samples < len(data.items):
            bad_samples[_UNREADABLE_ITEM] = len(data.items) - samples
        return _result(task, metrics, main, samples, bad_samples)

    def weights(self, data: LabelledDataset) -> torch.Tensor:
        """Return the class embeddings (C, D) of a labelled dataset."""
        key = (tuple(data.class_names), tuple(data.templates))
        if key not in self._weights:
            self._weights[key] = class_weights(
                self._encode, data.class_names, data.templates, self._tokenizer, prompt_batch_size=self._batch_size
            )
        return self._weights[key]

    def _retrieval(self, task: Task, data: PairDataset) -> TaskResult:
        result, bad_samples = evaluate_datasets(
            self._encode,
            pairs=data,
            labelled=None,
            transform=self._transform,
            tokenizer=self._tokenizer,
            batch_size=self._batch_size,
            num_workers=self._num_workers,
            group_captions=True,
            progress=lambda batches, _: self._progress(batches, task.dataset),
        )
        assert result.examples is not None, "evaluate_datasets(pairs=...) returns examples"
        return _result(task, {**_recall(result.metrics)}, "mean_recall@1", result.examples.candidates, bad_samples)

    def _classification(self, task: Task, data: LabelledDataset, batches: Iterable[Any]) -> tuple[Metrics, str, int]:
        weights = self.weights(data)
        if data.has_several_labels:
            features, facts = encode_images(self._encode, batches)
            targets = _facts(data, facts[:, 0].cpu().numpy())
            scores = (features.double() @ weights.double().T).cpu().numpy()
            metrics: Metrics = {"mean_average_precision": mean_average_precision(scores, targets == 1)}
            return metrics, "mean_average_precision", len(scores)
        found = classify(self._encode, batches, weights)
        metrics = accuracy_metrics(found, len(weights))
        if task.groups:
            groups = _facts(data, found.ids)
            for name, worst in task.groups.items():
                hits = found.ranks < 5 if "_top5_" in worst else found.ranks == 0
                column = groups[:, list(task.fields).index(name)]
                metrics |= group_metrics(hits, column, name, worst.rpartition("_w")[0], worst)
        return metrics, "acc1", len(found.ids)

    def _items(self, task: Task, data: ItemSet, features: torch.Tensor, images: list[int]) -> tuple[Metrics, str, int]:
        """features: (n, D) of the images with the places `images`; the others cannot be read."""
        row = {image: number for number, image in enumerate(images)}
        items = [item for item in data.items if all(image in row for image in item.images)]
        if not items:
            raise DataError(f"{task.folder}: the images of all {len(data.items)} items are missing or unreadable")
        if items[0].language:
            return self._languages(data, items, features, row), "mean_recall@1", len(items)
        texts = encode_texts(self._encode, data.captions, self._tokenizer, batch_size=self._batch_size)
        image_features, text_features = features.double().cpu().numpy(), texts.double().cpu().numpy()
        similarities = [
            image_features[[row[image] for image in item.images]] @ text_features[list(item.captions)].T
            for item in items
        ]
        if items[0].right:
            is_right = [np.isin(item.images, item.right) for item in items]
            metrics = association_metrics([values[:, 0] for values in similarities], is_right)
            return metrics, "jaccard_score_10-12", len(items)
        return selection_metrics(similarities), "acc", len(items)

    def _languages(self, data: ItemSet, items: list[Item], features: torch.Tensor, row: dict[int, int]) -> Metrics:
        """Return recalls of each language, as `image_retrieval_recall@1/en`, and their means over the languages."""
        by_language: dict[str, dict[str, float]] = {}
        for language in sorted({item.language for item in items}):
            own = [item for item in items if item.language == language]
            captions = [data.captions[item.captions[0]] for item in own]
            texts = encode_texts(self._encode, captions, self._tokenizer, batch_size=self._batch_size)
            ids = torch.tensor([item.images[0] for item in own], device=features.device)
            images = features[torch.tensor([row[item.images[0]] for item in own], device=features.device)]
            mine = slice(group_rank(), None, group_size())
            by_language[language] = _recall(retrieval(images[mine], texts[mine], ids[mine]))
        names = next(iter(by_language.values()))
        means: Metrics = {name: float(np.mean([of[name] for of in by_language.values()])) for name in names}
        return means | {f"{name}/{language}": of[name] for language, of in by_language.items() for name in names}


def _result(task: Task, metrics: Metrics, main: str, samples: int, bad_samples: dict[str, int]) -> TaskResult:
    main = task.main_metric or main
    if main not in metrics:
        raise DataError(
            f"{task.folder}: the metric of {task.dataset} is {main}, but this set gives {', '.join(metrics)}; rename "
            "the folder if it holds another set"
        )
    return TaskResult({**metrics, "main_metric": metrics[main]}, main, samples, bad_samples)


def _recall(metrics: dict[str, float]) -> dict[str, float]:
    """Return recalls under CLIP_benchmark's names. Text retrieval finds the captions of an image."""
    result: dict[str, float] = {}
    for way, name in (("i2t", "text"), ("t2i", "image")):
        result |= {f"{name}_retrieval_recall@{k}": metrics[f"retrieval_r{k}_{way}"] for k in RECALL_AT}
    return result | {"mean_recall@1": (metrics["retrieval_r1_i2t"] + metrics["retrieval_r1_t2i"]) / 2}


def _facts(data: LabelledDataset, ids: np.ndarray) -> np.ndarray:
    """Return the numbers in the `.npy` files of images, (n, F) int64, on every rank."""
    with raise_on_all_ranks():
        try:
            return np.array([data.facts(sample_id) for sample_id in ids.tolist()])
        except BadSample as bad:
            raise DataError(str(bad)) from bad
