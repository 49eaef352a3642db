"""Losses over the contrastive batch of all ranks: tile operations and communication, joined by autograd.

`LOSSES` maps the names of ds_config.json to constructors. A new loss adds one line to it.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from megaclip.losses.clip import ClipLoss
from megaclip.losses.fastclip import FastClipLoss
from megaclip.losses.fastclip_variants import VARIANTS
from megaclip.losses.siglip import SigLipLoss

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "clip": ClipLoss,
    "siglip": SigLipLoss,
    **{variant: partial(FastClipLoss, variant) for variant in VARIANTS},
}

__all__ = ["LOSSES", "ClipLoss", "FastClipLoss", "SigLipLoss"]
