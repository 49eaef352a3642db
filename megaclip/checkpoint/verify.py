"""Verify an exported directory with the installed open_clip and transformers.

`verify` loads the directory with the library as a user would, and compares its model with MegaCLIP's: features of the
same images and tokens, the logit scale, the tokens of the same captions, and the pixels of transformers' processor.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image

from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder
from megaclip.models.hugging_face import known_configurations
from megaclip.models.open_clip_keys import SCALARS
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
    """Differences between a model and the model that a library loads from its export."""

    max_abs_diff: float
    """Largest absolute difference of image features, text features, the logarithm of the logit scale, the bias, the
    caption loss and pixels."""
    captions_compared: int
    """Number of captions that both tokenizers encoded; 0 if no tokenizer was given."""
    captions_differing: int
    """Number of captions whose tokens differ."""

    @property
    def passed(self) -> bool:
        """True if `max_abs_diff` is within `TOLERANCE` and no caption differs."""
        return self.max_abs_diff <= TOLERANCE and self.captions_differing == 0


@torch.no_grad()
def verify(
    directory: str | Path,
    model: DualEncoder,
    tokenize: Tokenize | None = None,
    *,
    library: str = "open_clip",
    captions: Sequence[str] = CAPTIONS,
    pixels: Callable[[bytes], torch.Tensor] | None = None,
) -> Verification:
    """Compare `model` (float32, CPU, evaluation mode) with the model that a library loads from `directory`.

    Args:
        tokenize: the tokenizer that the model was trained with: captions -> (n, context_length) int64. If it is None,
            features are compared on random tokens, and no captions are compared. CLIP's padding has other ids in
            transformers, and no influence, so there the tokens after the end of text are not compared for causal text
            towers.
        library: "open_clip" or "transformers".
        captions: for transformers, captions whose HTML entities and encodings were repaired, which it does not do.
        pixels: the model's input (3, H, W) for an image file, compared with transformers' image processor unless None.

    Raises CheckpointError if the library is not installed, or cannot load the directory; the message gives its reason.
    """
    import_open_clip()  # and torchvision, which transformers needs
    try:
        loaded = _LOADERS[library](str(directory), model, tokenize is not None)
    except Exception as error:  # the libraries do not document the exceptions that they raise
        raise CheckpointError(f"{library} cannot load {directory}: {' '.join(str(error).split())[:300]}") from None
    generator, size, text = torch.Generator().manual_seed(0), model.config.vision_cfg.image_size, model.config.text_cfg
    images, differences = torch.randn(2, 3, size, size, generator=generator), []
    if pixels is not None and loaded.process is not None:
        # Sides after which both libraries cut the same rows: they round odd margins differently.
        shapes = ((2 * size, 2 * size + 8), (3 * size + 12, 3 * size), (size, size))
        pictures = [_picture(*shape, generator) for shape in shapes]
        images = torch.stack([pixels(_file(picture)) for picture in pictures])
        differences.append((images - loaded.process(pictures)).abs().max())
    tokens, differing = _random_tokens(model, generator), 0
    their_tokens = tokens
    if tokenize is not None:
        tokens = tokenize(list(captions))
        found, differing = loaded.tokenize(list(captions)).to(tokens.dtype), len(captions)
        if found.shape == tokens.shape:
            ends = caption_lengths(tokens, text)[:, None] if loaded.until_end else tokens.shape[1]
            compared = torch.arange(tokens.shape[1]) < ends
            differing = int(((tokens != found) & compared).any(dim=1).sum())
        their_tokens = tokens if differing else found
    if model.config.has_decoder:  # it reads one image for each caption
        images = images[torch.arange(len(tokens)) % len(images)]
    outputs = zip(_outputs(model, images, tokens), loaded.encode(images, their_tokens), strict=True)
    differences += [(ours - theirs).abs().max() for ours, theirs in outputs]
    return Verification(float(torch.stack(differences).max()), 0 if tokenize is None else len(captions), differing)


@dataclass(frozen=True)
class _Loaded:
    """A model as a library has loaded it."""

    encode: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
    """Returns what `_outputs` returns."""
    tokenize: Any
    process: Callable[[list[Image.Image]], torch.Tensor] | None = None
    """Image processor."""
    until_end: bool = False
    """True if tokens after the end of text differ and have no influence."""


def _outputs(model: DualEncoder, images: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return features, the logarithm of the logit scale, the bias and the mean caption loss if the model has them."""
    outputs, decoder = list(model(images, tokens)), model.parts().get("decoder")
    if decoder is not None:
        total = decoder(model.visual(images)[1], model.text(tokens)[1], tokens)
        outputs.append(total / decoder.label_count(tokens))
    return outputs


def _from_open_clip(directory: str, exported: DualEncoder, has_tokenizer: bool) -> _Loaded:
    open_clip, source = import_open_clip(), f"local-dir:{directory}"
    with known_configurations():
        model = open_clip.create_model_from_pretrained(source, return_transform=False).eval()
    tokenizer = open_clip.get_tokenizer(source) if has_tokenizer else None

    def encode(images: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        outputs = model(images, tokens)
        if exported.config.has_decoder:
            is_label = exported.parts()["decoder"].is_label(outputs["labels"])
            caption_loss = F.cross_entropy(outputs["logits"][is_label], outputs["labels"][is_label])
            names = ("image_features", "text_features", "logit_scale", "logit_bias")
            outputs = [*(outputs[name] for name in names if name in outputs), caption_loss]
        image, text, scale, *others = outputs
        return [image, text, scale.log(), *others]

    return _Loaded(encode, tokenizer)


def _from_transformers(directory: str, exported: DualEncoder, has_tokenizer: bool) -> _Loaded:
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, local_files_only=True).float().eval()
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
    text, tokenizer = exported.config.text_cfg, cast(Any, None)
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    options = {"padding": "max_length", "truncation": True, "max_length": text.context_length, "return_tensors": "pt"}

    def encode(images: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        found = model(input_ids=tokens, **_image_inputs(model, images))
        scalars = [getattr(model, name) for name in SCALARS if hasattr(model, name)]
        return [found.image_embeds, found.text_embeds, *scalars]

    return _Loaded(
        encode,
        lambda texts: tokenizer(texts, **options).input_ids,
        lambda pictures: processor(images=pictures, return_tensors="pt").pixel_values,
        is_cut_exact(text),
    )


_LOADERS = {"open_clip": _from_open_clip, "transformers": _from_transformers}


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


def _file(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


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
