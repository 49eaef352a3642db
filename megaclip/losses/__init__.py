"""Losses over the contrastive batch of all ranks: autograd functions that combine `megaclip.ops` and `megaclip.comm`.

`LOSSES` maps the names of ds_config.json to constructors. docs/architecture.md lists what a new loss requires: its
module, an entry in `LOSSES`, its costs in `costs.LOSS_COSTS`, its name in `megaclip.config.section`, its settings and a
test.

The import registers the tile operations with DeepSpeed, in this process, as the op that
`get_accelerator().create_op_builder("ContrastiveTilesBuilder")` finds.

Words used in this package:

- features: the inputs of a loss, (b, D), of unit length. `megaclip.engine` calls them embeddings.
- alpha: the factor of the similarities, `alpha = exp(logit_scale) = 1 / temperature`.
- tile of logits: the part of the B x B similarities that is computed, used and discarded at once.
- log-normaliser: the number that is subtracted from the logits of a row or column before the exponential. In InfoNCE
  it is the log-sum-exp of that row or column.
- global losses: SogCLR, iSogCLR and FastCLIP, which contrast each sample with the whole dataset.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from megaclip.losses.clip import ClipLoss
from megaclip.losses.fastclip import FastClipLoss
from megaclip.losses.settings import VARIANTS
from megaclip.losses.siglip import SigLipLoss
from megaclip.ops import op_builder  # registers the tile operations

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "clip": ClipLoss,
    "siglip": SigLipLoss,
    **{variant: partial(FastClipLoss, variant) for variant in VARIANTS},
}

__all__ = ["LOSSES", "ClipLoss", "FastClipLoss", "SigLipLoss"]
