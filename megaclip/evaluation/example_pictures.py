"""Draw the two evaluation pictures of collected examples; captions and images are read from the dataset by id."""

import numpy as np
from PIL import Image

from megaclip.data.batch import PADDING_ID, BadSample
from megaclip.data.images import eight_bit, open_image
from megaclip.data.reading import ReadableSet
from megaclip.evaluation.examples import RetrievalExamples
from megaclip.evaluation.pictures import Picture, retrieval_grid, similarity_heatmap
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)


_LARGEST_SIDE = 256


def example_pictures(examples: RetrievalExamples, dataset: ReadableSet) -> dict[str, np.ndarray]:
    """Return {"similarity": heat map, "retrieval": grid}, each RGB uint8 (3, H, W), for `SummaryWriter.add_image`.

    `dataset` is the one that was evaluated; about `len(examples.ids) + 5 * len(examples.queries)` of its samples are
    read. One rank alone may call it. A sample that cannot be read gives an empty square.
    """
    captions, images = zip(*(_read(dataset, int(pair)) for pair in examples.ids), strict=True)
    heat_map = similarity_heatmap(examples.similarities, captions, images)
    found = [[_read(dataset, pair)[1] for pair in pairs] for pairs in examples.found_ids.tolist()]
    grid = retrieval_grid(examples, [captions[query] for query in examples.queries], found)
    return {"similarity": heat_map, "retrieval": grid}


def _read(dataset: ReadableSet, pair: int) -> tuple[str, Picture]:
    """Return the first line of the caption, and the image as a thumbnail, or None if it cannot be read."""
    if pair == PADDING_ID:
        return "", None
    try:
        sample = dataset.read(pair)
    except BadSample:
        return "", None
    caption = next((line.strip() for line in sample.caption.splitlines() if line.strip()), "")
    try:
        image = eight_bit(open_image(sample.image))
        image.draft("RGB", (_LARGEST_SIDE, _LARGEST_SIDE))
        image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
        return caption, image.convert("RGB")
    except (BadSample, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        log_once(_logger.warning, f"cannot decode an image of the evaluation pictures: {sample.key}: {error}")
        return caption, None
