"""Verify an exported directory with the installed open_clip and transformers.

`verify` loads the directory with the `open_clip` package as a user would (`local-dir:DIR`), `verify_transformers` with
transformers' Auto classes. Both compare the library's model with MegaCLIP's: features of the same images and tokens,
the logit scale, and the tokens of the same captions. The second also compares the pixels of the image processor.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder
from megaclip.models.hugging_face import known_configurations
from megaclip.models.text import caption_lengths, is_cut_exact
from megaclip.open_clip_package import import_open_clip

TOLERANCE = 1e-5
"""Largest allowed difference of unit-length float32 features. Both models use float32, but sum in a different order."""

CAPTIONS = (
    "a photo of a cat",
    "Two DOGS,   playing in the snow!",
    "caf\u00e9 &amp; cr\u00e8me br\u00fbl\u00e9e \u2014 \u65e5\u672c\u8a9e \U0001f600",
    "a very long caption " * 40,
    "a <s>red</s> photo<pad> of an <unk> thing",
    "",
)
"""Captions for which tokenizers often differ: case, spaces, HTML entities, accents, other scripts, length, names of
special tokens, no text."""

Tokenize = Callable[[list[str]], torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """Differences between a model and the model that open_clip loads from its export."""

    max_abs_diff: float
    """Largest absolute difference of image features, text features, the logarithm of the logit scale and the bias."""
    captions_compared: int
    """Number of captions that both tokenizers encoded; 0 if no tokenizer was given."""
    captions_differing: int
    """Number of captions whose tokens differ."""

    @property
    def passed(self) -> bool:
        """True if `max_abs_diff` is within `TOLERANCE` and no caption differs."""
        return self.max_abs_diff <= TOLERANCE and self.captions_differing == 0


@torch.no_grad()
def verify(directory: str | Path, model: DualEncoder, tokenize: Tokenize | None = None) -> Verification:
    """Compare `model` (float32, CPU, evaluation mode) with the model that open_clip loads from `directory`.

    Args:
        model: the model that was exported.
        tokenize: the tokenizer that the model was trained with: captions -> (n, context_length) int64. If it is None,
            features are compared on random tokens, and no captions are compared.

    Raises:
        CheckpointError: open_clip is not installed, or cannot load the directory; the message gives its reason.
    """
    open_clip = import_open_clip()
    source = f"local-dir:{directory}"
    try:
        with known_configurations():
            theirs = open_clip.create_model_from_pretrained(source, return_transform=False).eval()
        tokenizer = open_clip.get_tokenizer(source) if tokenize is not None else None
    except Exception as error:  # open_clip does not document the exceptions that it raises
        raise CheckpointError(f"open_clip cannot load {directory}: {' '.join(str(error).split())[:300]}") from None

    vision = model.config.vision_cfg
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, vision.image_size, vision.image_size, generator=generator)
    tokens, differing = _random_tokens(model, generator), 0
    if tokenize is not None and tokenizer is not None:
        tokens = tokenize(list(CAPTIONS))
        their_tokens = tokenizer(list(CAPTIONS)).to(tokens.dtype)
        if their_tokens.shape != tokens.shape:
            differing = len(CAPTIONS)
        else:
            differing = int((tokens != their_tokens).any(dim=1).sum())
    ours, theirs_out = model(images, tokens), theirs(images, tokens)
    differences = [
        (ours[0] - theirs_out[0]).abs().max(),
        (ours[1] - theirs_out[1]).abs().max(),
        (ours[2] - theirs_out[2].log()).abs().max(),
        *((bias - theirs_bias).abs().max() for bias, theirs_bias in zip(ours[3:], theirs_out[3:], strict=True)),
    ]
    return Verification(
        max_abs_diff=float(torch.stack(differences).max()),
        captions_compared=0 if tokenize is None else len(CAPTIONS),
        captions_differing=differing,
    )


@torch.no_grad()
def verify_transformers(
    directory: str | Path,
    model: DualEncoder,
    tokenize: Tokenize | None = None,
    captions: Sequence[str] = CAPTIONS,
    pixels: Callable[[bytes], torch.Tensor] | None = None,
) -> Verification:
    """Compare `model` (float32, CPU, evaluation mode) with the model that transformers loads from `directory`.

    Args:
        tokenize: as for `verify`. Captions are padded to the context length. CLIP's padding has other ids in
            transformers, and no influence, so tokens after the end of text are not compared for causal text towers.
        captions: captions whose HTML entities and encodings were repaired, which transformers does not do.
        pixels: the model's input (3, H, W) for an image file. None: the image processor is not compared.

    Raises:
        CheckpointError: transformers is not installed, or cannot load the directory.
    """
    import_open_clip()  # and torchvision, which transformers needs
    import transformers

    source, text, local = str(directory), model.config.text_cfg, {"local_files_only": True}
    try:
        theirs = transformers.AutoModel.from_pretrained(source, **local).float().eval()
        processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil", **local)
        tokenizer = (
            None if tokenize is None else transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
        )
    except Exception as error:  # transformers does not document the exceptions that it raises
        raise CheckpointError(f"transformers cannot load {directory}: {' '.join(str(error).split())[:300]}") from None
    generator, size = torch.Generator().manual_seed(0), model.config.vision_cfg.image_size
    images = torch.randn(2, 3, size, size, generator=generator)
    pixel_difference = torch.zeros(())
    if pixels is not None:
        # Sides after which both libraries cut the same rows: they round odd margins differently.
        shapes = ((2 * size, 2 * size + 8), (3 * size + 12, 3 * size), (size, size))
        pictures = [_picture(*shape, generator) for shape in shapes]
        files = [io.BytesIO() for _ in pictures]
        for picture, file in zip(pictures, files, strict=True):
            picture.save(file, "PNG")
        images = torch.stack([pixels(file.getvalue()) for file in files])
        their_images = processor(images=pictures, return_tensors="pt").pixel_values
        pixel_difference = (images - their_images).abs().max()
    tokens, differing = _random_tokens(model, generator), 0
    their_tokens = tokens
    if tokenize is not None and tokenizer is not None:
        tokens = tokenize(list(captions))
        options = {"padding": "max_length", "truncation": True, "max_length": text.context_length}
        their_tokens = tokenizer(list(captions), return_tensors="pt", **options).input_ids
        compared = torch.ones_like(tokens, dtype=torch.bool)
        if is_cut_exact(text):
            compared = torch.arange(tokens.shape[1]) < caption_lengths(tokens, text)[:, None]
        differing = int(((tokens != their_tokens) & compared).any(dim=1).sum())
    ours, found = model(images, tokens), theirs(input_ids=their_tokens, **_image_inputs(theirs, images))
    differences = [
        pixel_difference,
        (ours[0] - found.image_embeds).abs().max(),
        (ours[1] - found.text_embeds).abs().max(),
        (ours[2] - theirs.logit_scale).abs().max(),
        *((bias - theirs.logit_bias).abs().max() for bias in ours[3:]),
    ]
    compared_captions = 0 if tokenize is None else len(captions)
    return Verification(float(torch.stack(differences).max()), compared_captions, differing)


def _image_inputs(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for images (b, 3, H, W). Siglip2Model takes patches."""
    if model.config.model_type != "siglip2":
        return {"pixel_values": images}
    side = model.config.vision_config.patch_size
    rows = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (b, 3, rows, side, columns, side)
    patches = rows.permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.flatten(3).flatten(1, 2),
        "pixel_attention_mask": torch.ones(len(images), patches.shape[1] * patches.shape[2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([patches.shape[1:3]] * len(images)),
    }


def _picture(height: int, width: int, generator: torch.Generator) -> Image.Image:
    """Return a picture with smooth areas and edges, as photographs have."""
    coarse = torch.rand(1, 3, 7, 9, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]
    smooth[:, height // 3 : height // 2, width // 4 : width // 2] = 1.0
    return Image.fromarray((smooth * 255).to(torch.uint8).permute(1, 2, 0).numpy())


def _random_tokens(model: DualEncoder, generator: torch.Generator) -> torch.Tensor:
    text = model.config.text_cfg
    tokens = torch.randint(model.vocab_size, (2, text.context_length), generator=generator)
    if text.pool_type == "eos":
        tokens[0, text.context_length // 2] = text.eos_id
    return tokens
