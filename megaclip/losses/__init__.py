"""Losses over the contrastive batch of all ranks: the tile engine and the ranks' exchange, joined by autograd.

`LOSSES` names what a configuration may ask for; a new loss adds one line to it.
"""

from megaclip.losses.clip import ClipLoss

LOSSES = {"clip": ClipLoss}

__all__ = ["LOSSES", "ClipLoss"]
