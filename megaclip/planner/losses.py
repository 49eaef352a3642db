"""What a contrastive loss takes on each GPU, forward and backward: ours, open_clip's and Inf-CL's.

Unit: one float32 tensor of a rank's features, U = 4 b D bytes. Everything counts what is allocated beyond the features
themselves, the gradients that are handed back included.

* **Ours.** Gradients accumulate in float32 (2 U) beside one tile of logits; then they are rounded to the features'
  dtype while the sums are still there. A ring also holds the blocks that are here and that arrive, and text gradients
  under way; an all_gather holds the other ranks' texts and their gradients.
* **open_clip** (local loss, gather with gradient): the logits of both directions and their gradients, b x B each, and
  all ranks' features. Under autocast the cross-entropy works in float32: 16 bytes per logit instead of 8.
* **Inf-CL** (inf-cl 1.2.1, both directions): float32 copies of what is passed around. Counted by running its own
  forward and backward with the kernels replaced by empty results: 15 U for float32 features on three ranks or more, 13
  on two, 8 on one; two more for 16-bit features. Its paper's Table 1 (arXiv:2410.17243, ViT-L/14, D = 768) is 15 U to
  the last digit when its GB are read as 1,000 MiB.
"""

from dataclasses import dataclass

from megaclip.planner.constants import MIB


@dataclass(frozen=True)
class LossSizes:
    """b x D features on each of W ranks."""

    local_batch: int
    embed_dim: int
    world_size: int
    feature_bytes: int = 2

    @property
    def unit(self) -> int:
        """Bytes of one float32 tensor of a rank's features."""
        return 4 * self.local_batch * self.embed_dim

    @property
    def features(self) -> int:
        """Bytes of one rank's features of one tower."""
        return self.feature_bytes * self.local_batch * self.embed_dim

    @property
    def logits(self) -> int:
        """Number of similarities that this rank owns."""
        return self.local_batch**2 * self.world_size


def megaclip_loss_bytes(
    sizes: LossSizes,
    exchange: str,
    reduction: str,
    tile_budget_mib: float,
    loss: str = "clip",
    *,
    payload_bytes: int = 4,
) -> float:
    """Peak of MegaCLIP's losses; `exchange`, `reduction` and `loss` as in ds_config.json.

    payload_bytes: of a number of the gradients on their way (`megaclip.payload`).
    """
    unit, features, world_size = sizes.unit, sizes.features, sizes.world_size
    block_rows = sizes.local_batch * (world_size if exchange == "all_gather" else 1)
    tile = min(tile_budget_mib * MIB, sizes.feature_bytes * sizes.local_batch * block_rows)
    vectors = 12 * 4 * sizes.local_batch  # log-sum-exps, shifts, dots, positives and their sums
    if world_size == 1:
        at_tiles = 2.0 * unit
    elif exchange == "ring" and reduction == "feature":
        # dx; dy of this block and (InfoNCE, from the third rank on) of the last; a sum that leaves, one that arrives.
        sums = (4 if loss == "siglip" or world_size == 2 else 5) - (2 - payload_bytes / 2)
        at_tiles = sums * unit + min(2, world_size - 1) * features
    elif exchange == "ring":
        at_tiles = 2 * unit + 4 * features  # two pairs of blocks
    elif reduction == "feature":
        at_tiles = unit + world_size * (unit + features)
    else:  # the sigmoid loss lets go of one side before it gathers the other
        at_tiles = 2 * unit + (1 if loss == "siglip" else 2) * world_size * features
    gathered = world_size * features if exchange == "all_gather" and world_size > 1 else 0
    at_finish = 2 * unit + 2 * features + gathered  # sums and rounded gradients; the tile is gone
    at_reduction = 0.0
    if payload_bytes == 2 and gathered and reduction == "feature":  # all texts' gradients twice, and this rank's
        at_reduction = unit + world_size * (1.5 * unit + features) + 1.5 * unit
    return max(at_tiles + tile, at_finish, at_reduction) + vectors


def open_clip_loss_bytes(sizes: LossSizes, *, autocast: bool = True) -> float:
    """Peak of open_clip's ClipLoss with --local-loss --gather-with-grad."""
    gathered = 2 * sizes.world_size * sizes.features if sizes.world_size > 1 else 0
    return (16 if autocast or sizes.feature_bytes == 4 else 8) * sizes.logits + gathered + 2 * sizes.features


def inf_cl_loss_bytes(sizes: LossSizes) -> float:
    """Peak of Inf-CL's loss over both directions."""
    units = {1: 8, 2: 13}.get(sizes.world_size, 15) + (2 if sizes.feature_bytes == 2 else 0)
    return units * sizes.unit
