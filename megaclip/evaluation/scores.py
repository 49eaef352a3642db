"""Evaluate a model on datasets: retrieval of image-caption pairs and zero-shot classification.

`Evaluator` reads opened datasets. Training runs and `megaclip evaluate` use it, also for the tasks of a `suite`.
`evaluate_pairs` takes the batches of an evaluation loader: the same number on every rank, with id -1 at padding rows.
An `Encode` computes the features. Every rank calls `encode` equally often, so it works under ZeRO-3.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megaclip.comm.collectives import gather_integers, gather_rows, sum_counts, sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer
from megaclip.data.batch import PADDING_ID
from megaclip.data.reading import MIN_SAMPLES_FOR_LIMIT, ReadableSet
from megaclip.errors import DataError
from megaclip.evaluation.encoder import Encode, in_step
from megaclip.evaluation.retrieval import RetrievalExamples, retrieval, retrieval_examples
from megaclip.evaluation.zero_shot import class_weights, classify
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Function of (batches, name of the evaluation) that returns the same batches and shows the progress over them."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, equal on every rank."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by name, each between 0 and 1."""
    examples: RetrievalExamples | None = None
    """Data of the evaluation pictures; None without retrieval."""
    bad_samples: dict[str, int] = field(default_factory=dict)
    """Number of bad samples that all ranks left out, by kind."""
    captions: int = 0
    """Number of captions that were ranked for retrieval."""


@dataclass
class Evaluator:
    """Evaluates datasets with one model. Every rank must call its methods for the same data."""

    encode: Encode
    transform: ImageTransform
    tokenizer: Tokenizer
    batch_size: int
    """Number of images, with their captions, that a rank encodes at once."""
    num_workers: int
    """Number of data worker processes per rank."""
    text_batch_size: int = 256
    """Number of prompts, and of captions of a suite's items, that a rank encodes at once."""
    progress: Progress = lambda batches, _: batches
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def evaluate(
        self, pairs: PairDataset | None, labelled: LabelledDataset | None, *, group_captions: bool = False
    ) -> Evaluation:
        """Return the scores of retrieval of `pairs` and zero-shot classification of `labelled`, if given.

        group_captions: every line of a text in `pairs` is a caption. Raises DataError on every rank, if the data cannot
        be evaluated.
        """
        metrics, bad_samples, result = dict[str, float](), Counter[str](), Evaluation()
        if labelled is not None:
            loader = self.loader(labelled)
            found = classify(self.encode, self.progress(loader, "zero-shot"), self.class_weights(labelled))
            metrics |= {f"zero_shot_top{k}": found.accuracy(k) for k in (1, 5)}
            bad_samples.update(count_bad_samples(loader))
        if pairs is not None:
            loader = self.loader(pairs, by_line=group_captions)
            result = evaluate_pairs(self.encode, self.progress(loader, "retrieval"))
            bad_samples.update(count_bad_samples(loader))
        return replace(result, metrics=metrics | result.metrics, bad_samples=dict(bad_samples.most_common()))

    def loader(self, data: ReadableSet, *, by_line: bool = True) -> EvaluationLoader:
        """Return this rank's loader of a dataset. by_line: every line of a text is a caption."""
        return EvaluationLoader(
            data,
            self.transform,
            self.tokenizer if isinstance(data, PairDataset) else None,
            batch_size=self.batch_size,
            rank=group_rank(),
            world_size=group_size(),
            num_workers=self.num_workers,
            by_line=by_line,
        )

    def class_weights(self, data: LabelledDataset) -> torch.Tensor:
        """Return the class embeddings (C, D) of a dataset. Equal classes and templates are encoded once."""
        key = json.dumps([data.class_names, data.templates])
        if key not in self._weights:  # several sets of a suite have the classes of ImageNet
            self._weights[key] = class_weights(
                self.encode, data.class_names, data.templates, self.tokenizer, prompt_batch_size=self.text_batch_size
            )
        return self._weights[key]


def count_bad_samples(loader: EvaluationLoader) -> dict[str, int]:
    """Return the number of bad samples of all ranks by kind, after an iteration. Every rank must call it.

    Raises DataError on every rank if there are too many. Each rank's loader compares only its own with the limit.
    """
    counts, limit = sum_counts(loader.bad_counts), loader.max_bad_fraction
    if sum(counts.values()) > limit * max(len(loader.dataset), MIN_SAMPLES_FOR_LIMIT):
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise DataError(f"{kinds} among {len(loader.dataset)} samples, over the limit {limit:g}; repair the data")
    return counts


def evaluate_pairs(encode: Encode, batches: Iterable[Any], *, example_count: int = 32) -> Evaluation:
    """Return the scores of retrieval over all ranks, with examples. Every rank must call it.

    Args:
        batches: this rank's `EvaluationBatch`es of image-caption pairs. Pairs with equal images are one image with
            several captions.
        example_count: number of images and captions in the similarity picture.

    Raises:
        DataError: there are no pairs.
    """
    images, texts, image_ids, text_image_ids, leading_ids = _encode_pairs(encode, batches)
    examples = retrieval_examples(images, texts, image_ids, leading_ids, example_count)
    captions = int(sum_over_ranks((text_image_ids != PADDING_ID).sum()))
    return Evaluation(retrieval(images, texts, image_ids, text_image_ids), examples, captions=captions)


def _encode_pairs(encode: Encode, pairs: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Encode this rank's images and captions batch by batch, and group the captions by image.

    Returns:
        Image features (n, D), text features (m, D), the id of each image (n,), the id of each caption's image (m,), and
        the same with -1 for all captions of an image but the first.
    """
    images, texts, columns, rows = [list[torch.Tensor]() for _ in range(4)]
    for number, batch in enumerate(in_step(pairs)):
        image_features, text_features = _encode_batch(encode, batch)
        images.append(image_features)
        texts.append(text_features)
        rows.append((batch.caption_rows + number * len(batch.ids)).to(image_features.device))
        columns.append(torch.stack([batch.ids, batch.image_digests, batch.caption_lines]).to(image_features.device))
    if not columns:
        raise DataError("retrieval requires at least one batch of image-caption pairs on every rank, got none")
    pair_ids, digests, lines = torch.cat(columns, dim=1)
    _warn_of_lines(lines)
    image_of_pair, row = first_equal_image(pair_ids, digests), torch.cat(rows)
    image_ids = pair_ids.masked_fill(image_of_pair != pair_ids, PADDING_ID)  # a repeated image counts once
    is_first = row.diff(prepend=row.new_tensor([-1])) > 0
    leading_ids = image_ids[row].masked_fill(~is_first, PADDING_ID)
    return torch.cat(images), torch.cat(texts), image_ids, image_of_pair[row], leading_ids


def first_equal_image(pair_ids: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """Return the id of each pair's image, the smallest id of all pairs with an equal image, (n,) int64.

    Datasets with one pair per caption repeat images (COCO, Flickr). Every rank must call it, with equally many rows.
    Ranks exchange only a 64-bit digest per pair.

    pair_ids: (n,) int64, unique over all ranks; padding has PADDING_ID and keeps it. digests: (n,) int64.
    """
    gathered = gather_rows(torch.stack([pair_ids, digests], dim=1))
    all_ids, all_digests = gathered[gathered[:, 0] != PADDING_ID].unbind(1)
    if not len(all_ids):
        return pair_ids
    all_ids, order = all_ids.sort()
    _, distinct = all_digests[order].unique(return_inverse=True)
    smallest = all_ids.clone().scatter_reduce_(0, distinct, all_ids, reduce="amin", include_self=False)
    places = torch.searchsorted(all_ids, pair_ids).clamp(max=len(all_ids) - 1)
    return torch.where(pair_ids == PADDING_ID, PADDING_ID, smallest[distinct[places]])


def _encode_batch(encode: Encode, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of b images (b, D) and of all their m captions (m, D).

    Ranks may have different m. Every rank calls `encode` equally often, each time with b captions.
    """
    size, count = len(batch.images), len(batch.tokens)
    most = max(number for (number,) in gather_integers([count]))
    features = []
    for start in range(0, most, size):
        place = torch.arange(start, start + size)
        tokens = batch.tokens[place.where(place < count, 0)]
        features.append(encode(images=None if start else batch.images, tokens=tokens))
    # `encode` may return None, but only for what it was not given.
    return features[0][0], torch.cat([texts for _, texts in features])[:count]  # type: ignore[return-value, misc]


def _warn_of_lines(caption_lines: torch.Tensor) -> None:
    """Warn once if captions have several lines, which may be several captions. caption_lines: those of this rank."""
    several = int(sum_over_ranks((caption_lines > 1).sum()))
    if several:
        log_once(
            _logger.warning,
            f"texts of --val-data with several lines: {several}; each text is one caption, and --group-captions makes "
            "each line a caption of its own",
        )
