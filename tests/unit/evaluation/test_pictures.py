"""The pictures for TensorBoard: the data that they show, and the positions of their elements, pixel by pixel."""

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megaclip.evaluation.example_pictures import example_pictures
from megaclip.evaluation.examples import RetrievalExamples, retrieval_examples, spread
from megaclip.evaluation.pictures import RetrievedRow, retrieval_grid, similarity_heatmap
from tests.evaluation_oracle import unit_features
from tests.tolerances import SIMILARITY, assert_close

GREEN, RED = (22, 148, 72), (200, 48, 48)
BRIGHTEST, DARKEST = (253, 231, 37), (68, 1, 84)


def count(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    assert picture.dtype == np.uint8 and picture.shape[0] == 3
    return int((picture == np.array(colour)[:, None, None]).all(axis=0).sum())


def test_heat_map_shows_the_matrix() -> None:
    """With 1 on the diagonal and 0 elsewhere, k of the k*k cells are bright. 100 pixels allow for the colour bar."""
    size, cell = 32, 24
    picture = similarity_heatmap(np.eye(size), [f"caption {index}" for index in range(size)], [None] * size)
    bright, dark = count(picture, BRIGHTEST), count(picture, DARKEST)
    inner = (cell - 2) ** 2  # a white frame of one pixel around the diagonal
    assert size * inner <= bright <= size * inner + 100
    assert size * (size - 1) * cell**2 <= dark <= size * (size - 1) * cell**2 + 100


def test_heat_map_rows_are_captions() -> None:
    """The one bright entry, caption 0 with image 3, is in the top row, right of the middle."""
    similarities = np.zeros((4, 4))
    similarities[0, 3] = 1
    picture = similarity_heatmap(similarities, ["a", "b", "c", "d"], [None] * 4)[:, :, :-104]  # without the colour bar
    rows, columns = np.nonzero((picture == np.array(BRIGHTEST)[:, None, None]).all(axis=0))
    dark_rows, dark_columns = np.nonzero((picture == np.array(DARKEST)[:, None, None]).all(axis=0))
    assert rows.max() < np.median(dark_rows)
    assert columns.min() > np.median(dark_columns)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_constant_or_non_finite_matrix_can_be_drawn(value: float) -> None:
    picture = similarity_heatmap(np.full((3, 3), value), ["a", "b", "c"], [None] * 3)
    assert count(picture, RED) == (0 if value == 0 else 9 * 40**2 - 3 * (4 * 40 - 4))


@pytest.mark.parametrize("size", [1, 2, 64])
def test_heat_map_size_is_bounded(size: int) -> None:
    captions = ["", "a word", "many words " * 50, "line\nbreak"] * size
    picture = similarity_heatmap(np.random.default_rng(0).normal(size=(size, size)), captions[:size], [None] * size)
    assert picture.shape[0] == 3 and picture.shape[1] < 1200 and picture.shape[2] < 1400


def row(correct: int | None, caption: str = "a caption") -> RetrievedRow:
    blue = Image.new("RGB", (50, 90), (0, 0, 255))
    return RetrievedRow(caption, [blue, None, blue], [0.9, 0.5, 0.1], correct, 40 if correct is None else correct, 99)


def test_own_image_has_a_green_outline() -> None:
    with_hit, without = retrieval_grid([row(1)]), retrieval_grid([row(None)])
    frame = 136**2 - 128**2
    assert count(with_hit, GREEN) >= frame
    assert count(without, GREEN) == 0
    assert count(without, RED) > 20, "the rank of an image that was not found must be red"
    columns = np.nonzero((with_hit == np.array(GREEN)[:, None, None]).all(axis=0).sum(axis=0) > 100)[0]
    assert columns.min() > 290 + 138 - 8 and columns.max() < 290 + 2 * 138, "the frame must be around the second image"


def test_thumbnails_keep_their_aspect_ratio() -> None:
    blue_pixels = count(retrieval_grid([row(None)]), (0, 0, 255))
    assert blue_pixels == pytest.approx(2 * 128 * round(128 * 50 / 90), rel=0.03)


def test_long_captions_do_not_leave_their_column() -> None:
    """The gap between captions and images is white for every caption."""
    for caption in ("word " * 200, "w" * 500, "", "\n\n"):
        picture = retrieval_grid([row(None, caption)])
        assert (picture[:, 62:-10, 272:288] > 220).all()


@pytest.mark.parametrize("caption", ["word " * 220_000, "w" * 1_100_000], ids=["words", "one word"])
def test_captions_of_a_megabyte_are_drawn_at_once(caption: str) -> None:
    """Drawing must take little time.

    Pillow refuses to measure a text of a megabyte and measures shorter ones slowly, while the other ranks wait.
    """
    began = time.thread_time()  # excludes the time of other processes
    retrieval_grid([row(None, caption), row(None, caption[:100_000])])
    similarity_heatmap(np.zeros((2, 2)), [caption, caption[:100_000]], [None, None])
    assert time.thread_time() - began < 10


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
    examples = retrieval_examples(*padded, padded_ids, padded_ids, chosen, query_count=4)

    by_id = np.argsort(ids)
    similarities = texts[by_id].astype(np.float64) @ images[by_id].astype(np.float64).T
    assert_close(examples.similarities, similarities[np.ix_(chosen, chosen)], SIMILARITY)
    queried = chosen[examples.queries]
    assert len(queried) == min(4, image_count) and examples.candidates == image_count
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
        buffer = io.BytesIO()
        Image.new("RGB", (300, 300), (40 * sample_id, 0, 255)).save(buffer, "png")
        image = buffer.getvalue() if sample_id != 2 else b"not an image"
        return SimpleNamespace(image=image, caption=f"\ncolour {sample_id}\nanother caption", key=f"toy/{sample_id}")


def test_example_pictures_show_the_retrieved_images() -> None:
    examples = RetrievalExamples(
        ids=np.array([0, 2, 5]),
        similarities=np.eye(3),
        queries=np.array([0, 2]),
        found_ids=np.array([[0, 3], [1, -1]]),
        found_similarities=np.array([[1.0, 0.5], [0.7, -np.inf]]),
        ranks=np.array([0, 4]),
        candidates=6,
    )
    pictures = example_pictures(examples, ToyPairs())
    grid, heat_map = pictures["retrieval"], pictures["similarity"]
    thumbnail = 128**2
    assert [count(grid, (40 * pair, 0, 255)) for pair in range(6)] == [thumbnail, thumbnail, 0, thumbnail, 0, 0]
    assert [count(heat_map, (40 * pair, 0, 255)) > 0 for pair in range(6)] == [True, False, False, False, False, True]
    assert count(grid, GREEN) >= 136**2 - 128**2
