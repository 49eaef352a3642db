"""Evaluate a model on datasets: retrieval of image-caption pairs and zero-shot classification.

`Evaluator` reads opened datasets. Training runs and `megaclip evaluate` use it, also for the tasks of a `suite`.
`evaluate_pairs` takes the batches of an evaluation loader: the same number on every rank, with id -1 at padding rows.
An `Encode` computes the features. Every rank calls `encode` equally often, so it works under ZeRO-3.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import normalize

from megaclip.comm.collectives import gather_integers, gather_rows, sum_counts, sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer
from megaclip.data.batch import PADDING_ID
from megaclip.data.reading import MIN_SAMPLES_FOR_LIMIT, ReadableSet
from megaclip.errors import DataError
from megaclip.evaluation.encoder import Encode, image_features, in_step
from megaclip.evaluation.retrieval import RetrievalExamples, retrieval, retrieval_examples
from megaclip.evaluation.zero_shot import classify
from megaclip.logging import get_logger, log_once

_EXAMPLES = 32
"""Number of images and captions in the similarity picture."""

_logger = get_logger(__name__)


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
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, _: batches
    """Function of (batches, name of the evaluation) that returns the same batches and shows the progress over them."""
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
            images = image_features(self.encode, self.progress(loader, "zero-shot"))
            found = classify(images, self.class_weights(labelled))
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
        """Return the class embeddings (C, D) float32 of a dataset, of unit length, on every rank.

        Every rank must call it. Equal classes and templates are encoded once.
        """
        key = json.dumps([data.class_names, data.templates])
        if key not in self._weights:  # several sets of a suite have the classes of ImageNet
            prompts = [template.replace("{c}", name) for name in data.class_names for template in data.templates]
            self._weights[key] = self.text_features(prompts, each=len(data.templates))
        return self._weights[key]

    def text_features(self, texts: Sequence[str], *, each: int = 1) -> torch.Tensor:
        """Return the features (n / each, D) float32 of n texts, of unit length, on every rank.

        Every rank must call it. It encodes a part of the texts, and calls `encode` as often as the other ranks.

        each: number of consecutive texts whose mean is one row.
        """
        count = len(texts) // each
        per_rank = -(-count // group_size())
        # Ranks without rows of their own encode the last row again, because no rank may skip a call. The last line
        # removes those rows.
        mine = [min(group_rank() * per_rank + row, count - 1) for row in range(per_rank)]
        own = [text for row in mine for text in texts[row * each : (row + 1) * each]]
        features = []
        for start in range(0, len(own), self.text_batch_size):
            _, text_features = self.encode(tokens=self.tokenizer(own[start : start + self.text_batch_size]))
            assert text_features is not None, "encode(tokens=...) returns text features"
            features.append(normalize(text_features.float(), dim=-1))
        means = torch.cat(features).unflatten(0, (per_rank, each)).mean(dim=1)
        return gather_rows(normalize(means, dim=-1))[:count]


def count_bad_samples(loader: EvaluationLoader) -> dict[str, int]:
    """Return the number of bad samples of all ranks by kind, after an iteration. Every rank must call it.

    Raises DataError on every rank if there are too many. Each rank's loader compares only its own with the limit.
    """
    counts, limit = sum_counts(loader.bad_counts), loader.max_bad_fraction
    if sum(counts.values()) > limit * max(len(loader.dataset), MIN_SAMPLES_FOR_LIMIT):
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise DataError(f"{kinds} among {len(loader.dataset)} samples, over the limit {limit:g}; repair the data")
    return counts


def evaluate_pairs(encode: Encode, batches: Iterable[Any]) -> Evaluation:
    """Return the scores of retrieval over all ranks, with examples. Every rank must call it.

    batches: this rank's `EvaluationBatch`es of image-caption pairs. Pairs with equal images are one image with several
    captions. Raises DataError if there are no pairs.
    """
    images, texts, row, columns = _encode_pairs(encode, batches)
    pair_ids, digests, lines = columns.T.contiguous()
    if several := int(sum_over_ranks((lines > 1).sum())):
        log_once(
            _logger.warning,
            f"texts of --val-data with several lines: {several}; each text is one caption, and --group-captions makes "
            "each line a caption of its own",
        )
    image_of_pair = first_equal_image(pair_ids, digests)
    image_ids = pair_ids.masked_fill(image_of_pair != pair_ids, PADDING_ID)  # a repeated image counts once
    text_image_ids = image_of_pair[row]
    is_first = row.diff(prepend=row.new_tensor([-1])) > 0  # of the captions of its pair
    leading_ids = image_ids[row].masked_fill(~is_first, PADDING_ID)
    examples = retrieval_examples(images, texts, image_ids, leading_ids, _EXAMPLES)
    captions = int(sum_over_ranks((text_image_ids != PADDING_ID).sum()))
    return Evaluation(retrieval(images, texts, image_ids, text_image_ids), examples, captions=captions)


def _encode_pairs(encode: Encode, batches: Iterable[Any]) -> list[torch.Tensor]:
    """Return the features of this rank's images (n, D) and captions (m, D), the pair's row of each caption (m,), and
    [id, digest, lines] of each pair (n, 3). The features of single batches are freed when it returns."""
    parts = []
    for number, batch in enumerate(in_step(batches)):
        images, texts = _encode_batch(encode, batch)
        rows = batch.caption_rows + number * len(batch.ids)
        columns = torch.stack([batch.ids, batch.image_digests, batch.caption_lines], dim=1)
        parts.append((images, texts, rows.to(images.device), columns.to(images.device)))
    if not parts:
        raise DataError("retrieval requires at least one batch of image-caption pairs on every rank, got none")
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


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
