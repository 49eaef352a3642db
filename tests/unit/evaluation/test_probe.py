"""The probe against scikit-learn's logistic regression, nearest neighbours against a loop."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from megaclip.evaluation.probe import NEIGHBOURS, STRENGTHS, TEMPERATURE, fit, linear_probe, nearest_neighbours
from tests.evaluation_oracle import unit_features

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 4, size=90)
CENTRES = 0.6 * unit_features(GENERATOR, 4, 8)
TRAIN = unit_features(GENERATOR, 90, 8) + CENTRES[LABELS]
TRAIN /= np.linalg.norm(TRAIN, axis=1, keepdims=True)
TEST = unit_features(GENERATOR, 50, 8)
TENSORS = torch.from_numpy(TRAIN), torch.from_numpy(LABELS), torch.from_numpy(TEST)


def regression(strength: float, rows: np.ndarray) -> LogisticRegression:
    return LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(TRAIN[rows].astype(np.float64), LABELS[rows])


@pytest.mark.parametrize("strength", [1e-2, 1.0, 1e3])
def test_the_weights_are_those_of_scikit_learn(strength: float) -> None:
    found = fit(*TENSORS[:2], 4, strength).numpy()
    expected = regression(strength, np.arange(90))
    np.testing.assert_allclose(found[:, :-1], expected.coef_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        found[:, -1] - found[:, -1].mean(), expected.intercept_ - expected.intercept_.mean(), atol=1e-3
    )


def test_the_strength_is_selected_on_held_out_images() -> None:
    held_out = np.arange(90) % 10 == 9
    accuracies = [regression(c, ~held_out).score(TRAIN[held_out], LABELS[held_out]) for c in STRENGTHS]
    predictions, strength = linear_probe(*TENSORS, 4)
    assert strength == STRENGTHS[int(np.argmax(accuracies))]
    np.testing.assert_array_equal(predictions, regression(strength, np.arange(90)).predict(TEST))


@pytest.mark.parametrize("count", [3, 90])
def test_neighbours_vote_by_similarity(count: int) -> None:
    expected = []
    for row in TEST.astype(np.float64):
        similarities = TRAIN[:count] @ row
        votes = np.zeros(4)
        for place in np.argsort(-similarities)[:NEIGHBOURS]:
            votes[LABELS[place]] += np.exp(similarities[place] / TEMPERATURE)
        expected.append(votes.argmax())
    found = nearest_neighbours(TENSORS[0][:count], TENSORS[1][:count], TENSORS[2], 4)
    np.testing.assert_array_equal(found, expected)
