"""Encode images and captions for evaluation: every rank calls the model the same number of times.

Under ZeRO-3 a forward pass is a collective operation, because it gathers parameters. So no rank may skip a call or add
one. All of this package follows that rule: a rank with less data than the others encodes padding.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import normalize

from megaclip.comm.collectives import gather_rows, raise_on_all_ranks
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


def image_features(encode: Encode, batches: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the features (b, D) of the images of each batch, and [id, label] (b, 2) int64 on the same device.

    batches: this rank's `LabelledBatch`es, the same number on every rank. Rows with id -1 are padding.
    """
    for batch in in_step(batches):
        features, _ = encode(images=batch.images)
        assert features is not None, "encode(images=...) returns image features"
        yield features, torch.stack([batch.ids, batch.labels], dim=1).to(features.device)


def of_all_ranks(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `image_features` yields on all ranks, (n, D) and (n, 2), sorted by id and without padding.

    Every rank must call it, and has all rows.
    """
    features, rows = (gather_rows(torch.cat(parts)) for parts in zip(*batches, strict=True))
    order = rows[:, 0].argsort()
    order = order[rows[order, 0] != PADDING_ID]
    return features[order], rows[order]


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
