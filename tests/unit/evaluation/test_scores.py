"""`evaluate` on one process: equal images, bad samples, missing data. distributed/test_evaluation.py: metrics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaclip.errors import DataError
from megaclip.evaluation import ModelEncoder, evaluate
from megaclip.evaluation.scores import first_equal_image
from tests.evaluation_oracle import image_facts, retrieval_by_sorting, unit_features

DIM, BATCH = 8, 4
WORDS = torch.from_numpy(unit_features(np.random.default_rng(0), 500, DIM))


def tokenizer(texts: list[str]) -> torch.Tensor:
    """Return one token per text: the number in the text."""
    return torch.tensor([[int("".join(filter(str.isdigit, text)) or 0)] for text in texts])


def encode(
    images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return None if images is None else images[:, 0, 0], None if tokens is None else WORDS[tokens[:, 0]]


class Pairs:
    """Dataset in which equal features are equal images; `batches` returns the batches of an evaluation loader."""

    def __init__(self, features: np.ndarray, captions: list[str]) -> None:
        self.features, self.captions = features, captions

    def __len__(self) -> int:
        return len(self.captions)

    def batches(self) -> list[SimpleNamespace]:
        padding = -len(self) % BATCH
        poison = np.full((padding, DIM), np.nan, dtype=np.float32)
        images = torch.from_numpy(np.concatenate([self.features, poison]))[:, None, None, :]
        tokens = torch.cat([tokenizer(self.captions), torch.zeros(padding, 1, dtype=torch.int64)])
        ids = torch.cat([torch.arange(len(self)), torch.full((padding,), -1)])
        parts = [part.split(BATCH) for part in (images, tokens, ids)]
        return [
            SimpleNamespace(images=i, tokens=t, ids=d, **image_facts(i.numpy())) for i, t, d in zip(*parts, strict=True)
        ]


def noisy_images(words: np.ndarray) -> np.ndarray:
    features = WORDS[torch.from_numpy(words)].numpy() + 0.8 * unit_features(np.random.default_rng(1), len(words), DIM)
    return (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def test_bad_samples_are_left_out() -> None:
    """The loader gives bad samples the id -1, and their captions stay out of the ranking."""
    words = np.arange(23)
    pairs = Pairs(noisy_images(words), [f"word {word}" for word in words])
    batches = pairs.batches()
    batches[0].ids[[0, 3]] = -1
    batches[0].images[[0, 3]] = float("nan")
    result = evaluate(encode, tokenizer=tokenizer, pairs=batches, example_count=40)
    kept = np.delete(words, [0, 3])
    assert result.metrics == pytest.approx(retrieval_by_sorting(pairs.features[kept], WORDS[kept].numpy(), kept, kept))
    assert result.examples is not None and result.examples.ids.tolist() == kept.tolist()


def test_the_first_good_pair_of_an_image_represents_it() -> None:
    """Images 0 and 2 are equal, as are 1, 3 and 4; pair 1 is padding, and ids are those of the dataset."""
    ids, digests = torch.tensor([8, -1, 4, 9, 6]), torch.tensor([5, 7, 5, 7, 7])
    assert first_equal_image(ids, digests).tolist() == [4, -1, 4, 6, 6]
    assert first_equal_image(torch.tensor([-1, -1]), torch.zeros(2, dtype=torch.int64)).tolist() == [-1, -1]


def test_missing_data_raises() -> None:
    with pytest.raises(DataError, match="got neither"):
        evaluate(encode, tokenizer=tokenizer)
    with pytest.raises(DataError, match="at least one batch"):
        evaluate(encode, tokenizer=tokenizer, pairs=[])


def test_model_encoder_casts_and_normalises() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, images: torch.Tensor | None, tokens: torch.Tensor | None) -> tuple:
            assert images is None or images.dtype == torch.bfloat16
            text = None if tokens is None else tokens.to(torch.bfloat16) * self.weight.bfloat16()
            return images, text, self.weight

    def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (pixels.float() / 2).to(dtype)

    model = ModelEncoder(Model(), normalise, device=torch.device("cpu"), image_dtype=torch.bfloat16)
    images, texts = model(torch.tensor([[3, 4]], dtype=torch.uint8), torch.tensor([[5, 12]]))
    assert images is not None and texts is not None and not texts.requires_grad
    torch.testing.assert_close(images, torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(texts, torch.tensor([[5 / 13, 12 / 13]]))
    assert model(images=torch.ones(1, 2, dtype=torch.uint8))[1] is None
    assert model(tokens=torch.ones(1, 2))[0] is None
