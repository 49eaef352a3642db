"""Divide the inputs of an encoder into chunks: by samples, by tokens, or by the user's own function.

Inputs are tensors, lists (of texts or images, one per sample), and mappings, dataclasses and tuples of these. Other
values, such as flags, and tensors without dimensions are passed to every chunk unchanged.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megaclip.errors import DataError


@dataclasses.dataclass
class Chunks:
    """The inputs of each chunk."""

    inputs: list[Any]
    order: Tensor | None = None
    """Sample at each position of the chunks, (n,) int64. None: the samples are in their order."""


def divided(inputs: Any, chunk: int | None, tokens: int | None, split: Callable[[Any], list[Any]] | None) -> Chunks:
    """Return the chunks of `inputs`. The arguments are those of `megaclip.Encoded`. Raises DataError."""
    if split is not None:
        chunks = list(split(inputs))
        if not chunks:
            raise DataError("Encoded(..., split=...): the function returned no chunks; return at least one")
        return Chunks(chunks)
    if tokens is not None:
        return _by_tokens(inputs, tokens)
    if chunk is None:
        return Chunks([inputs])
    count = samples_of(inputs)
    starts = range(0, max(count, 1), chunk)  # a rank without hard negatives encodes one chunk without rows
    return Chunks([_rows(inputs, slice(start, min(start + chunk, count))) for start in starts])


def elements_of(inputs: Any) -> int:
    """Return the number of elements of the largest tensor of `inputs`, to compare the sizes of chunks."""
    return max([1, *(leaf.numel() if isinstance(leaf, Tensor) else len(leaf) for leaf in _leaves(inputs))])


def samples_of(inputs: Any) -> int:
    """Return the number of rows of every tensor and list of `inputs`. Raises DataError if they differ."""
    counts = {len(leaf) for leaf in _leaves(inputs)}
    if len(counts) != 1:
        raise DataError(
            f"the tensors of an encoder's inputs have {sorted(counts)} rows, so their samples are not known; pass "
            "Encoded(..., split=function), which returns a list of inputs, one per chunk"
        )
    return counts.pop()


def _by_tokens(inputs: Any, tokens: int) -> Chunks:
    """Sort samples by length, the longest first. Cut each chunk behind its longest sample, by its attention mask."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
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
    return Chunks(chunks or [_rows(inputs, slice(0, 0))], order if chunks else None)


def _cut(inputs: Any, shape: torch.Size, length: int) -> Any:
    """Cut the tensors of shape (_, L) of a mapping to the first `length` columns."""
    cut = copy.copy(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == shape[1]:
            cut[name] = value[:, :length]
    return cut


def _leaves(inputs: Any) -> Iterator[Any]:
    """Yield the tensors with rows and the lists of `inputs`."""
    if isinstance(inputs, list) or (isinstance(inputs, Tensor) and inputs.dim() > 0):
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
    if isinstance(inputs, list):
        return inputs[rows] if isinstance(rows, slice) else [inputs[row] for row in rows.tolist()]
    if isinstance(inputs, Mapping):
        part: Any = copy.copy(inputs)  # keeps the class, such as BatchEncoding
        for name, value in inputs.items():
            part[name] = _rows(value, rows)
        return part
    if isinstance(inputs, tuple):
        values = [_rows(value, rows) for value in inputs]
        return type(inputs)(*values) if hasattr(inputs, "_fields") else tuple(values)
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        fields = {field.name: _rows(getattr(inputs, field.name), rows) for field in dataclasses.fields(inputs)}
        return dataclasses.replace(inputs, **fields)
    return inputs
