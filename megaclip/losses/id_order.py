"""Put the pairs of a loss, and its negatives, in the order of their ids.

Entries with equal ids are left out of the tiles. If the ids of rows and columns ascend, these entries are a few
neighbours in each row, and most tiles have none: masks then cost little, however many ids are equal.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.losses.sums import LossAndSums, LossInputs


class Ordered(NamedTuple):
    """Inputs of a loss in the order of their ids."""

    inputs: LossInputs
    places: Tensor | None = None  # (b,) int64, the place of each pair in this order; None if nothing was moved
    negative_places: Tensor | None = None  # (e,) int64

    def put_back(self, sums: LossAndSums) -> LossAndSums:
        """Return the sums of these inputs as those of the original ones: with the places of the pairs."""
        d_negatives = sums.d_negatives
        if self.negative_places is not None:
            d_negatives = d_negatives[self.negative_places]
        return sums._replace(places=self.places, d_negatives=d_negatives)


def needs_order(inputs: LossInputs, meaning: str) -> bool:
    """Return whether tiles mask ids of these inputs. meaning: the setting ids of the loss."""
    return inputs.ids is not None and (meaning == "mask" or inputs.negative_ids is not None)


def in_order_of_ids(inputs: LossInputs, meaning: str) -> Ordered:
    """Return the checked inputs in the order that masks need.

    Negatives that belong to one row each are not in tiles, and stay.
    """
    if inputs.ids is None or not needs_order(inputs, meaning):
        return Ordered(inputs)
    ids, source, places = _ascending(inputs.ids)
    weights, rows = inputs.weights, inputs.negative_rows
    moved: dict[str, Any] = {name: getattr(inputs, name).index_select(0, source) for name in ("x", "y")}
    moved |= {"ids": ids, "weights": None if weights is None else weights[source]}
    ordered = inputs._replace(**moved, negative_rows=None if rows is None else places[rows])
    if inputs.negatives is None or inputs.negative_ids is None or rows is not None:
        return Ordered(ordered, places)
    ids, source, negative_places = _ascending(inputs.negative_ids)
    ordered = ordered._replace(negatives=inputs.negatives[source], negative_ids=ids)
    return Ordered(ordered, places, negative_places)


def _ascending(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted ids (n,), the index of each in `ids`, and the place of each of `ids` among them."""
    ordered, source = ids.sort(stable=True)
    places = torch.empty_like(source).scatter_(0, source, torch.arange(len(ids), device=ids.device))
    return ordered, source, places
