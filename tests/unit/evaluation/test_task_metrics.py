"""Metrics of suite tasks, compared with scikit-learn and with the papers' definitions.

The similarities are small dyadic numbers, so many are tied. The oracles take `TIE` off the right answers, which makes
the ties count against the model, and then use definitions in which ties do not occur.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
    top_k_accuracy_score,
)

from megaclip.evaluation import image_features, ranking
from megaclip.evaluation.task_metrics import (
    accuracy_metrics,
    association_metrics,
    group_metrics,
    mean_average_precision,
    selection_metrics,
)
from megaclip.evaluation.zero_shot import Classified, classify
from tests.evaluation_oracle import coarse_features

TIE = 1e-6
SEEDS = range(2)


def classified(features: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> Classified:
    batch = SimpleNamespace(images=torch.tensor(features), labels=torch.tensor(labels), ids=torch.arange(len(labels)))
    images = image_features(lambda images=None, tokens=None: (images, None), [batch])
    return classify(images, torch.tensor(weights))


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(
    ("class_count", "tile_budget_mib"), [(2, 128), (4, 1e-4), (5, 128), (5, 1e-4), (17, 128), (17, 1e-4)]
)
def test_accuracies_are_those_of_scikit_learn(
    class_count: int, tile_budget_mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "TILE_BUDGET_MIB", tile_budget_mib)
    for seed in SEEDS:
        generator = np.random.default_rng(seed)
        features, weights = coarse_features(generator, 90), coarse_features(generator, class_count)
        labels = generator.integers(0, max(2, class_count - 2), size=90)  # the last classes have no images
        scores = features.astype(np.float64) @ weights.T.astype(np.float64)
        scores[np.arange(90), labels] -= TIE
        predictions = scores.argmax(axis=1)
        found = classified(features, labels, weights)
        np.testing.assert_array_equal(found.predictions, predictions)
        assert accuracy_metrics(found, class_count) == pytest.approx(
            {
                "acc1": np.mean(predictions == labels),
                "acc5": _top5(labels, scores) if class_count >= 5 else None,
                "mean_per_class_recall": balanced_accuracy_score(labels, predictions),
                "F1-macro_all": f1_score(
                    labels, predictions, average="macro", labels=np.unique(labels), zero_division=0
                ),
            }
        )


def _top5(labels: np.ndarray, scores: np.ndarray) -> float:
    return top_k_accuracy_score(labels, scores, k=5, labels=np.arange(scores.shape[1])) if scores.shape[1] > 5 else 1.0


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_features_without_direction_score_zero(value: float) -> None:
    labels = np.arange(7)
    found = classified(np.full((7, 3), value, np.float32), labels, coarse_features(np.random.default_rng(0), 7))
    assert set(accuracy_metrics(found, 7).values()) == {0.0}
    for images in (1, 2):
        assert selection_metrics([np.full((images, 2), value)])["acc"] == 0.0
    is_right = np.array([True, False, False])
    assert association_metrics([np.full(3, value)], [is_right])["avg_jaccard_score"] == 0.0
    scores = np.full((8, 1), value)
    targets = np.arange(8)[:, None] < 2
    assert mean_average_precision(scores, targets) == pytest.approx((1 / 7 + 2 / 8) / 2)


@pytest.mark.parametrize(("name", "worst", "k"), [("acc", "acc_worst_region", 1), ("acc_top5", "acc_top5_wg", 5)])
def test_groups_are_scored_by_their_worst(name: str, worst: str, k: int) -> None:
    generator = np.random.default_rng(0)
    ranks, groups = generator.integers(0, 3 * k, size=60) // 2, generator.choice([0, 1, 4], size=60)
    of_group = {
        group: [rank < k for rank, own in zip(ranks, groups, strict=True) if own == group] for group in (0, 1, 4)
    }
    means = {group: sum(own) / len(own) for group, own in of_group.items()}
    found = Classified(np.arange(60), groups, ranks, groups)
    assert group_metrics(found, groups, "region", worst) == pytest.approx(
        {
            f"{name}_avg": np.mean(ranks < k),
            **{f"{name}_region:{group}": mean for group, mean in means.items()},
            **{f"count_region:{group}": len(own) for group, own in of_group.items()},
            worst: min(means.values()),
        }
    )


def test_mean_average_precision_is_that_of_scikit_learn() -> None:
    for seed in SEEDS:
        generator = np.random.default_rng(seed)
        scores, targets = generator.integers(-4, 5, size=(50, 6)) / 4, generator.random((50, 6)) < 0.3
        targets[:, 5] = False  # CLIP_benchmark gives 0 to a class without images
        noisy = scores + generator.uniform(-1e-14, 1e-14, size=scores.shape)  # rounding errors break no tie
        apart = scores - TIE * targets * (1 + np.arange(50)[:, None] / 100)  # scikit-learn counts equal scores at once
        expected = [average_precision_score(targets[:, k], apart[:, k]) for k in range(5)]
        assert mean_average_precision(noisy, targets) == pytest.approx(sum(expected) / 6)


def test_selection_is_that_of_winoground_and_sugar_crepe() -> None:
    """The inequalities of both papers, all strict."""
    generator = np.random.default_rng(0)
    winoground = generator.integers(0, 4, size=(200, 2, 2)) / 4  # [image, caption]
    text = [own[0, 0] > own[0, 1] and own[1, 1] > own[1, 0] for own in winoground]
    image = [own[0, 0] > own[1, 0] and own[1, 1] > own[0, 1] for own in winoground]
    both = [a and b for a, b in zip(text, image, strict=True)]
    expected = {"text_acc": np.mean(text), "image_acc": np.mean(image), "acc": np.mean(both)}
    assert selection_metrics(list(winoground)) == pytest.approx(expected)
    crepe = generator.integers(0, 4, size=(200, 1, 2)) / 4
    right = np.mean(crepe[:, 0, 0] > crepe[:, 0, 1])
    assert selection_metrics(list(crepe)) == pytest.approx({"text_acc": right, "image_acc": 1.0, "acc": right})


def test_associations_are_scored_by_their_jaccard_index() -> None:
    generator, similarities, is_right, scores, sizes = np.random.default_rng(0), [], [], [], []
    for size in generator.choice([5, 6, 10, 12], size=120).tolist():
        values = generator.integers(0, 5, size=size) / 4
        right = np.isin(np.arange(size), generator.choice(size, generator.integers(1, 5), replace=False))
        selected = np.argsort(values - TIE * right)[-right.sum() :]
        similarities.append(values)
        is_right.append(right)
        scores.append(jaccard_score(right, np.isin(np.arange(size), selected)))
        sizes.append(size)
    found, of = association_metrics(similarities, is_right), np.array(scores)
    few = np.array(sizes) <= 6
    expected = {"jaccard_score_5-6": of[few].mean(), "jaccard_score_10-12": of[~few].mean()}
    assert found == pytest.approx({"avg_jaccard_score": of.mean(), **expected})
    assert association_metrics(similarities[:1], is_right[:1])["jaccard_score_10-12"] == (None if few[0] else scores[0])
