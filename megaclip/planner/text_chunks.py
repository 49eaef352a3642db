"""Decide the sizes of a run's text chunks: a text chunk takes about as much memory as an image chunk."""

from dataclasses import replace

from megaclip.config import TrainingConfig
from megaclip.config.training import TextChunks
from megaclip.models import ModelDescription, OpenClipConfig
from megaclip.planner.traced_towers import traced_image_tower, traced_text_tower
from megaclip.step.layout import cuts_captions

LEAST_CUT_CHUNKS = 8
"""Number of cut text chunks that save 59 % of the text positions; four save 52 % (docs/huge_batches.md). With fewer,
larger chunks that are not divided into pieces, the text tower encodes more padding."""


def text_chunks_for(model: ModelDescription, compute_bytes: int, cut_captions: bool | str) -> TextChunks:
    """Return the limits of a run's text chunks: the number of captions that take about as much memory as one image.

    Chunks of open_clip's text towers are not divided into pieces. They contain as little padding as the captions of an
    image chunk only if there are several text chunks. compute_bytes: bytes of an activation. cut_captions:
    megaclip.cut_captions.
    """
    if isinstance(model, OpenClipConfig):
        image, text = traced_image_tower(model).trace(compute_bytes), traced_text_tower(model).trace(compute_bytes)
        least = LEAST_CUT_CHUNKS if cuts_captions(cut_captions, model.text_cfg) else 1
        return TextChunks(max(1, int(image.backward_peak / text.backward_peak)), least)
    tower, captions = model.vision_cfg, model.text_cfg
    tokens = 1 + tower.grid_size**2 * (1 - tower.patch_dropout)
    numbers = captions.context_length * captions.width * captions.layers
    return TextChunks(max(1, round(tokens * tower.width * tower.layers / numbers)))


def fitted(config: TrainingConfig, model: ModelDescription) -> TrainingConfig:
    """Return the settings of a run with the sizes of text chunks for the model."""
    compute_bytes = 2 if config.bf16 else 4
    return replace(config, text_chunks=text_chunks_for(model, compute_bytes, config.megaclip.cut_captions))
