"""Retrieval on one process: collapsed models, padding, NaN, dtypes, memory. distributed/test_evaluation.py: sizes."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaclip.errors import DataError
from megaclip.evaluation import ranking
from megaclip.evaluation.ranking import tile_side
from megaclip.evaluation.retrieval import retrieval, retrieval_ranks
from tests.evaluation_oracle import paired_features, retrieval_by_sorting, unit_features

TINY_MIB = 2e-3  # tiles of about five rows at D = 16


def tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


@pytest.mark.parametrize("collapsed", ["one point", "zero", "nan"])
def test_collapsed_model_scores_zero(collapsed: str) -> None:
    value = {"one point": 0.25, "zero": 0.0, "nan": float("nan")}[collapsed]
    features = torch.full((50, 16), value)
    assert set(retrieval(features, features, torch.arange(50)).values()) == {0.0}


def test_copy_of_the_right_caption_ties_at_every_tile_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal vectors in different rows of a matrix product may differ in the last bit; they must still tie."""
    features = torch.from_numpy(unit_features(np.random.default_rng(3), 40, 48)).repeat(2, 1)
    for budget in (128, 0.05, 0.01, 0.002):
        monkeypatch.setattr(ranking, "TILE_BUDGET_MIB", budget)
        of_images, of_texts = retrieval_ranks(features, features, torch.arange(80))
        assert of_images.tolist() == [1] * 80
        assert of_texts.tolist() == [1] * 80


def test_padding_rows_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is infinite, NaN or a copy of a query changes no rank, and has none."""
    monkeypatch.setattr(ranking, "TILE_BUDGET_MIB", TINY_MIB)
    images, texts, ids, text_ids = paired_features(np.random.default_rng(7), 29, 1, dim=16)
    clean_images, clean_texts = retrieval_ranks(*tensors(images, texts, ids, text_ids))
    infinite, nan = np.full((4, 16), np.inf, dtype=np.float32), np.full((4, 16), np.nan, dtype=np.float32)
    for poison in (infinite, nan, images[:4]):
        padded = [np.concatenate([rows[:10], poison[:2], rows[10:], poison[2:]]) for rows in (images, texts)]
        padded_ids = [np.concatenate([some[:10], [-1, -1], some[10:], [-1, -1]]) for some in (ids, text_ids)]
        of_images, of_texts = retrieval_ranks(*tensors(*padded, *padded_ids))
        assert torch.equal(of_images, clean_images)
        assert torch.equal(of_texts, clean_texts)


def test_nan_feature_ranks_last_for_itself_and_ahead_for_others() -> None:
    features = torch.eye(6)
    images = features.clone()
    images[2] = float("nan")
    of_images, of_texts = retrieval_ranks(images, features, torch.arange(6))
    assert of_images.tolist() == [0, 0, 5, 0, 0, 0]
    assert of_texts.tolist() == [1, 1, 5, 1, 1, 1]


def test_image_with_a_nan_caption_is_ranked_by_its_other_captions() -> None:
    texts, text_image_ids = torch.eye(5)[[0, 1, 2, 3, 4, 1]], torch.tensor([0, 1, 2, 3, 4, 1])
    texts[1] = float("nan")
    of_images, of_texts = retrieval_ranks(torch.eye(5), texts, torch.arange(5), text_image_ids)
    assert of_images.tolist() == [1, 0, 1, 1, 1]
    assert of_texts.tolist() == [0, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_of_other_dtypes(dtype: torch.dtype) -> None:
    images, texts, ids, text_ids = tensors(*paired_features(np.random.default_rng(2), 41, 2, dim=16))
    images, texts = images.to(dtype), texts.to(dtype)
    expected = retrieval_by_sorting(images.double().numpy(), texts.double().numpy(), ids.numpy(), text_ids.numpy())
    assert retrieval(images, texts, ids, text_ids) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("image_ids", "text_image_ids", "message"),
    [([0, 1, 1], [0, 1, 1, 0], "an id twice"), ([-1, -1, -1], [-1, -1, -1, -1], "at least one image")],
)
def test_repeated_and_missing_images_raise(image_ids: list[int], text_image_ids: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        retrieval(torch.eye(4)[:3], torch.eye(4), torch.tensor(image_ids), torch.tensor(text_image_ids))


def test_tile_and_its_operands_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget, feature_dim in itertools.product((1e-6, 0.01, 1, 128), (1, 64, 1024)):
        monkeypatch.setattr(ranking, "TILE_BUDGET_MIB", budget)
        side = tile_side(feature_dim)
        float64_tile, float64_operands = 8 * side * side, 2 * 8 * side * feature_dim
        assert side == 1 or (side > 1 and float64_tile + float64_operands <= budget * 2**20)


class _LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def test_no_tensor_grows_with_the_square_of_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "TILE_BUDGET_MIB", 0.25)
    images, texts, ids, text_ids = tensors(*paired_features(np.random.default_rng(1), 500, 2, dim=16))
    with _LargestTensor() as largest:
        retrieval(images, texts, ids, text_ids)
    assert 500 * 1000 * 8 > 10 * 2**20 / 4, "the whole matrix is much larger than the budget"
    assert largest.bytes <= 0.25 * 2**20
