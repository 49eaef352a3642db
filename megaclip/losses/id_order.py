"""Put the pairs of a loss, and its negatives, in the order of their ids.

Entries with equal ids are left out of the tiles. If the ids of rows and columns ascend, these entries are a few
neighbours in each row, and most tiles have none: masks then cost little, however many ids are equal.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.losses.sums import LossAndSums, LossInputs


class _Order(NamedTuple):
    """A permutation of n rows: row i moves from place `source[i]`, and to place `target[i]`."""

    source: Tensor  # (n,) int64
    target: Tensor  # (n,) int64

    def moved(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else _Moved.apply(rows, *self)


class _Moved(torch.autograd.Function):
    """Rows in another order. The backward pass of PyTorch's indexing would add, in case a row is read twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        return d_rows.index_select(0, *ctx.saved_tensors), None, None


def in_order_of_ids(inputs: LossInputs, *, masks: bool) -> tuple[LossInputs, Callable[[LossAndSums], LossAndSums]]:
    """Return the checked inputs in the order that masks need, and a function that puts sums back.

    masks: the setting ids is "mask". Negatives that belong to one row each are not in tiles, and stay.
    """
    if inputs.ids is None or not (masks or inputs.negative_ids is not None):
        return inputs, lambda sums: sums
    pairs, negatives = _ascending(inputs.ids), None
    rows = inputs.negative_rows
    if inputs.negative_ids is not None and rows is None:
        negatives = _ascending(inputs.negative_ids)
    moved: dict[str, Any] = {name: pairs.moved(getattr(inputs, name)) for name in ("x", "y", "ids", "weights")}
    ordered = inputs._replace(**moved, negative_rows=None if rows is None else pairs.target[rows])
    if negatives is not None:
        ordered = ordered._replace(
            negatives=negatives.moved(inputs.negatives), negative_ids=negatives.moved(inputs.negative_ids)
        )

    def put_back(sums: LossAndSums) -> LossAndSums:
        back = {name: getattr(sums, name)[pairs.target] for name in ("dx", "dy", "pull")}
        if negatives is not None:
            back["d_negatives"] = sums.d_negatives[negatives.target]
        return sums._replace(**back)

    return ordered, put_back


def _ascending(ids: Tensor) -> _Order:
    source = ids.argsort(stable=True)
    return _Order(source, torch.empty_like(source).scatter_(0, source, torch.arange(len(ids), device=ids.device)))
