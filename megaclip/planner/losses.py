"""GPU memory of MegaCLIP's contrastive losses, forward and backward, beyond the features themselves.

Unit: one float32 tensor of a rank's features, U = 4 b D bytes. The gradients that the loss returns are included.
Gradients accumulate in float32 (2 U) beside one tile of logits; then they are rounded to the features' dtype while the
sums still exist. A ring also holds the blocks that it computes and receives, and text gradients that it exchanges; an
all_gather holds the other ranks' texts and their gradients.
"""

from megaclip.losses.costs import Sizes
from megaclip.planner.constants import MIB


def megaclip_loss_bytes(
    sizes: Sizes, exchange: str, reduction: str, tile_budget_mib: float, loss: str = "clip", *, levels: int = 1
) -> float:
    """Return the peak of a loss; `exchange`, `reduction` and `loss` are settings of ds_config.json.

    sizes: `feature_bytes` are those of the features that the towers return.
    levels: levels of the ring (`megaclip.comm.ring`). Each sends and receives one sum of gradients.
    """
    unit, features, world_size = sizes.unit, sizes.features, sizes.world_size
    block_rows = sizes.batch * (world_size if exchange == "all_gather" else 1)
    tile = min(tile_budget_mib * MIB, sizes.feature_bytes * sizes.batch * block_rows)
    vectors = 12 * 4 * sizes.batch  # log-sum-exps, shifts, dots, positives and their sums
    if world_size == 1:
        at_tiles = 2.0 * unit
    elif exchange == "ring" and reduction == "feature":
        blocks = min(2, world_size - 1) * features
        at_tiles = (2 + levels * sizes.gradient_bytes / 2) * unit + blocks  # dx and dy; sums are sent and received
        tile = max(tile, (3 - sizes.gradient_bytes / 2) * unit)  # later their sum is sent, before they are freed
    elif exchange == "ring":
        at_tiles = 2 * unit + 4 * features  # two pairs of blocks
    elif reduction == "feature":
        at_tiles = unit + world_size * (unit + features)
    else:  # the sigmoid loss frees one side before it gathers the other
        at_tiles = 2 * unit + (1 if loss == "siglip" else 2) * world_size * features
    gathered = world_size * features if exchange == "all_gather" and world_size > 1 else 0
    at_finish = 2 * unit + 2 * features + gathered  # sums and rounded gradients; the tile is freed
    at_reduction = 0.0
    if sizes.gradient_bytes == 2 and gathered and reduction == "feature":  # all texts' gradients twice, and this rank's
        at_reduction = unit + world_size * (1.5 * unit + features) + 1.5 * unit
    return max(at_tiles + tile, at_finish, at_reduction) + vectors
