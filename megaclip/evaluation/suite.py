"""Evaluate a model: retrieval and zero-shot classification in one call.

Evaluation loaders supply the data: the same number of batches on every rank, with id -1 at padding rows. An `Encode`
computes the features. Every rank calls `evaluate`, which calls `encode` equally often on every rank, so it works under
ZeRO-3.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaclip.comm.collectives import gather_integers, sum_over_ranks
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.caption_groups import CaptionGroups, encode_captions, first_equal_image
from megaclip.evaluation.encoder import Encode, in_step
from megaclip.evaluation.examples import RetrievalExamples, retrieval_examples, spread
from megaclip.evaluation.retrieval import NO_PAIRS, retrieval
from megaclip.evaluation.zero_shot import zero_shot
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

Tokenize = Callable[[list[str]], torch.Tensor]


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


def evaluate(
    encode: Encode,
    *,
    tokenizer: Tokenize,
    pairs: Iterable[Any] | None = None,
    captions: CaptionGroups | None = None,
    labelled: ZeroShotTask | None = None,
    example_count: int = 32,
    text_batch_size: int = 256,
) -> Evaluation:
    """Evaluate retrieval of `pairs` and zero-shot classification of `labelled`, if given. Every rank must call it.

    Args:
        pairs: this rank's `Batch`es of held-out image-caption pairs, or None.
        captions: result of `group_captions`, for all captions in lists and on lines; the tokens of `pairs` are then
            not used. None: one caption per pair. Pairs with equal images are one image with several captions.
        labelled: images and classes for zero-shot classification, or None.
        example_count: number of images and captions in the similarity picture.
        text_batch_size: number of prompts, or of captions in `captions`, that a rank encodes at once.

    Raises:
        DataError: neither `pairs` nor `labelled` is given, or images and captions do not match.
    """
    metrics: dict[str, float] = {}
    examples = None
    if labelled is not None:
        metrics |= zero_shot(
            encode,
            labelled.batches,
            labelled.class_names,
            labelled.templates,
            tokenizer,
            prompt_batch_size=text_batch_size,
        )
    if pairs is not None:
        features = _encode_pairs(encode, pairs, captions, tokenizer, text_batch_size)
        rows = (features.images, features.texts, features.image_ids)
        metrics |= retrieval(*rows, features.text_image_ids)
        all_ids = torch.nonzero(_present(features.image_ids)).flatten().cpu().numpy()
        chosen = spread(all_ids, example_count)
        examples = retrieval_examples(*rows, features.leading_ids, chosen)
    if not metrics:
        raise DataError("evaluation requires image-caption pairs or labelled images, got neither")
    return Evaluation(metrics, examples)


@dataclass(frozen=True)
class _PairFeatures:
    """This rank's features and their image ids, on one device."""

    images: torch.Tensor
    """Image features (n, D)."""
    texts: torch.Tensor
    """Text features (m, D)."""
    image_ids: torch.Tensor
    """Id of each image (n,) int64."""
    text_image_ids: torch.Tensor
    """Id of each caption's image (m,) int64."""
    leading_ids: torch.Tensor
    """`text_image_ids` for the first caption of each image, -1 for its other captions."""


def _encode_pairs(
    encode: Encode, pairs: Iterable[Any], captions: CaptionGroups | None, tokenizer: Tokenize, text_batch_size: int
) -> _PairFeatures:
    """Encode images and captions batch by batch; with `captions` first all images, then this rank's captions."""
    images, texts, columns = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for batch in in_step(pairs):
        image_features, text_features = encode(images=batch.images, tokens=batch.tokens if captions is None else None)
        assert image_features is not None, "encode returns features for every given input"
        images.append(image_features)
        texts += [] if text_features is None else [text_features]
        columns.append(torch.stack([batch.ids, batch.image_digests, batch.caption_counts]).to(image_features.device))
    if not columns:
        raise DataError("retrieval requires at least one batch of image-caption pairs on every rank, got none")
    pair_ids, digests, caption_counts = torch.cat(columns, dim=1)
    if captions is None:
        _warn_of_several_captions(caption_counts)
        text_image_ids = first_equal_image(pair_ids, digests)
        image_ids = pair_ids.masked_fill(text_image_ids != pair_ids, PADDING_ID)  # a repeated image counts once
        return _PairFeatures(torch.cat(images), torch.cat(texts), image_ids, text_image_ids, image_ids)
    image_ids = captions.image_ids_of(pair_ids)
    present = _present(image_ids).cpu()
    if not present.any():
        raise DataError(NO_PAIRS)
    captions = captions.of_images(present)
    text_features = encode_captions(encode, captions.texts, tokenizer, batch_size=text_batch_size)
    caption_ids = (captions.image_ids.to(image_ids.device), captions.leading_ids.to(image_ids.device))
    return _PairFeatures(torch.cat(images), text_features, image_ids, *caption_ids)


def _warn_of_several_captions(caption_counts: torch.Tensor) -> None:
    """Warn once if images have several captions, of which only one is evaluated. caption_counts: those of this rank."""
    several = int(sum_over_ranks((caption_counts > 1).sum()))
    if several:
        log_once(
            _logger.warning,
            f"{several} images of --val-data have several captions, and retrieval takes the first caption of a list "
            "and all lines of a file as one caption; --group-captions makes each a caption of its own",
        )


def _present(ids: torch.Tensor) -> torch.Tensor:
    """Return (highest id + 1,) bool, True at the image ids that occur on any rank."""
    count = 1 + max(value for (value,) in gather_integers([int(ids.max())]))
    present = torch.zeros(count, dtype=torch.int64, device=ids.device)
    present[ids[ids != PADDING_ID]] = 1
    return sum_over_ranks(present) > 0
