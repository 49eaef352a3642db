"""Encode images and captions for evaluation: every rank calls the model the same number of times.

Under ZeRO-3 a forward pass is a collective operation, because it gathers parameters. So no rank may skip a call or add
one. All of this package follows that rule: a rank with less data than the others encodes padding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import normalize

from megaclip.comm.collectives import gather_rows, raise_on_all_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data.batch import PADDING_ID

T = TypeVar("T")


class Encode(Protocol):
    """Function that encodes images (b, 3, H, W) uint8, tokens (b, L) int64, or both, on any device.

    It returns unit-length image features (b, D) and text features (b, D), None for an input that was not given.
    """

    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]: ...


class ModelEncoder:
    """`Encode` with a `DualEncoder`, or with the DeepSpeed engine of one; features are float32.

    The model is called without gradients. The caller sets its training or evaluation mode.

    Args:
        normalise: converts pixels (b, 3, H, W) uint8 to the image tower's input in a given dtype, such as
            `data.ImageTransform.normalise`.
        device: device of the model; inputs are moved there.
        image_dtype: dtype of the image tower's input (the engine's precision).
        cut_captions: cuts the padding of tokens (b, L) that no caption of the batch needs, such as
            `DualEncoder.cut_captions`. None: the padding is encoded too.
    """

    def __init__(
        self,
        model: nn.Module,
        normalise: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        *,
        device: torch.device,
        image_dtype: torch.dtype = torch.float32,
        cut_captions: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._model, self._normalise, self._device, self._image_dtype = model, normalise, device, image_dtype
        self._cut_captions = cut_captions

    @torch.no_grad()
    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if images is not None:
            images = self._normalise(images.to(self._device, non_blocking=True), self._image_dtype)
        if tokens is not None:
            tokens = tokens if self._cut_captions is None else self._cut_captions(tokens)
            tokens = tokens.to(self._device, non_blocking=True)
        image_features, text_features, *_ = self._model(images, tokens)
        return _unit(image_features), _unit(text_features)


def encode_texts(
    encode: Encode,
    texts: Sequence[str],
    tokenizer: Callable[[list[str]], torch.Tensor],
    *,
    batch_size: int,
    each: int = 1,
) -> torch.Tensor:
    """Return the features (n / each, D) float32 of n texts, of unit length, on every rank.

    Every rank must call it. It encodes a part of the texts, and calls `encode` as often as the other ranks.

    batch_size: number of texts that a rank encodes at once. each: number of consecutive texts whose mean is one row.
    """
    count = len(texts) // each
    per_rank = -(-count // group_size())
    # Ranks without rows of their own encode the last row again, because no rank may skip a call. The last line removes
    # those rows.
    mine = [min(group_rank() * per_rank + row, count - 1) for row in range(per_rank)]
    own = [text for row in mine for text in texts[row * each : (row + 1) * each]]
    features = []
    for start in range(0, len(own), batch_size):
        _, text_features = encode(tokens=tokenizer(own[start : start + batch_size]))
        assert text_features is not None, "encode(tokens=...) returns text features"
        features.append(normalize(text_features.float(), dim=-1))
    means = torch.cat(features).unflatten(0, (per_rank, each)).mean(dim=1)
    return gather_rows(normalize(means, dim=-1))[:count]


def encode_images(encode: Encode, batches: Iterable[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features (n, D) float32 of the images of all ranks, and [id, label] (n, 2) int64, sorted by id.

    Every rank must call it, and has all rows. batches: as for `zero_shot.classify`. Padding rows are left out.
    """
    features, facts = [], []
    for batch in in_step(batches):
        image_features, _ = encode(images=batch.images)
        assert image_features is not None, "encode(images=...) returns image features"
        features.append(image_features)
        facts.append(torch.stack([batch.ids, batch.labels], dim=1).to(image_features.device))
    all_features = gather_rows(torch.cat(features))
    all_facts = gather_rows(torch.cat(facts))
    order = all_facts[:, 0].argsort()
    order = order[all_facts[order, 0] != PADDING_ID]
    return all_features[order], all_facts[order]


def in_step(batches: Iterable[T]) -> Iterator[T]:
    """Yield `batches`. If any rank's loader fails, all ranks raise its error instead of waiting for that rank."""
    iterator = iter(batches)
    while True:
        with raise_on_all_ranks():
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _unit(features: torch.Tensor | None) -> torch.Tensor | None:
    """Normalise features in float32: lengths are inexact after a bfloat16 forward pass, which would change ranks."""
    return None if features is None else normalize(features.float(), dim=-1)
