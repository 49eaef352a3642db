"""Losses over the contrastive batch of all ranks: the tile engine and the ranks' exchange, joined by autograd.

`LOSSES` names what a configuration may ask for; a new loss adds one line to it.
"""

from megaclip.losses.clip import ClipLoss
from megaclip.losses.fastclip import FastClipLoss
from megaclip.losses.siglip import SigLipLoss

LOSSES = {"clip": ClipLoss, "siglip": SigLipLoss}

__all__ = ["LOSSES", "ClipLoss", "FastClipLoss", "SigLipLoss"]
