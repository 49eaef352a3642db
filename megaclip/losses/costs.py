"""What a contrastive loss over all ranks computes and sends, forward and backward, by formula (docs/mathematics.md).

`LOSS_COSTS` has each loss by its name in ds_config.json. `megaclip.losses.plan` chooses the exchange and the reduction
by it, the planner tells a step's time and traffic from it, and tests hold it to what `megaclip.comm.volume` measures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from megaclip.losses.fastclip_variants import VARIANTS


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends per step."""

    features: float
    gradients: float
    scalars: float
    state: float = 0  # of the samples, to and from their owners

    @property
    def total(self) -> float:
        return self.features + self.gradients + self.scalars + self.state


@dataclass(frozen=True)
class Sizes:
    """What the features of one rank are, and in how many bytes an element of each kind travels."""

    world_size: int
    batch: int
    """Local rows b."""
    embedding: int
    feature_bytes: int
    gradient_bytes: int = 4
    sum_bytes: int = 4
    """Of values per sample and of sums."""

    @property
    def hops(self) -> int:
        """To the other ranks."""
        return self.world_size - 1

    @property
    def side(self) -> int:
        """Bytes of one tower's features, sent to every other rank."""
        return self.hops * self.batch * self.embedding * self.feature_bytes


@dataclass(frozen=True)
class LossCost:
    """What a loss costs, forward and backward."""

    products: Mapping[str, int]
    """By reduction, in units of b*B*D."""
    traffic: Callable[[str, str, Sizes], Traffic]
    """By exchange and reduction."""
    passes: int
    """Over the blocks."""


def contrastive_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """InfoNCE's traffic (docs/mathematics.md), forward and backward.

    Included are the four int64 that ranks compare before the exchange, and the sums of the loss and of logit_scale's
    gradient.
    """
    moved = _tile_traffic(exchange, reduction, sizes, scales=0, terms=1)
    return replace(moved, scalars=moved.scalars + sizes.hops * 4 * 8 + _all_reduced(2, sizes))


def sigmoid_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """The sigmoid loss's traffic: one pass, and no value of a sample goes along with its features.

    The scalars are the four int64 that ranks compare, and the sums of the loss and both scalars' gradients.
    """
    feature = reduction == "feature"
    home = 1 if exchange == "ring" and sizes.hops else 0  # one hop more brings dy back
    gradients = sizes.hops + home if feature else 0
    return Traffic(
        features=sizes.side if feature else 2 * sizes.side,
        gradients=gradients * sizes.batch * sizes.embedding * sizes.gradient_bytes,
        scalars=sizes.hops * 4 * 8 + _all_reduced(3, sizes),
    )


def global_contrastive_traffic(variant: str, exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """`contrastive_traffic` of a step of FastClipLoss: forward, backward, and its update of the samples' state.

    Per-sample temperatures (isogclr, fastclip_v2) move three terms of the gradient tile per sample (scale, shift,
    weight), where the others move one, and a scale for the statistics; their state has four columns to fetch and to
    write back instead of two. State is counted for ids spread evenly over their owners, as random ids are in the mean:
    (W-1)/W of the rows move. It includes the int64 ids, which all ranks gather.
    """
    hops, individual = sizes.hops, VARIANTS[variant].individual
    sums = 4 if VARIANTS[variant].temperature == "global" else 2  # loss and mean of log tau; the temperature's gradient
    moved = _tile_traffic(exchange, reduction, sizes, scales=1 if individual else 0, terms=3 if individual else 1)
    columns = 4 if individual else 2
    return replace(
        moved,
        scalars=moved.scalars + hops * (4 + 1) * 8 + _all_reduced(sums, sizes),
        state=sizes.batch * (8 * hops + 2 * columns * 4 * hops / sizes.world_size),
    )


def _tile_traffic(exchange: str, reduction: str, sizes: Sizes, *, scales: int, terms: int) -> Traffic:
    """What the two passes of `megaclip.losses.distributed_tiles` send.

    scales: per-sample values that a column takes along for the statistics; terms: that a row, and a column, takes
    along for the gradient (its log-normaliser is one).
    """
    if sizes.world_size == 1:
        return Traffic(0, 0, 0)
    hops, rows = sizes.hops, sizes.batch * sizes.embedding
    # Units of b*D features, b*D gradients, b per-sample values. In the ring one hop more brings results home.
    features, gradients, values = {
        ("ring", "feature"): (2 * hops, hops + 1, (scales + 1 + terms + 1) * hops + 2),
        ("ring", "scalar"): (3 * hops, 0, (scales + 1 + 2 * terms) * hops + 1),
        ("all_gather", "feature"): (hops, hops, (scales + 1 + terms + 1) * hops),
        ("all_gather", "scalar"): (2 * hops, 0, (scales + 1 + 2 * terms) * hops),
    }[exchange, reduction]
    return Traffic(
        features * rows * sizes.feature_bytes,
        gradients * rows * sizes.gradient_bytes,
        values * sizes.batch * sizes.sum_bytes,
    )


def _all_reduced(elements: int, sizes: Sizes) -> float:
    """Bytes that a rank sends in an all-reduce of so many sums."""
    return elements * sizes.sum_bytes * 2 * sizes.hops / sizes.world_size


_SOFTMAX_PRODUCTS = {"feature": 8, "scalar": 10}
LOSS_COSTS = {
    "clip": LossCost(_SOFTMAX_PRODUCTS, contrastive_traffic, passes=2),
    "siglip": LossCost({"feature": 6, "scalar": 8}, sigmoid_traffic, passes=1),
    **{
        variant: LossCost(_SOFTMAX_PRODUCTS, partial(global_contrastive_traffic, variant), passes=2)
        for variant in VARIANTS
    },
}


def open_clip_traffic(sizes: Sizes) -> Traffic:
    """open_clip with --local-loss --gather-with-grad: both features gathered, both gradients reduce-scattered."""
    return Traffic(features=2 * sizes.side, gradients=2 * sizes.side, scalars=0)


def disco_clip_traffic(sizes: Sizes) -> Traffic:
    """DisCo-CLIP (arXiv:2304.08480): both features gathered, both gradients all-reduced whole."""
    return Traffic(features=2 * sizes.side, gradients=4 * sizes.side, scalars=0)
