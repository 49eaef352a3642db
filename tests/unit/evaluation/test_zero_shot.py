"""Zero-shot classification on one process, compared with numpy; a toy encoder has known features."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaclip.errors import DataError
from megaclip.evaluation.scores import ZeroShotTask, evaluate
from megaclip.evaluation.zero_shot import class_weights
from tests.evaluation_oracle import coarse_features
from tests.tolerances import CLASS_WEIGHTS, assert_close

DIM = 12
TEMPLATES = ["a photo of a {c}.", "{c}", "a drawing of {c}, or is it?"]


class ToyModel:
    """Encoder whose text features depend on the prompt's bytes, and whose image features are the image's pixels."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def tokenizer(self, prompts: list[str]) -> torch.Tensor:
        return torch.tensor([[sum(prompt.encode()), len(prompt)] for prompt in prompts])

    def prompt_features(self, prompt: str) -> np.ndarray:
        return np.random.default_rng([sum(prompt.encode()), len(prompt)]).normal(size=DIM)

    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if tokens is not None:
            self.calls.append(("tokens", len(tokens)))
            rows = [np.random.default_rng(row).normal(size=DIM) for row in tokens.tolist()]
            return None, torch.tensor(np.stack(rows), dtype=torch.float32)
        assert images is not None
        self.calls.append(("images", len(images)))
        return images[:, 0, 0, :], None


def batches(features: np.ndarray, labels: np.ndarray, ids: np.ndarray, size: int) -> list[SimpleNamespace]:
    """Return batches of "images" that hold the given features in one row of pixels."""
    pictures = torch.from_numpy(features)[:, None, None, :]
    return [
        SimpleNamespace(
            images=pictures[start : start + size],
            labels=torch.from_numpy(labels[start : start + size]),
            ids=torch.from_numpy(ids[start : start + size]),
        )
        for start in range(0, len(features), size)
    ]


def zero_shot(model: ToyModel, data: list[SimpleNamespace], names: list[str], templates: list[str]) -> dict[str, float]:
    return evaluate(model, tokenizer=model.tokenizer, labelled=ZeroShotTask(data, names, templates)).metrics


def oracle_weights(model: ToyModel, names: list[str]) -> np.ndarray:
    weights = []
    for name in names:
        rows = np.stack([model.prompt_features(template.replace("{c}", name)) for template in TEMPLATES])
        mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)
        weights.append(mean / np.linalg.norm(mean))
    return np.stack(weights)


@pytest.mark.parametrize("prompt_batch_size", [1, 7, 256])
def test_class_weights_are_the_mean_of_unit_prompts(prompt_batch_size: int) -> None:
    model, names = ToyModel(), [f"class {index}" for index in range(11)]
    weights = class_weights(model, names, TEMPLATES, model.tokenizer, prompt_batch_size=prompt_batch_size)
    assert_close(weights, oracle_weights(model, names), CLASS_WEIGHTS)
    assert max(size for _, size in model.calls) <= prompt_batch_size


def test_equal_class_names_count_as_ties() -> None:
    """Images of a class that is named twice are correct only at top-2, with either of the two labels."""
    model, names = ToyModel(), ["cat", "dog", "cat", "cow", "hen", "fox"]
    weights = oracle_weights(model, names).astype(np.float32)
    labels = np.arange(6)
    got = zero_shot(model, batches(weights, labels, labels, 6), names, TEMPLATES)
    assert got == pytest.approx({"zero_shot_top1": 4 / 6, "zero_shot_top5": 1.0})


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_zero_or_nan_features_score_zero(value: float) -> None:
    model, labels = ToyModel(), np.arange(8)
    features = np.full((8, DIM), value, dtype=np.float32)
    names = [f"class {index}" for index in range(8)]
    got = zero_shot(model, batches(features, labels, labels, 3), names, TEMPLATES)
    assert got == {"zero_shot_top1": 0.0, "zero_shot_top5": 0.0}


@pytest.mark.parametrize(
    ("names", "templates", "labels", "message"),
    [
        ([], TEMPLATES, [0, 0], "got 0 and 3"),
        (["a"], [], [0, 0], "got 1 and 0"),
        (["a"], ["a photo"], [0, 0], "every template requires"),
        (["a", "b"], TEMPLATES, [0, 2], "must be from 0 to 1, got 1 others"),
        (["a", "b"], TEMPLATES, [0, -1], "must be from 0 to 1, got 1 others"),
    ],
)
def test_bad_classes_templates_or_labels_raise(
    names: list[str], templates: list[str], labels: list[int], message: str
) -> None:
    model, features = ToyModel(), coarse_features(np.random.default_rng(0), 2, DIM)
    data = batches(features, np.array(labels), np.arange(2), 2)
    with pytest.raises(DataError, match=message):
        zero_shot(model, data, names, templates)


def test_only_padding_raises() -> None:
    model, features = ToyModel(), coarse_features(np.random.default_rng(0), 2, DIM)
    with pytest.raises(DataError, match="at least one image"):
        zero_shot(model, batches(features, np.array([0, 0]), np.array([-1, -1]), 2), ["a"], TEMPLATES)
