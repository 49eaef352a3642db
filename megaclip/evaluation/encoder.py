"""How evaluation asks a model for features: a callable that every rank calls the same number of times.

Under ZeRO-3 a forward pass is a collective operation (parameters are gathered), so no rank may skip or add one.
Everything in this room keeps that promise: it pads the work instead of the calls.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import normalize

from megaclip.comm.collectives import raise_together

T = TypeVar("T")


class Encode(Protocol):
    """Images (b, 3, H, W) uint8 and/or tokens (b, L) int64, on any device -> unit features (b, D), or None, each."""

    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]: ...


class ModelEncoder:
    """An `Encode` over a `ClipModel` or the DeepSpeed engine around one; moves inputs to the device, features come
    in float32.

    normalise: pixels (b, 3, H, W) uint8 and a dtype -> the image tower's input, as `data.ImageTransform.normalise`.
    image_dtype: what the image tower takes (the engine's precision). The model is called without gradients; its
    training or evaluation mode is the caller's affair.
    """

    def __init__(
        self,
        model: nn.Module,
        normalise: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        *,
        device: torch.device,
        image_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model, self._normalise, self._device, self._image_dtype = model, normalise, device, image_dtype

    @torch.no_grad()
    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if images is not None:
            images = self._normalise(images.to(self._device, non_blocking=True), self._image_dtype)
        if tokens is not None:
            tokens = tokens.to(self._device, non_blocking=True)
        image_features, text_features, *_ = self._model(images, tokens)
        return _unit(image_features), _unit(text_features)


def in_step(batches: Iterable[T], *, group: Any = None) -> Iterator[T]:
    """The same batches; if a rank's loader fails, all ranks raise its error instead of waiting for that rank."""
    iterator = iter(batches)
    while True:
        batch, error = None, None
        try:
            batch = next(iterator, None)
        except Exception as problem:  # every rank must learn of it; raise_together raises it again
            error = problem
        raise_together(error, group=group)
        if batch is None:
            return
        yield batch


def _unit(features: torch.Tensor | None) -> torch.Tensor | None:
    """Unit length again in float32: a bfloat16 forward pass leaves lengths a little off, which would move ranks."""
    return None if features is None else normalize(features.float(), dim=-1)
