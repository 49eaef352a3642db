"""Draw a similarity heat map and a grid of retrieved images for TensorBoard, and a contact sheet of a dataset.

They are drawn with Pillow and numpy on the rank that writes the log. All functions return RGB uint8 (3, H, W), the
layout of `SummaryWriter.add_image`. Their data comes from `examples.retrieval_examples`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

Colour = tuple[int, int, int]
_PAPER: Colour = (255, 255, 255)
_INK: Colour = (32, 36, 44)
_GREY: Colour = (118, 124, 134)
_LINE: Colour = (226, 229, 233)
_GREEN: Colour = (22, 148, 72)
_RED: Colour = (200, 48, 48)
_BLANK: Colour = (238, 240, 243)

# Nine evenly spaced colours of matplotlib's viridis, from dark (low) to bright (high). The order remains visible in
# greyscale and to colour-blind readers.
_VIRIDIS = np.array(
    [
        (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141),
        (39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37),
    ],
    dtype=np.float64,
)  # fmt: skip
_MARGIN = 20
_CAPTION_WIDTH = 250
_LABEL_WIDTH = 340
_THUMBNAIL = 128
_GAP = 10
_LONGEST_TEXT = 2000
"""Number of characters of a caption that are measured; fewer fit into a column."""


@dataclass(frozen=True)
class RetrievedRow:
    """One caption and the images that the model ranks highest for it."""

    caption: str
    images: Sequence[Image.Image | None]
    """Images, best first; None for an image that cannot be read."""
    similarities: Sequence[float]
    """Similarity of each image to the caption."""
    correct: int | None
    """Index of the caption's own image in `images`, or None if it is not among them."""
    rank: int
    """Rank of the caption's own image among all images; 0 is the best."""
    candidates: int
    """Number of images that were searched."""


def similarity_heatmap(
    similarities: np.ndarray, captions: Sequence[str], images: Sequence[Image.Image | None]
) -> np.ndarray:
    """Draw similarities as a heat map of captions (rows, with text) by images (columns, with thumbnails).

    similarities: (k, k) floating, [i, j] of caption i and image j; a good model gives a bright diagonal. Non-finite
    entries are red. Returns (3, H, W) uint8.
    """
    count = len(similarities)
    cell = max(14, min(40, 768 // max(1, count)))
    side, left, top = cell * count, _MARGIN + _LABEL_WIDTH + _GAP, 84 + cell
    canvas = Image.new("RGB", (left + side + 104, top + side + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text((_MARGIN, 16), "Similarity of captions and images", _INK, font=_font(20, bold=True))
    draw.text((_MARGIN, 46), _diagonal_summary(similarities), _GREY, font=_font(14))

    finite = similarities[np.isfinite(similarities)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    pixels = _colours(similarities, low, high).repeat(cell, axis=0).repeat(cell, axis=1)
    canvas.paste(Image.fromarray(pixels), (left, top))
    font = _font(min(13, cell - 3))
    for index in range(count):
        start = index * cell
        canvas.paste(_thumbnail(images[index], cell - 1), (left + start, top - cell - 3))
        text = _shortened(captions[index], font, _LABEL_WIDTH)
        draw.text((left - _GAP, top + start + cell / 2), text, _INK, font=font, anchor="rm")
        if cell >= 20:
            draw.rectangle((left + start, top + start, left + start + cell - 1, top + start + cell - 1), outline=_PAPER)
    _draw_scale(canvas, (left + side + 20, top, min(side, 320)), low, high)
    return _channels_first(canvas)


def retrieval_grid(rows: Sequence[RetrievedRow]) -> np.ndarray:
    """Draw one line per caption: its text, the rank of its own image, and the images that were found.

    The caption's own image has a green outline. Returns (3, H, W) uint8.
    """
    columns = max((len(row.images) for row in rows), default=0)
    height = _THUMBNAIL + 34
    left, top = _MARGIN + _CAPTION_WIDTH + 2 * _GAP, 62
    width = left + columns * (_THUMBNAIL + _GAP) - _GAP + _MARGIN
    canvas = Image.new("RGB", (width, top + height * len(rows) + _GAP), _PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text((_MARGIN, 16), "Images retrieved for a caption", _INK, font=_font(20, bold=True))
    for index, row in enumerate(rows):
        upper = top + index * height
        draw.line((_MARGIN, upper - 8, width - _MARGIN, upper - 8), _LINE)
        _draw_caption(draw, row, upper)
        for column, (image, similarity) in enumerate(zip(row.images, row.similarities, strict=True)):
            corner = (left + column * (_THUMBNAIL + _GAP), upper)
            _draw_hit(canvas, image, similarity, corner, is_correct=column == row.correct)
    return _channels_first(canvas)


def contact_sheet(title: str, samples: Sequence[tuple[str, Image.Image | None]]) -> np.ndarray:
    """Draw images in rows, each with its caption below it.

    samples: captions with their images, None for an image that cannot be read. Returns (3, H, W) uint8.
    """
    columns, cell, height, top = 6, _THUMBNAIL + 32, _THUMBNAIL + 84, 62
    rows = -(-len(samples) // columns)
    canvas = Image.new("RGB", (2 * _MARGIN + columns * (cell + _GAP) - _GAP, top + max(1, rows) * height), _PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text(
        (_MARGIN, 16), _shortened(title, _font(20, bold=True), canvas.width - 2 * _MARGIN), _INK, _font(20, bold=True)
    )
    for index, (caption, image) in enumerate(samples):
        x, y = _MARGIN + index % columns * (cell + _GAP), top + index // columns * height
        canvas.paste(_thumbnail(image, cell), (x, y))
        for number, line in enumerate(_wrapped(caption, _font(12), cell, most_lines=2)):
            draw.text((x, y + cell + 6 + number * 16), line, _INK, font=_font(12))
    return _channels_first(canvas)


def _draw_caption(draw: ImageDraw.ImageDraw, row: RetrievedRow, upper: int) -> None:
    found = row.correct is not None
    verdict = f"own image at rank {row.rank + 1} of {row.candidates}"
    draw.text((_MARGIN, upper + _THUMBNAIL - 16), verdict, _GREEN if found else _RED, font=_font(13))
    for number, line in enumerate(_wrapped(row.caption, _font(15), _CAPTION_WIDTH, most_lines=5)):
        draw.text((_MARGIN, upper + number * 20), line, _INK, font=_font(15))


def _draw_hit(
    canvas: Image.Image, image: Image.Image | None, similarity: float, corner: tuple[int, int], *, is_correct: bool
) -> None:
    draw = ImageDraw.Draw(canvas)
    x, y = corner
    canvas.paste(_thumbnail(image, _THUMBNAIL), corner)
    if is_correct:
        draw.rectangle((x - 4, y - 4, x + _THUMBNAIL + 3, y + _THUMBNAIL + 3), outline=_GREEN, width=4)
    colour = _GREEN if is_correct else _GREY
    draw.text((x + _THUMBNAIL / 2, y + _THUMBNAIL + 12), f"{similarity:.3f}", colour, font=_font(13), anchor="mm")


def _draw_scale(canvas: Image.Image, place: tuple[int, int, int], low: float, high: float) -> None:
    """Draw the colour bar, highest value on top, with the values at its ends and in the middle."""
    x, y, height = place
    ramp = np.linspace(1.0, 0.0, height)[:, None].repeat(14, axis=1)
    canvas.paste(Image.fromarray(_colours(ramp, 0.0, 1.0)), (x, y))
    draw = ImageDraw.Draw(canvas)
    for value, level, anchor in ((high, y, "lt"), ((low + high) / 2, y + height / 2, "lm"), (low, y + height, "lb")):
        draw.text((x + 20, level), f"{value:.3f}", _GREY, font=_font(13), anchor=anchor)


def _diagonal_summary(similarities: np.ndarray) -> str:
    is_own = np.eye(len(similarities), dtype=bool)
    parts = {"own image": similarities[is_own], "other images": similarities[~is_own]}
    return "mean similarity: " + ", ".join(
        f"{name} {values.mean():.3f}" for name, values in parts.items() if values.size
    )


def _colours(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map values (h, w) to colours (h, w, 3) uint8, by linear interpolation in the colour map; red if not finite."""
    finite = np.isfinite(values)
    scaled = (np.where(finite, values, low) - low) / (high - low if high > low else 1.0)
    stops = np.linspace(0.0, 1.0, len(_VIRIDIS))
    pixels = np.stack([np.interp(scaled, stops, channel) for channel in _VIRIDIS.T], axis=-1).round().astype(np.uint8)
    pixels[~finite] = _RED
    return pixels


def _thumbnail(image: Image.Image | None, side: int) -> Image.Image:
    """Return the whole image, scaled down, in the middle of a grey square."""
    if image is None:
        return Image.new("RGB", (side, side), _BLANK)
    return ImageOps.pad(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC, color=_BLANK)


@lru_cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return DejaVu if the system has it, for Greek, Cyrillic and other scripts; else Pillow's own Latin font."""
    try:
        return ImageFont.truetype("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _start(text: str) -> str:
    """Return the start of the text, on one line. Pillow measures long text slowly, and refuses a megabyte."""
    return " ".join(text.split())[:_LONGEST_TEXT]


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the text on one line; text wider than `width` pixels is cut and ends in an ellipsis."""
    text = _start(text)
    if font.getlength(text) <= width:
        return text
    kept = bisect_right(range(1, len(text)), float(width), key=lambda length: font.getlength(text[:length] + "…"))
    return text[:kept].rstrip() + "…"


def _wrapped(
    text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, *, most_lines: int
) -> list[str]:
    """Return lines no wider than `width` pixels, broken between words; the last one ends in an ellipsis if cut."""
    words = _start(text).split()
    lines: list[str] = []
    while words and len(lines) < most_lines - 1:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width:
            line = f"{line} {words.pop(0)}"
        lines.append(_shortened(line, font, width))
    return [*lines, _shortened(" ".join(words), font, width)] if words else lines


def _channels_first(canvas: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(canvas).transpose(2, 0, 1))
