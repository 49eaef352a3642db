"""All evaluations of a model in one call.

Data comes from evaluation loaders (the same number of batches on every rank, padding rows with id -1), features from an
`Encode`. Every rank calls `evaluate`, and all call `encode` equally often, so it works under ZeRO-3.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaclip.comm.collectives import gather_integers, sum_over_ranks
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.captions import CaptionGroups, encode_captions
from megaclip.evaluation.encoder import Encode, in_step
from megaclip.evaluation.examples import RetrievalExamples, retrieval_examples, spread
from megaclip.evaluation.retrieval import retrieval
from megaclip.evaluation.zero_shot import zero_shot

Tokenize = Callable[[list[str]], torch.Tensor]


@dataclass(frozen=True)
class ZeroShotTask:
    """Labelled images and their classes: `batches` of `LabelledBatch`, names, and `templates` with `{c}` in each."""

    batches: Iterable[Any]
    class_names: Sequence[str]
    templates: Sequence[str]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, the same on every rank, and the data for the pictures (None without retrieval)."""

    metrics: dict[str, float] = field(default_factory=dict)
    examples: RetrievalExamples | None = None


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
    """Retrieval over `pairs` and zero-shot classification of `labelled`, whichever are given. Every rank must call it.

    pairs: this rank's `Batch`es of held-out image-caption pairs. By default every caption belongs to its own image;
    with `captions` (from `captions.group_captions`) an image may have several, and the tokens of the batches are not
    used. example_count: images and captions in the similarity picture. text_batch_size: prompts (or captions of
    `captions`) that a rank encodes at once.
    Raises DataError when there is nothing to evaluate, or images and captions do not match up.
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
        if captions is None:
            features = _encode_pairs(encode, pairs)
        else:
            features = _encode_groups(encode, pairs, captions, tokenizer, text_batch_size)
        rows = (features.images, features.texts, features.image_ids)
        metrics |= retrieval(*rows, features.text_image_ids)
        all_ids = torch.nonzero(_present(features.image_ids)).flatten().cpu().numpy()
        chosen = spread(all_ids, example_count)
        examples = retrieval_examples(*rows, features.leading_ids, chosen)
    if not metrics:
        raise DataError("expected image-caption pairs or labelled images to evaluate on, got neither")
    return Evaluation(metrics, examples)


@dataclass(frozen=True)
class _PairFeatures:
    """This rank's features (n, D), (m, D), and the image id of each row, (n,), (m,) int64; all on one device.
    `leading_ids` are `text_image_ids` with -1 where the image has an earlier caption."""

    images: torch.Tensor
    texts: torch.Tensor
    image_ids: torch.Tensor
    text_image_ids: torch.Tensor
    leading_ids: torch.Tensor


def _encode_pairs(encode: Encode, pairs: Iterable[Any]) -> _PairFeatures:
    """One caption per image: both towers, batch by batch."""
    images, texts, ids = [], [], []
    for batch in in_step(pairs):
        image_features, text_features = encode(images=batch.images, tokens=batch.tokens)
        assert image_features is not None and text_features is not None, "encode returns what it is given"
        images.append(image_features)
        texts.append(text_features)
        ids.append(batch.ids.to(image_features.device))
    _check_not_empty(ids)
    all_ids = torch.cat(ids)
    return _PairFeatures(torch.cat(images), torch.cat(texts), all_ids, all_ids, all_ids)


def _encode_groups(
    encode: Encode, pairs: Iterable[Any], captions: CaptionGroups, tokenizer: Tokenize, text_batch_size: int
) -> _PairFeatures:
    """Several captions per image: the images of the pairs, then this rank's captions."""
    images, ids = [], []
    for batch in in_step(pairs):
        image_features, _ = encode(images=batch.images)
        assert image_features is not None, "encode returns what it is given"
        images.append(image_features)
        ids.append(captions.image_ids_of(batch.ids).to(image_features.device))
    _check_not_empty(ids)
    image_ids = torch.cat(ids)
    captions = captions.of_images(_present(image_ids).cpu())
    device = image_ids.device
    texts = encode_captions(encode, captions.texts, tokenizer, batch_size=text_batch_size)
    return _PairFeatures(
        torch.cat(images), texts, image_ids, captions.image_ids.to(device), captions.leading_ids.to(device)
    )


def _check_not_empty(batches: list[torch.Tensor]) -> None:
    if not batches:
        raise DataError("retrieval needs at least one batch of image-caption pairs on every rank, got none")


def _present(ids: torch.Tensor) -> torch.Tensor:
    """Which image ids occur on any rank: (highest id + 1,) bool."""
    count = 1 + max(value for (value,) in gather_integers([int(ids.max())]))
    present = torch.zeros(count, dtype=torch.int64, device=ids.device)
    present[ids[ids != PADDING_ID]] = 1
    return sum_over_ranks(present) > 0
