"""Draw what an evaluation has found, and a contact sheet of a dataset: rows of thumbnails with text, drawn by Pillow.

All functions return RGB uint8 (3, H, W), the layout of `SummaryWriter.add_image`.
"""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from megaclip.data.batch import PADDING_ID, BadSample
from megaclip.data.images import ImageTransform
from megaclip.data.reading import ReadableSet, decode_image
from megaclip.errors import DataError
from megaclip.evaluation.retrieval import RetrievalExamples
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

Picture = Image.Image | None
"""A square image, or None if it cannot be read."""

_INK, _GREEN, _RED, _BLANK = (32, 36, 44), (22, 148, 72), (200, 48, 48), (238, 240, 243)
_LOW, _MIDDLE, _HIGH = (68, 1, 84), (33, 144, 141), (253, 231, 37)
"""Colours of similarities. Their order remains visible in greyscale and to colour-blind readers."""
_MARGIN, _GAP, _TITLE, _TEXT_WIDTH, _THUMBNAIL = 20, 10, 66, 260, 128
_LONGEST_TEXT = 2000
"""Number of characters of a caption that are looked at; fewer fit into a column."""


class _Tile(NamedTuple):
    picture: Picture
    label: str = ""
    outlined: bool = False


def example_pictures(examples: RetrievalExamples, dataset: ReadableSet) -> dict[str, np.ndarray]:
    """Return {"similarity": heat map, "retrieval": grid}, each RGB uint8 (3, H, W).

    `dataset` is the one that was evaluated; about `len(examples.ids) + 5 * len(examples.queries)` of its samples are
    read. One rank alone may call it. A sample that cannot be read gives an empty square.
    """
    captions, images = zip(*(_read(dataset, int(pair)) for pair in examples.ids), strict=True)
    found = [[_read(dataset, pair)[1] for pair in pairs] for pairs in examples.found_ids.tolist()]
    grid = retrieval_grid(examples, [captions[query] for query in examples.queries], found)
    return {"similarity": similarity_heatmap(examples.similarities, captions, images), "retrieval": grid}


def similarity_heatmap(similarities: np.ndarray, captions: Sequence[str], images: Sequence[Picture]) -> np.ndarray:
    """Draw similarities as a heat map of captions (rows, with text) by images (columns, with thumbnails).

    similarities: (k, k) floating, [i, j] of caption i and image j; a good model gives a bright diagonal. Non-finite
    entries are red. Returns (3, H, W) uint8.
    """
    is_finite, is_own = np.isfinite(similarities), np.eye(len(similarities), dtype=bool)
    finite = similarities[is_finite] if is_finite.any() else np.zeros(1)
    low, high = float(finite.min()), float(finite.max())
    levels = (np.where(is_finite, similarities, low) - low) / ((high - low) or 1.0)
    grey = Image.fromarray((255 * levels).round().astype(np.uint8))
    coloured = np.asarray(ImageOps.colorize(grey, _LOW, _HIGH, _MIDDLE))
    heat = np.where(is_finite[:, :, None], coloured, np.array(_RED, dtype=np.uint8))
    rows = [("", [_Tile(image) for image in images])]
    for caption, colours in zip(captions, heat.tolist(), strict=True):
        rows.append((caption, [_Tile(Image.new("RGB", (1, 1), tuple(colour))) for colour in colours]))
    means = {"own image": similarities[is_own], "other images": similarities[~is_own]}
    summary = ", ".join(f"{name} {values.mean():.3f}" for name, values in means.items() if values.size)
    summary = f"from {low:.3f} (dark) to {high:.3f} (bright); mean: {summary}"
    side = max(14, min(40, 768 // len(similarities)))
    return _sheet("Similarity of captions and images", summary, rows, side, gap=0)


def retrieval_grid(
    examples: RetrievalExamples, captions: Sequence[str], images: Sequence[Sequence[Picture]]
) -> np.ndarray:
    """Draw one line per query: the rank of its own image, its caption, and the images that were found.

    captions: that of each query. images: those of `examples.found_ids`. The caption's own image has a green outline.
    Returns (3, H, W) uint8.
    """
    is_own = (examples.ids[examples.queries, None] == examples.found_ids).tolist()
    rows = []
    for query, (caption, found) in enumerate(zip(captions, images, strict=True)):
        labels = [f"{similarity:.3f}" for similarity in examples.found_similarities[query]]
        tiles = [_Tile(*parts) for parts in zip(found, labels, is_own[query], strict=True)]
        rows.append((f"own image at rank {examples.ranks[query] + 1} of {examples.candidates}: {caption}", tiles))
    return _sheet("Images retrieved for a caption", "", rows, _THUMBNAIL, label_height=24)


def contact_sheet(title: str, samples: Sequence[tuple[str, Picture]]) -> np.ndarray:
    """Draw images in rows, each with its caption below it.

    samples: captions with their images, None for an image that cannot be read. Returns (3, H, W) uint8.
    """
    tiles = [_Tile(image, caption) for caption, image in samples]
    rows = [("", tiles[start : start + 6]) for start in range(0, len(tiles), 6)]
    return _sheet(title, "", rows, _THUMBNAIL + 32, label_height=42, text_width=0)


def _sheet(
    title: str,
    summary: str,
    rows: Sequence[tuple[str, Sequence[_Tile]]],
    side: int,
    *,
    gap: int = _GAP,
    label_height: int = 0,
    text_width: int = _TEXT_WIDTH,
) -> np.ndarray:
    """Draw rows of a text and tiles of `side` x `side` pixels, each with a label below it."""
    left = _MARGIN + (text_width + _GAP if text_width else 0)
    pitch, height = side + gap, side + gap + label_height
    width = max(left + pitch * max((len(tiles) for _, tiles in rows), default=0), 2 * _TEXT_WIDTH) + _MARGIN
    canvas = Image.new("RGB", (width, _TITLE + height * len(rows) + _MARGIN), "white")
    canvas.paste(_text(title, 20, (width - 2 * _MARGIN, 26)), (_MARGIN, 14))
    canvas.paste(_text(summary, 13, (width - 2 * _MARGIN, 20)), (_MARGIN, 44))
    for top, (text, tiles) in zip(range(_TITLE, canvas.height, height), rows, strict=False):
        canvas.paste(_text(text, min(15, side - 3), (text_width, side)), (_MARGIN, top))
        for x, tile in zip(range(left, width, pitch), tiles, strict=False):
            if tile.outlined:
                canvas.paste(_GREEN, (x - 4, top - 4, x + side + 4, top + side + 4))
            canvas.paste(
                _BLANK if tile.picture is None else tile.picture.resize((side, side)), (x, top, x + side, top + side)
            )
            canvas.paste(_text(tile.label, 13, (side, max(0, label_height - 6))), (x, top + side + 5))
    return np.ascontiguousarray(np.asarray(canvas).transpose(2, 0, 1))


def _text(text: str, size: int, box: tuple[int, int]) -> Image.Image:
    """Return a picture of this width and height with the text, in as many lines as fit; longer text is cut."""
    width, height = box
    lines = textwrap.wrap(
        " ".join(text[:_LONGEST_TEXT].split()),
        max(1, int(width / (0.6 * size))),  # a character of the font is 0.6 times as wide as high
        max_lines=max(1, height // (size + 3)),
        placeholder="…",
    )
    font: Any
    try:
        font = ImageFont.truetype("DejaVuSansMono.ttf", size)  # has Greek, Cyrillic and other scripts
    except OSError:
        font = ImageFont.load_default(size)
    picture = Image.new("RGB", box, "white")
    ImageDraw.Draw(picture).multiline_text((0, 0), "\n".join(lines), _INK, font=font, spacing=3)
    return picture


def _read(dataset: ReadableSet, pair: int) -> tuple[str, Picture]:
    """Return the first line of the caption, and a thumbnail of the image, or None if it cannot be read."""
    caption = ""
    try:
        if pair != PADDING_ID:
            sample = dataset.read(pair)
            caption = next((line.strip() for line in sample.caption.splitlines() if line.strip()), "")
            pixels = decode_image(ImageTransform(_THUMBNAIL), sample)
            return caption, Image.fromarray(pixels.permute(1, 2, 0).numpy())
    except (BadSample, DataError) as bad:  # the other ranks do not wait for this one
        log_once(_logger.warning, f"cannot read a sample of the evaluation pictures: {bad}")
    return caption, None
