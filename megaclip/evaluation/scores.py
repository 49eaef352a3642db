"""Evaluate a model: retrieval and zero-shot classification in one call.

`evaluate_datasets` reads opened datasets; training runs and `megaclip evaluate` use it. `evaluate` takes the batches of
evaluation loaders: the same number on every rank, with id -1 at padding rows. An `Encode` computes the features. Every
rank calls `encode` equally often, so it works under ZeRO-3.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaclip.comm.collectives import gather_integers, gather_rows, sum_counts, sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, PairDataset, Tokenizer
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.encoder import Encode, in_step
from megaclip.evaluation.retrieval import RetrievalExamples, retrieval, retrieval_examples, spread
from megaclip.evaluation.zero_shot import class_weights, classify
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

Tokenize = Callable[[list[str]], torch.Tensor]
Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Function of (batches, name of the evaluation) that returns the same batches and shows the progress over them."""


@dataclass(frozen=True)
class ZeroShotTask:
    """Labelled images and their classes."""

    batches: Iterable[Any]
    """This rank's `LabelledBatch`es."""
    class_names: Sequence[str]
    """Name of each class, in the order of the labels."""
    templates: Sequence[str]
    """Prompts, each with `{c}` at the place of the class name."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, equal on every rank."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by name, each between 0 and 1."""
    examples: RetrievalExamples | None = None
    """Data of the evaluation pictures; None without retrieval."""


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
        return progress(loader, name)

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


def evaluate(
    encode: Encode,
    *,
    tokenizer: Tokenize,
    pairs: Iterable[Any] | None = None,
    labelled: ZeroShotTask | None = None,
    example_count: int = 32,
    text_batch_size: int = 256,
) -> Evaluation:
    """Evaluate retrieval of `pairs` and zero-shot classification of `labelled`, if given. Every rank must call it.

    Args:
        pairs: this rank's `EvaluationBatch`es of held-out image-caption pairs, or None. Pairs with equal images are one
            image with several captions.
        labelled: images and classes for zero-shot classification, or None.
        example_count: number of images and captions in the similarity picture.
        text_batch_size: number of prompts that a rank encodes at once.

    Raises:
        DataError: neither `pairs` nor `labelled` is given, or images and captions do not match.
    """
    metrics: dict[str, float] = {}
    examples = None
    if labelled is not None:
        names, templates = labelled.class_names, labelled.templates
        weights = class_weights(encode, names, templates, tokenizer, prompt_batch_size=text_batch_size)
        ranks = classify(encode, labelled.batches, weights).ranks
        metrics |= {f"zero_shot_top{k}": float((ranks < k).mean()) for k in (1, 5)}
    if pairs is not None:
        images, texts, image_ids, text_image_ids, leading_ids = _encode_pairs(encode, pairs)
        metrics |= retrieval(images, texts, image_ids, text_image_ids)
        all_ids = torch.nonzero(_present(image_ids)).flatten().cpu().numpy()
        examples = retrieval_examples(images, texts, image_ids, leading_ids, spread(all_ids, example_count))
    if not metrics:
        raise DataError("evaluation requires image-caption pairs or labelled images, got neither")
    return Evaluation(metrics, examples)


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
            f"{several} texts of --val-data have several lines, and each text is one caption; --group-captions makes "
            "each line a caption of its own",
        )


def _present(ids: torch.Tensor) -> torch.Tensor:
    """Return (highest id + 1,) bool, True at the image ids that occur on any rank."""
    count = 1 + max(value for (value,) in gather_integers([int(ids.max())]))
    present = torch.zeros(count, dtype=torch.int64, device=ids.device)
    present[ids[ids != PADDING_ID]] = 1
    return sum_over_ranks(present) > 0
