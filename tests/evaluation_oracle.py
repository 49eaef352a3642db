"""Oracle of the evaluation tests: sort the whole similarity matrix in numpy, without tiles, processes or thresholds."""

import numpy as np
import torch

from megaclip.data.batch import digest


def image_facts(images: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the fields of an evaluation batch that describe its images (b, ...), with one caption each."""
    digests = torch.tensor([digest(image.tobytes()) for image in images], dtype=torch.int64)
    rows = torch.arange(len(images))
    return {"image_digests": digests, "caption_rows": rows, "caption_lines": torch.ones_like(rows)}


def ranks_by_sorting(similarities: np.ndarray, is_right: np.ndarray) -> np.ndarray:
    """Return, for each row (query) of the float64 matrix, the number of wrong candidates before the first correct one.

    Candidates are sorted by decreasing similarity. Of equal ones, the wrong candidates come first, because ties count
    against the model.
    """
    ranks = []
    for row, right in zip(similarities, is_right, strict=True):
        order = np.lexsort((right, -row))
        ranks.append(int(np.argmax(right[order])))
    return np.array(ranks)


def recall(ranks: np.ndarray, k: int) -> float:
    return sum(1 for rank in ranks if rank < k) / len(ranks)


def retrieval_by_sorting(
    images: np.ndarray, texts: np.ndarray, image_ids: np.ndarray, text_image_ids: np.ndarray
) -> dict[str, float]:
    similarities = images.astype(np.float64) @ texts.astype(np.float64).T
    is_right = image_ids[:, None] == text_image_ids[None, :]
    metrics = {}
    for direction, ranks in (
        ("i2t", ranks_by_sorting(similarities, is_right)),
        ("t2i", ranks_by_sorting(similarities.T, is_right.T)),
    ):
        metrics.update({f"retrieval_r{k}_{direction}": recall(ranks, k) for k in (1, 5, 10)})
    return metrics


def unit_features(generator: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Return random float32 rows of unit length."""
    rows = generator.normal(size=(count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def paired_features(
    generator: np.random.Generator, image_count: int, captions_per_image: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images, captions near their image, image ids, and the image id of each caption, in random order."""
    images = unit_features(generator, image_count, dim)
    image_ids = generator.permutation(3 * image_count)[:image_count]
    owner = generator.permutation(np.repeat(np.arange(image_count), captions_per_image))
    texts = images[owner] + 1.5 * unit_features(generator, len(owner), dim)
    texts = (texts / np.linalg.norm(texts, axis=1, keepdims=True)).astype(np.float32)
    return images, texts, image_ids, image_ids[owner]


def coarse_features(generator: np.random.Generator, count: int, dim: int = 3) -> np.ndarray:
    """Return rows of small dyadic numbers. Their products are exact in floating point and often equal."""
    return generator.integers(-2, 3, size=(count, dim)).astype(np.float32) / 4
