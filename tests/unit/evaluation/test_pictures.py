"""The pictures for TensorBoard: the data that they show, and the positions of their elements, pixel by pixel."""

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megaclip.errors import DataError
from megaclip.evaluation.pictures import example_pictures, retrieval_grid, similarity_heatmap
from megaclip.evaluation.retrieval import RetrievalExamples, retrieval_examples, spread
from tests.evaluation_oracle import unit_features
from tests.tolerances import SIMILARITY, assert_close

GREEN, RED = (22, 148, 72), (200, 48, 48)
BRIGHTEST, DARKEST = (253, 231, 37), (68, 1, 84)
IDS = np.array([0, 2, 5])


def count(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    assert picture.dtype == np.uint8 and picture.shape[0] == 3
    return int((picture == np.array(colour)[:, None, None]).all(axis=0).sum())


def test_heat_map_rows_are_captions_and_columns_are_images() -> None:
    """One bright cell, caption 0 with image 3, is in the top row and the last column; the other 15 are dark."""
    similarities = np.zeros((4, 4))
    similarities[0, 3] = 1
    picture = similarity_heatmap(similarities, ["a", "b", "c", "d"], [None] * 4)[:, :, 290 : 290 + 160]
    assert count(picture, BRIGHTEST) == 40**2 and count(picture, DARKEST) == 15 * 40**2
    rows, columns = np.nonzero((picture == np.array(BRIGHTEST)[:, None, None]).all(axis=0))
    dark_rows, _ = np.nonzero((picture == np.array(DARKEST)[:, None, None]).all(axis=0))
    assert columns.min() == 3 * 40 and rows.min() == dark_rows.min() and rows.max() == rows.min() + 39


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_constant_or_non_finite_matrix_can_be_drawn(value: float) -> None:
    picture = similarity_heatmap(np.full((3, 3), value), ["a", "b", "c"], [None] * 3)
    assert count(picture, RED) == (0 if value == 0 else 9 * 40**2)


@pytest.mark.parametrize("size", [1, 64])
def test_heat_map_size_is_bounded(size: int) -> None:
    similarities = np.random.default_rng(0).normal(size=(size, size))
    picture = similarity_heatmap(similarities, ["line\nbreak"] * size, [None] * size)
    assert picture.shape[0] == 3 and picture.shape[1] < 1200 and picture.shape[2] < 1400


@pytest.mark.parametrize("caption", ["", "word " * 220_000, "w" * 1_100_000], ids=["empty", "words", "one word"])
def test_long_captions_are_drawn_at_once_and_stay_in_their_column(caption: str) -> None:
    """Other ranks wait meanwhile. Pillow refuses to measure a text of a megabyte. The gap to the images is white."""
    examples = RetrievalExamples(IDS, np.eye(3), np.array([1]), np.array([[0, 5]]), np.ones((1, 2)), np.array([4]), 6)
    began = time.thread_time()  # excludes the time of other processes
    grid = retrieval_grid(examples, [caption], [[None, None]])
    similarity_heatmap(np.zeros((2, 2)), [caption, caption], [None, None])
    assert time.thread_time() - began < 0.1
    assert (grid[:, 62:, 281:289] > 220).all()
    assert count(grid, GREEN) == 0, "no image that was found is the caption's own"


def test_spread_is_even_and_without_duplicates() -> None:
    assert spread(np.arange(100), 4).tolist() == [0, 33, 66, 99]
    assert spread(np.array([5, 8]), 4).tolist() == [5, 8]
    assert spread(np.array([], dtype=np.int64), 4).tolist() == []


@pytest.mark.parametrize("image_count", [3, 40])
def test_examples_equal_those_of_the_sorted_matrix(image_count: int) -> None:
    generator = np.random.default_rng(image_count)
    images, texts = unit_features(generator, image_count, 8), unit_features(generator, image_count, 8)
    ids = generator.permutation(image_count)
    padded = [torch.from_numpy(np.concatenate([rows, np.full((2, 8), np.nan, np.float32)])) for rows in (images, texts)]
    padded_ids = torch.from_numpy(np.concatenate([ids, [-1, -1]]))
    chosen = spread(np.arange(image_count), 10)
    examples = retrieval_examples(*padded, padded_ids, padded_ids, 10)
    np.testing.assert_array_equal(examples.ids, chosen)

    by_id = np.argsort(ids)
    similarities = texts[by_id].astype(np.float64) @ images[by_id].astype(np.float64).T
    assert_close(examples.similarities, similarities[np.ix_(chosen, chosen)], SIMILARITY)
    queried = chosen[examples.queries]
    assert len(queried) == min(8, image_count) and examples.candidates == image_count
    order = np.argsort(-similarities[queried], axis=1)
    np.testing.assert_array_equal(examples.found_ids, order[:, :5])
    np.testing.assert_array_equal(
        examples.ranks, [list(line).index(own) for line, own in zip(order, queried, strict=True)]
    )
    expected = np.take_along_axis(similarities[queried], order[:, :5], axis=1)
    assert_close(examples.found_similarities, expected, SIMILARITY)


class ToyPairs:
    """Dataset whose pair i has an image of one colour and the caption "colour i"; the image of pair 2 is damaged."""

    def __len__(self) -> int:
        return 6

    def read(self, sample_id: int) -> SimpleNamespace:
        if sample_id == 1:
            raise DataError("cannot read s3://bucket/1.tar")
        buffer = io.BytesIO()
        Image.new("RGB", (300, 150), (40 * sample_id, 0, 255)).save(buffer, "png")
        image = buffer.getvalue() if sample_id != 2 else b"not an image"
        return SimpleNamespace(image=image, caption=f"\ncolour {sample_id}\nanother caption", key=f"toy/{sample_id}")


def test_example_pictures_show_the_retrieved_images() -> None:
    found, similarities = np.array([[3, 0], [1, -1]]), np.array([[1.0, 0.5], [0.7, -np.inf]])
    examples = RetrievalExamples(IDS, np.eye(3), np.array([0, 2]), found, similarities, np.array([1, 4]), 6)
    pictures = example_pictures(examples, ToyPairs())
    grid, heat_map = pictures["retrieval"], pictures["similarity"]
    shown = [count(grid, (40 * pair, 0, 255)) for pair in range(6)]
    assert shown == [128**2, 0, 0, 128**2, 0, 0], "the middle of each image that can be read, as a square"
    assert [count(heat_map, (40 * pair, 0, 255)) > 0 for pair in range(6)] == [True, False, False, False, False, True]
    columns = np.nonzero((grid == np.array(GREEN)[:, None, None]).all(axis=0).sum(axis=0) > 100)[0]
    assert (columns.min(), columns.max()) == (290 + 138 - 4, 290 + 138 + 131), "the second image has the green outline"
    assert count(grid, GREEN) == 136**2 - 128**2, "no image of the other caption has one"
