"""Classify images by their frozen features: k nearest neighbours, and a linear probe."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""Number of training images that vote, and temperature of their votes (Caron et al. 2021, DINO)."""
STRENGTHS = [10.0**power for power in range(-6, 7)]
"""Inverse strengths C of the L2 penalty among which the validation images select."""
HELD_OUT = 10
"""Every tenth training image is a validation image. A probe requires ten."""
_QUERIES = 1024


def nearest_neighbours(train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, class_count: int) -> np.ndarray:
    """Return the class of each test image, (n,) int64, by votes of exp(similarity / TEMPERATURE) of its neighbours.

    train: (m, D), and test: (n, D), of unit length. labels: (m,) int64.
    """
    found = []
    for queries in test.split(_QUERIES):
        similarities, places = (queries @ train.T).topk(min(NEIGHBOURS, len(train)), dim=1)
        votes = torch.zeros(len(queries), class_count, device=train.device)
        votes.scatter_add_(1, labels[places], ((similarities - 1) / TEMPERATURE).exp())
        found.append(votes.argmax(dim=1))
    return torch.cat(found).cpu().numpy()


def linear_probe(
    train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, class_count: int
) -> tuple[np.ndarray, float]:
    """Return the class of each test image, (n,) int64, and the selected C.

    The probe is a logistic regression, fitted by L-BFGS in at most 1000 iterations (Radford et al. 2021, section A.3).
    C is the one with the best accuracy on the held-out training images, the smallest of equals; the probe is then
    fitted to all training images. The arguments are those of `nearest_neighbours`.
    """
    held_out = torch.arange(len(train), device=train.device) % HELD_OUT == HELD_OUT - 1
    best, strength, start = -1.0, STRENGTHS[0], None
    for value in STRENGTHS:
        start = fit(train[~held_out], labels[~held_out], class_count, value, start)
        accuracy = float((_logits(train[held_out], start).argmax(dim=1) == labels[held_out]).double().mean())
        if accuracy > best:
            best, strength = accuracy, value
    weights = fit(train, labels, class_count, strength)
    return _logits(test, weights).argmax(dim=1).cpu().numpy(), strength


def fit(
    features: torch.Tensor, labels: torch.Tensor, class_count: int, strength: float, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Return weights and biases (C, D + 1) float64 that minimise |weights|^2 / 2 + strength * sum of cross entropies.

    start: weights and biases at the first iteration. Default: zeros.
    """
    weights = features.new_zeros(class_count, features.shape[1] + 1, dtype=torch.float64) if start is None else start
    weights = weights.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=1000, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = weights[:, :-1].square().sum() / (2 * strength * len(features))
        value = cross_entropy(_logits(features, weights), labels) + penalty
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def _logits(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return features.double() @ weights[:, :-1].T + weights[:, -1]
