"""Evaluation on opened datasets: `suite.evaluate` behind a loader of this rank's share of each.

A run and tools/evaluate.py both evaluate so.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megaclip.comm.collectives import sum_counts
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer
from megaclip.evaluation.captions import CaptionGroups
from megaclip.evaluation.encoder import Encode
from megaclip.evaluation.suite import Evaluation, ZeroShotTask, evaluate

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""(batches, what they are for) -> the same batches."""


def evaluate_datasets(
    encode: Encode,
    *,
    pairs: PairDataset | None,
    labelled: LabelledDataset | None,
    captions: CaptionGroups | None,
    transform: ImageTransform,
    tokenizer: Tokenizer,
    batch_size: int,
    num_workers: int,
    text_batch_size: int = 256,
    progress: Progress = lambda batches, _: batches,
) -> tuple[Evaluation, dict[str, int]]:
    """The evaluation, and how many bad samples all ranks left out of it, by kind. Every rank must call it.

    pairs: for retrieval; labelled: for zero-shot classification; either may be None, not both. captions,
    text_batch_size: as in `evaluate`. batch_size: images of a rank at a time. progress: shows the batches going by.
    Raises DataError, on every rank.
    """
    loaders: list[EvaluationLoader] = []

    def batches(dataset: PairDataset | LabelledDataset, tokenizer: Tokenizer | None, name: str) -> Iterable[Any]:
        options = {"rank": group_rank(), "world_size": group_size(), "num_workers": num_workers}
        loaders.append(EvaluationLoader(dataset, transform, tokenizer, batch_size=batch_size, **options))
        return progress(loaders[-1], name)

    task = None
    if labelled is not None:
        task = ZeroShotTask(batches(labelled, None, "zero-shot"), labelled.class_names, labelled.templates)
    result = evaluate(
        encode,
        tokenizer=tokenizer,
        pairs=None if pairs is None else batches(pairs, tokenizer, "retrieval"),
        captions=captions,
        labelled=task,
        text_batch_size=text_batch_size,
    )
    return result, sum_counts(sum((Counter(loader.bad_counts) for loader in loaders), Counter()))
