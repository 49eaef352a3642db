"""Verify an exported directory with the installed open_clip.

`verify` loads the directory with the `open_clip` package as a user would (`local-dir:DIR`). It compares open_clip's
model with MegaCLIP's: features of the same images and tokens, the logit scale, and the tokens of the same captions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder
from megaclip.models.hugging_face import known_configurations
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


def _random_tokens(model: DualEncoder, generator: torch.Generator) -> torch.Tensor:
    text = model.config.text_cfg
    tokens = torch.randint(model.vocab_size, (2, text.context_length), generator=generator)
    if text.pool_type == "eos":
        tokens[0, text.context_length // 2] = text.eos_id
    return tokens
