"""Divide the inputs of an encoder into chunks: by samples, by tokens, or by the user's own function.

Inputs are tensors, NumPy arrays, lists (of texts or images, one per sample), and mappings, dataclasses and tuples of
these. Other values, such as flags, and tensors without dimensions are passed to every chunk unchanged.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaclip.errors import DataError


@dataclasses.dataclass
class Chunks:
    """The inputs of each chunk."""

    inputs: list[Any]
    order: Tensor | None = None
    """Sample at each position of the chunks, (n,) int64. None: the samples are in their order."""
    is_empty: bool = False
    """There are no samples. The only chunk is a row of `blank_of`."""


def divided(inputs: Any, chunk: int | None, tokens: int | None, split: Callable[[Any], list[Any]] | None) -> Chunks:
    """Return the chunks of `inputs`. The arguments are those of `megaclip.Encoded`. Raises DataError."""
    if split is not None:
        chunks = list(split(inputs))
        if not chunks:
            raise DataError("Encoded(..., split=...): the function returned no chunks; return at least one")
        return Chunks(chunks)
    leaves = list(_leaves(inputs))
    if leaves and not any(isinstance(leaf, list) or len(leaf) for leaf in leaves):
        # Modules may fail without rows, as attention does, or skip work, as dropout does. With partitioned parameters
        # ranks would then gather in different orders.
        return Chunks([blank_of(inputs)], is_empty=True)
    if tokens is not None:
        return _by_tokens(inputs, tokens)
    if chunk is None:
        return Chunks([inputs])
    count = samples_of(inputs)
    starts = range(0, max(count, 1), chunk)  # an empty list is one chunk
    return Chunks([_rows(inputs, slice(start, min(start + chunk, count))) for start in starts])


def elements_of(inputs: Any) -> int:
    """Return the number of elements of the largest tensor of `inputs`, to compare the sizes of chunks."""
    return max([1, *(leaf.numel() if isinstance(leaf, Tensor) else len(leaf) for leaf in _leaves(inputs))])


def blank_of(inputs: Any, name: str = "") -> Any:
    """Return one row of zeros in the structure of `inputs`, with ones for floating-point numbers and in a mask.

    Of zeros an encoder without biases could make features of norm 0, whose direction and gradients are NaN.
    """
    if isinstance(inputs, Tensor) and inputs.dim() > 0:
        return inputs.new_full((1, *inputs.shape[1:]), name == "attention_mask" or inputs.is_floating_point())
    if isinstance(inputs, np.ndarray) and inputs.ndim > 0:
        return np.full((1, *inputs.shape[1:]), name == "attention_mask" or inputs.dtype.kind == "f", inputs.dtype)
    return _replaced(inputs, lambda name, value: blank_of(value, name))


def samples_of(inputs: Any) -> int:
    """Return the number of rows of every tensor and list of `inputs`. Raises DataError if they differ."""
    counts = {len(leaf) for leaf in _leaves(inputs)}
    if len(counts) != 1:
        found = f"tensors of {sorted(counts)} rows" if counts else "no tensor, array or list"
        raise DataError(
            f"an encoder's inputs ({type(inputs).__name__}) have {found}, so their samples are not known; pass "
            "Encoded(..., split=function), which returns a list of inputs, one per chunk"
        )
    return counts.pop()


def _by_tokens(inputs: Any, tokens: int) -> Chunks:
    """Sort samples by length, the longest first. Cut each chunk behind its longest sample, by its attention mask."""
    is_mapping = isinstance(inputs, Mapping)
    mask = inputs.get("attention_mask") if is_mapping else getattr(inputs, "attention_mask", None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise DataError(
            "Encoded(..., tokens=...) requires inputs with an attention_mask of shape (samples, length); pass chunk= "
            "or split= instead"
        )
    samples_of(inputs)
    ends = (torch.arange(1, mask.shape[1] + 1, device=mask.device) * (mask != 0)).amax(1).clamp(1).cpu()
    order = ends.argsort(descending=True, stable=True)
    lengths, chunks, start = ends[order].tolist(), [], 0
    while start < len(lengths):
        end = start + max(1, tokens // lengths[start])
        rows = order[start:end].to(mask.device)
        chunks.append(_cut(_rows(inputs, rows), mask.shape, lengths[start]))
        start = end
    return Chunks(chunks, order) if chunks else Chunks([inputs])


def _cut(inputs: Any, shape: torch.Size, length: int) -> Any:
    """Cut the integers (_, L) of `inputs`, by name, and the attention mask, to the first `length` columns."""

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != shape[1]:
            return value
        return value if value.is_floating_point() and name != "attention_mask" else value[:, :length]

    return _replaced(inputs, cut)


def _leaves(inputs: Any) -> Iterator[Any]:
    """Yield the tensors with rows and the lists of `inputs`."""
    if isinstance(inputs, list) or (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim > 0):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from _leaves(value)
    elif isinstance(inputs, tuple):
        for value in inputs:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(inputs):
        for field in dataclasses.fields(inputs):
            yield from _leaves(getattr(inputs, field.name))


def _rows(inputs: Any, rows: slice | Tensor) -> Any:
    """Return the samples `rows` of `inputs`, in the same structure."""
    if isinstance(inputs, Tensor):
        return inputs[rows] if inputs.dim() > 0 else inputs
    if isinstance(inputs, np.ndarray):
        return inputs[rows if isinstance(rows, slice) else rows.cpu().numpy()] if inputs.ndim > 0 else inputs
    if isinstance(inputs, list):
        return inputs[rows] if isinstance(rows, slice) else [inputs[row] for row in rows.tolist()]
    return _replaced(inputs, lambda name, value: _rows(value, rows))


def _replaced(inputs: Any, new: Callable[[str, Any], Any]) -> Any:
    """Return a mapping, dataclass or tuple whose values are `new(name, value)`; anything else unchanged."""
    if isinstance(inputs, tuple):
        values = map(new, getattr(inputs, "_fields", [""] * len(inputs)), inputs)
        return type(inputs)(*values) if hasattr(inputs, "_fields") else tuple(values)
    if isinstance(inputs, Mapping):
        part: Any = copy.copy(inputs)  # keeps the class, such as BatchEncoding
        for name, value in inputs.items():
            part[name] = new(name, value)
        return part
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        part = copy.copy(inputs)  # not dataclasses.replace, which refuses fields with init=False
        for field in dataclasses.fields(inputs):
            object.__setattr__(part, field.name, new(field.name, getattr(inputs, field.name)))  # it may be frozen
        return part
    return inputs
