"""Does the exported directory mean the same to the real open_clip as the model does to MegaCLIP?

Loads the directory with the `open_clip` package the way a user would (`local-dir:DIR`) and compares what comes out:
features of the same images and tokens, the logit scale, and the tokens of the same captions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megaclip.checkpoint.open_clip_package import import_open_clip
from megaclip.errors import CheckpointError
from megaclip.models.clip import ClipModel
from megaclip.models.config import TextConfig

TOLERANCE = 1e-5
"""Largest difference of unit-length float32 features that counts as equal: both float32, summed in another order."""

CAPTIONS = (
    "a photo of a cat",
    "Two DOGS,   playing in the snow!",
    "caf\u00e9 &amp; cr\u00e8me br\u00fbl\u00e9e \u2014 \u65e5\u672c\u8a9e \U0001f600",
    "a very long caption " * 40,
    "",
)
"""Case, spaces, HTML entities, accents, other scripts, truncation and emptiness: where tokenizers differ."""

Tokenize = Callable[[list[str]], torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """How far open_clip's reading of a directory is from the model it was made from."""

    max_abs_diff: float
    """Largest absolute difference over image features, text features, the logarithm of the logit scale, the bias."""
    captions_compared: int
    """0 when no tokenizer was given."""
    captions_differing: int

    @property
    def passed(self) -> bool:
        """Features within `TOLERANCE` and every caption tokenised alike."""
        return self.max_abs_diff <= TOLERANCE and self.captions_differing == 0


@torch.no_grad()
def verify(directory: str | Path, model: ClipModel, tokenize: Tokenize | None = None) -> Verification:
    """Compare `model` (float32, CPU, evaluation mode) with what open_clip loads from `directory`.

    Args:
        tokenize: captions -> (n, context_length) int64, the tokenizer the model was trained with; None: the features
            are compared on arbitrary tokens and no captions are.

    Raises:
        CheckpointError: open_clip is not installed or cannot load the directory; carries its reason.
    """
    open_clip = import_open_clip()
    source = f"local-dir:{directory}"
    try:
        theirs = open_clip.create_model_from_pretrained(source, return_transform=False).eval()
        tokenizer = open_clip.get_tokenizer(source) if tokenize is not None else None
    except Exception as error:  # open_clip raises whatever its parts raise
        raise CheckpointError(f"open_clip cannot load {directory}: {' '.join(str(error).split())[:300]}") from None

    vision, text = model.config.vision_cfg, model.config.text_cfg
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, vision.image_size, vision.image_size, generator=generator)
    tokens, differing = _arbitrary_tokens(text, generator), 0
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


def _arbitrary_tokens(text: TextConfig, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(text.vocab_size, (2, text.context_length), generator=generator)
    if text.pool_type == "eos":
        tokens[0, text.context_length // 2] = text.eos_id
    return tokens
