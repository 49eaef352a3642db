"""Zero-shot classification on one process, compared with numpy; a toy encoder has known features."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaclip.errors import DataError
from megaclip.evaluation import Evaluator, classify, image_features
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
    evaluator = Evaluator(model, None, model.tokenizer, 1, 0, text_batch_size=prompt_batch_size)  # type: ignore[arg-type]  # no images
    weights = evaluator.class_weights(SimpleNamespace(class_names=names, templates=TEMPLATES))  # type: ignore[arg-type]  # no data
    assert_close(weights, oracle_weights(model, names), CLASS_WEIGHTS)
    assert max(size for _, size in model.calls) <= prompt_batch_size


def test_padding_alone_raises() -> None:
    model, images = ToyModel(), torch.from_numpy(coarse_features(np.random.default_rng(0), 2, DIM))[:, None, None]
    batch = SimpleNamespace(images=images, labels=torch.tensor([-1, -1]), ids=torch.tensor([-1, -1]))
    with pytest.raises(DataError, match="at least one image"):
        classify(image_features(model, [batch]), torch.ones(1, DIM))
