"""Evaluate opened datasets: a loader reads this rank's share of each, and `scores.evaluate` computes the metrics.

Training runs and `megaclip evaluate` both use it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megaclip.comm.collectives import sum_counts
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer
from megaclip.evaluation.encoder import Encode
from megaclip.evaluation.scores import Evaluation, ZeroShotTask, evaluate

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Function of (batches, name of the evaluation) that returns the same batches and shows the progress over them."""


def evaluate_datasets(
    encode: Encode,
    *,
    pairs: PairDataset | None,
    labelled: LabelledDataset | None,
    transform: ImageTransform,
    tokenizer: Tokenizer,
    batch_size: int,
    num_workers: int,
    text_batch_size: int = 256,
    group_captions: bool = False,
    progress: Progress = lambda batches, _: batches,
) -> tuple[Evaluation, dict[str, int]]:
    """Return the evaluation, and the number of bad samples that all ranks left out of it, by kind.

    Every rank must call it.

    Args:
        pairs: dataset for retrieval, or None.
        labelled: dataset for zero-shot classification, or None. At least one dataset is required.
        batch_size: number of images that a rank encodes at once.
        num_workers: number of data worker processes per rank.
        text_batch_size: number of prompts that a rank encodes at once.
        group_captions: every line of a text in `pairs` is a caption.
        progress: shows the progress over the batches.

    Raises:
        DataError: on every rank, if the data cannot be evaluated.
    """
    loaders: list[EvaluationLoader] = []

    def batches(dataset: PairDataset | LabelledDataset, tokenizer: Tokenizer | None, name: str) -> Iterable[Any]:
        loader = EvaluationLoader(
            dataset,
            transform,
            tokenizer,
            batch_size=batch_size,
            rank=group_rank(),
            world_size=group_size(),
            num_workers=num_workers,
            by_line=group_captions,
        )
        loaders.append(loader)
        return progress(loaders[-1], name)

    task = None
    if labelled is not None:
        task = ZeroShotTask(batches(labelled, None, "zero-shot"), labelled.class_names, labelled.templates)
    result = evaluate(
        encode,
        tokenizer=tokenizer,
        pairs=None if pairs is None else batches(pairs, tokenizer, "retrieval"),
        labelled=task,
        text_batch_size=text_batch_size,
    )
    return result, sum_counts(sum((Counter(loader.bad_counts) for loader in loaders), Counter()))
