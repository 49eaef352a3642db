"""Which images are equal, and what `ModelEncoder` gives to the model. distributed/test_evaluation.py: metrics."""

import pytest
import torch

from megaclip.errors import DataError
from megaclip.evaluation import ModelEncoder, evaluate_pairs
from megaclip.evaluation.scores import first_equal_image


def test_the_first_good_pair_of_an_image_represents_it() -> None:
    """Images 0 and 2 are equal, as are 1, 3 and 4; pair 1 is padding, and ids are those of the dataset."""
    ids, digests = torch.tensor([8, -1, 4, 9, 6]), torch.tensor([5, 7, 5, 7, 7])
    assert first_equal_image(ids, digests).tolist() == [4, -1, 4, 6, 6]
    assert first_equal_image(torch.tensor([-1, -1]), torch.zeros(2, dtype=torch.int64)).tolist() == [-1, -1]


def test_missing_pairs_raise() -> None:
    with pytest.raises(DataError, match="at least one batch"):
        evaluate_pairs(lambda images=None, tokens=None: (None, None), [])


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
