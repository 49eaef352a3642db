"""Zero-shot classification over all ranks: top-1 and top-5 accuracy with an ensemble of prompts per class.

The embedding of a class is the mean of the unit text features of its prompts ("a photo of a {c}", ...), scaled to unit
length (Radford et al. 2021, section 3.1.4). Each rank encodes the prompts of a part of the classes, and the class
embeddings (C, D) are gathered. Then every rank classifies its own images, and the results are gathered. Ties count
against the model (`ranking`). With five classes or fewer, top-5 accuracy is always 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megaclip.comm.collectives import gather_rows
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.ranking import TIE_TOLERANCE, ahead, nan_is_worst, similarity_tiles, tile_side


@dataclass(frozen=True)
class Classified:
    """The n images of all ranks, sorted by their ids; equal on every rank."""

    ids: np.ndarray
    """Id of each image, (n,) int64."""
    labels: np.ndarray
    """Number of the class of each image, (n,) int64."""
    ranks: np.ndarray
    """Number of wrong classes that rank ahead of the image's own, (n,) int64."""
    predictions: np.ndarray
    """Class that the model selects, (n,) int64. A tie selects a wrong class, the one with the smallest number."""

    def accuracy(self, k: int) -> float:
        """Return the fraction of the images whose class is among the k that the model prefers."""
        return float(np.mean(self.ranks < k))


def classify(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], weights: torch.Tensor) -> Classified:
    """Classify the images of all ranks. Every rank must call it.

    batches: this rank's images, from `encoder.image_features`. weights: class embeddings (C, D) of unit length. Raises
    DataError if there are only padding rows.
    """
    found = []
    for features, ids_and_labels in batches:
        ids, labels = ids_and_labels.unbind(1)
        found.append(torch.stack([ids, labels, *_classify(features, labels.clamp(min=0), weights)], dim=1))
    rows = gather_rows(torch.cat(found)).cpu().numpy()
    rows = rows[rows[:, 0] != PADDING_ID]
    if not len(rows):
        raise DataError("zero-shot classification requires at least one image, got only padding rows; check the data")
    return Classified(*rows[rows[:, 0].argsort()].T)


def _classify(features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ranks and predictions (b,) int64, as in `Classified`, of features (b, D), labels (b,), weights (C, D)."""
    right = (features.double() * weights[labels].double()).sum(dim=1)
    ranks, predictions = torch.zeros_like(labels), torch.zeros_like(labels)
    classes = torch.arange(len(weights), device=weights.device)
    count = max(1, tile_side(weights.shape[1]) ** 2 // len(weights))
    for rows, similarities in similarity_tiles(features, weights, count):
        wrong = labels[rows, None] != classes
        ranks[rows] = ahead(similarities, right[rows, None], wrong).sum(dim=1)
        similarities = nan_is_worst(similarities)
        best = similarities.masked_fill(~wrong, -torch.inf).amax(dim=1, keepdim=True)
        # The first of tied classes, so that rounding errors select none.
        wrong_class = (wrong & (similarities >= best - TIE_TOLERANCE)).int().argmax(dim=1)
        predictions[rows] = torch.where(ranks[rows] == 0, labels[rows], wrong_class)
    return ranks, predictions
