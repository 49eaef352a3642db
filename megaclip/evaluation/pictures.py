"""Draw a similarity heat map and a grid of retrieved images for TensorBoard, and a contact sheet of a dataset.

They are drawn with Pillow on the rank that writes the log. All functions return RGB uint8 (3, H, W), the layout of
`SummaryWriter.add_image`. Their data comes from `examples.retrieval_examples`.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from megaclip.evaluation.examples import RetrievalExamples

Colour = tuple[int, int, int]
Picture = Image.Image | None
"""An image, or None if it cannot be read."""

_PAPER: Colour = (255, 255, 255)
_INK: Colour = (32, 36, 44)
_GREY: Colour = (118, 124, 134)
_GREEN: Colour = (22, 148, 72)
_RED: Colour = (200, 48, 48)
_BLANK: Colour = (238, 240, 243)
_LOW, _MIDDLE, _HIGH = (68, 1, 84), (33, 144, 141), (253, 231, 37)
"""Colours of similarities. Their order remains visible in greyscale and to colour-blind readers."""
_MARGIN, _GAP, _TITLE = 20, 10, 62
_CAPTION_WIDTH, _THUMBNAIL = 260, 128
_LONGEST_TEXT = 2000
"""Number of characters of a caption that are looked at; fewer fit into a column."""


def similarity_heatmap(similarities: np.ndarray, captions: Sequence[str], images: Sequence[Picture]) -> np.ndarray:
    """Draw similarities as a heat map of captions (rows, with text) by images (columns, with thumbnails).

    similarities: (k, k) floating, [i, j] of caption i and image j; a good model gives a bright diagonal. Non-finite
    entries are red. Returns (3, H, W) uint8.
    """
    count = len(similarities)
    cell = max(14, min(40, 768 // max(1, count)))
    side, left, top = cell * count, _MARGIN + _CAPTION_WIDTH + _GAP, _TITLE + 22 + cell
    canvas = _canvas("Similarity of captions and images", left + max(side, _CAPTION_WIDTH) + 104, top + side + _MARGIN)
    canvas.paste(_text(_diagonal_summary(similarities), 14, (canvas.width - 2 * _MARGIN, 20), _GREY), (_MARGIN, 46))
    is_finite = np.isfinite(similarities)
    finite = similarities[is_finite]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    levels = (np.where(is_finite, similarities, low) - low) / ((high - low) or 1.0)
    heat = np.where(is_finite[:, :, None], _coloured(levels), np.array(_RED, dtype=np.uint8))
    canvas.paste(Image.fromarray(heat).resize((side, side), Image.Resampling.NEAREST), (left, top))
    for index in range(count):
        canvas.paste(_thumbnail(images[index], cell - 1), (left + index * cell, top - cell - 3))
        text = _text(captions[index], min(13, cell - 3), (_CAPTION_WIDTH, cell))
        canvas.paste(text, (_MARGIN, top + index * cell))
    bar = Image.fromarray(_coloured(np.linspace(1.0, 0.0, 64)[:, None])).resize((14, max(side, 60)))
    canvas.paste(bar, (left + side + 20, top))
    for value, place in ((high, 0.0), ((low + high) / 2, 0.5), (low, 1.0)):
        canvas.paste(
            _text(f"{value:.3f}", 13, (64, 16), _GREY), (left + side + 38, top + int(place * (bar.height - 16)))
        )
    return _channels_first(canvas)


def retrieval_grid(
    examples: RetrievalExamples, captions: Sequence[str], images: Sequence[Sequence[Picture]]
) -> np.ndarray:
    """Draw one line per query: its caption, the rank of its own image, and the images that were found.

    captions: that of each query. images: those of `examples.found_ids`. The caption's own image has a green outline.
    Returns (3, H, W) uint8.
    """
    columns = max(map(len, images), default=0)
    left, pitch, height = _MARGIN + _CAPTION_WIDTH + _GAP, _THUMBNAIL + _GAP, _THUMBNAIL + 34
    width = max(left + columns * pitch, 2 * _CAPTION_WIDTH) + _MARGIN
    canvas = _canvas("Images retrieved for a caption", width, _TITLE + height * len(images) + _GAP)
    draw = ImageDraw.Draw(canvas)
    for number, (caption, found) in enumerate(zip(captions, images, strict=True)):
        top = _TITLE + number * height
        is_own = examples.found_ids[number] == examples.ids[examples.queries[number]]
        verdict = f"own image at rank {examples.ranks[number] + 1} of {examples.candidates}"
        colour = _GREEN if is_own.any() else _RED
        canvas.paste(_text(caption, 15, (_CAPTION_WIDTH, 100)), (_MARGIN, top))
        canvas.paste(_text(verdict, 13, (_CAPTION_WIDTH, 18), colour), (_MARGIN, top + _THUMBNAIL - 18))
        for column, image in enumerate(found):
            x, own = left + column * pitch, bool(is_own[column])
            similarity = f"{examples.found_similarities[number][column]:.3f}"
            canvas.paste(_thumbnail(image, _THUMBNAIL), (x, top))
            canvas.paste(_text(similarity, 13, (_THUMBNAIL, 18), _GREEN if own else _GREY), (x, top + _THUMBNAIL + 5))
            if own:
                draw.rectangle((x - 4, top - 4, x + _THUMBNAIL + 3, top + _THUMBNAIL + 3), outline=_GREEN, width=4)
    return _channels_first(canvas)


def contact_sheet(title: str, samples: Sequence[tuple[str, Picture]]) -> np.ndarray:
    """Draw images in rows, each with its caption below it.

    samples: captions with their images, None for an image that cannot be read. Returns (3, H, W) uint8.
    """
    columns, cell, height = 6, _THUMBNAIL + 32, _THUMBNAIL + 84
    rows = max(1, -(-len(samples) // columns))
    canvas = _canvas(title, 2 * _MARGIN + columns * (cell + _GAP) - _GAP, _TITLE + rows * height)
    for index, (caption, image) in enumerate(samples):
        x, y = _MARGIN + index % columns * (cell + _GAP), _TITLE + index // columns * height
        canvas.paste(_thumbnail(image, cell), (x, y))
        canvas.paste(_text(caption, 12, (cell, 36)), (x, y + cell + 6))
    return _channels_first(canvas)


def _diagonal_summary(similarities: np.ndarray) -> str:
    is_own = np.eye(len(similarities), dtype=bool)
    parts = {"own image": similarities[is_own], "other images": similarities[~is_own]}
    return "mean similarity: " + ", ".join(
        f"{name} {values.mean():.3f}" for name, values in parts.items() if values.size
    )


def _canvas(title: str, width: int, height: int) -> Image.Image:
    canvas = Image.new("RGB", (width, height), _PAPER)
    canvas.paste(_text(title, 20, (width - 2 * _MARGIN, 26)), (_MARGIN, 14))
    return canvas


def _coloured(levels: np.ndarray) -> np.ndarray:
    """Return the colours (h, w, 3) uint8 of levels (h, w) from 0 to 1."""
    grey = Image.fromarray((255 * levels).round().astype(np.uint8))
    return np.asarray(ImageOps.colorize(grey, _LOW, _HIGH, _MIDDLE))


def _thumbnail(image: Picture, side: int) -> Image.Image:
    """Return the whole image, scaled down, in the middle of a grey square."""
    if image is None:
        return Image.new("RGB", (side, side), _BLANK)
    return ImageOps.pad(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC, color=_BLANK)


def _text(text: str, size: int, box: tuple[int, int], colour: Colour = _INK) -> Image.Image:
    """Return a picture of this width and height with the text, in as many lines as fit; longer text is cut."""
    width, height = box
    lines = textwrap.wrap(
        " ".join(text[:_LONGEST_TEXT].split()),
        max(1, int(width / (0.6 * size))),  # a character of the font is 0.6 times as wide as high
        max_lines=max(1, height // (size + 3)),
        placeholder="…",
    )
    picture = Image.new("RGB", box, _PAPER)
    ImageDraw.Draw(picture).multiline_text((0, 0), "\n".join(lines), colour, font=_font(size), spacing=3)
    return picture


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return DejaVu if the system has it, for Greek, Cyrillic and other scripts; else Pillow's own Latin font."""
    try:
        return ImageFont.truetype("DejaVuSansMono.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _channels_first(canvas: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(canvas).transpose(2, 0, 1))
