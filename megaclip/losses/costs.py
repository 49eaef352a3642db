"""Formulas for the operations and bytes of a contrastive loss, forward and backward (docs/mathematics.md).

`LOSS_COSTS` has the costs of each loss by its name in ds_config.json. From these costs `megaclip.losses.way` chooses
the exchange and the reduction, and the planner computes a step's time and traffic. Tests compare them with the bytes
that `tools/volume.py` measures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from megaclip.losses.settings import VARIANTS


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends per step."""

    features: float
    gradients: float
    scalars: float
    state: float = 0
    """Bytes of per-sample state, to and from the ranks that own the samples."""

    @property
    def total(self) -> float:
        return self.features + self.gradients + self.scalars + self.state


@dataclass(frozen=True)
class Sizes:
    """Shape of one rank's features (b, D), and the bytes per element."""

    world_size: int
    batch: int
    """Local rows b."""
    embedding: int
    """Embedding size D."""
    feature_bytes: int
    """Bytes of a feature that is exchanged, or held."""
    gradient_bytes: int = 4
    """Bytes of an exchanged feature gradient."""
    sum_bytes: int = 4
    """Bytes of a per-sample value, of a sum, and of a feature gradient while it accumulates."""
    ids: str = "ignore"
    """The setting ids of the loss."""
    negatives: int = 0
    """Negatives that each rank sends, besides the b texts."""

    @property
    def hops(self) -> int:
        """Number of hops around the ring to the other ranks."""
        return self.world_size - 1

    @property
    def unit(self) -> int:
        """Bytes of one float32 tensor of a rank's features."""
        return 4 * self.batch * self.embedding

    @property
    def features(self) -> int:
        """Bytes of one rank's features of one tower."""
        return self.batch * self.embedding * self.feature_bytes

    @property
    def side(self) -> int:
        """Bytes of one tower's features, sent to every other rank."""
        return self.hops * self.features

    @property
    def logits(self) -> int:
        """Number of similarities that a rank owns."""
        return self.batch**2 * self.world_size


@dataclass(frozen=True)
class LossCost:
    """Costs of a loss, forward and backward."""

    products: Mapping[str, int]
    """Floating-point operations of the matrix products by reduction: per rank, forward and backward, in units of b*B*D.
    A multiplication and an addition count as one each, so one product of features costs 2 units."""
    traffic: Callable[[str, str, Sizes], Traffic]
    """Traffic by exchange and reduction."""
    passes: int
    """Number of passes over the blocks."""


def contrastive_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """Return InfoNCE's traffic (docs/mathematics.md), forward and backward.

    It includes the four int64 that ranks compare before the exchange, and the sums of the loss and of logit_scale's
    gradient.
    """
    moved = _tile_traffic(exchange, reduction, sizes, scales=0, terms=1, dots=0)
    moved = replace(moved, scalars=moved.scalars + sizes.hops * 4 * 8 + _all_reduced(2, sizes))
    # Texts that all_gather has gathered for the tiles serve the sums of positives too.
    sides = 1 if exchange == "all_gather" else 2
    return _with_ids(moved, reduction, sizes, passes=2, sides=sides)


def sigmoid_traffic(exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """Return the sigmoid loss's traffic: one pass, in which ranks exchange features without per-sample values.

    The scalars are the four int64 that ranks compare, and the sums of the loss and both scalars' gradients.
    """
    feature = reduction == "feature"
    home = 1 if exchange == "ring" and sizes.hops else 0  # one more hop returns dy to its owner
    gradients = sizes.hops + home if feature else 0
    moved = Traffic(
        features=sizes.side if feature else 2 * sizes.side,
        gradients=gradients * sizes.batch * sizes.embedding * sizes.gradient_bytes,
        scalars=sizes.hops * 4 * 8 + _all_reduced(3, sizes),
    )
    return _with_ids(moved, reduction, sizes, passes=1, sides=2)


def _with_ids(moved: Traffic, reduction: str, sizes: Sizes, *, passes: int, sides: int) -> Traffic:
    """Return the traffic with that of the setting ids added.

    With "mask", ids of 8 bytes travel with the columns in every pass over the tiles, and with the rows where the
    reduction "scalar" sends these. With "positive", the ids and so many sides' features are sent once.
    """
    ids = sizes.hops * sizes.batch * 8
    if sizes.ids == "mask":
        return replace(moved, scalars=moved.scalars + ids * (passes + (reduction == "scalar")))
    if sizes.ids == "positive":
        return replace(moved, features=moved.features + sides * sizes.side, scalars=moved.scalars + ids)
    return moved


def global_contrastive_traffic(variant: str, exchange: str, reduction: str, sizes: Sizes) -> Traffic:
    """Return the traffic of a step of FastClipLoss: forward, backward, and the update of the samples' state.

    Losses with per-sample temperatures (isogclr, fastclip_v2) send three terms of the gradient tile per sample (scale,
    shift, weight), a scale for the statistics, and a sum with the gradient of a feature. They fetch and write back four
    columns of state. The other losses send one term, and have two columns of state. The ids are assumed to be spread
    evenly over their owners, as random ids are on average: (W-1)/W of the rows are sent. The traffic includes the int64
    ids, which all ranks gather, and six more int64 per rank: the four that are compared before the exchange, and one
    for each of two checks that raise on all ranks.
    """
    hops, individual = sizes.hops, VARIANTS[variant].individual
    sums = 4 if VARIANTS[variant].temperature == "global" else 2  # loss and mean of log tau; the temperature's gradient
    values = {"scales": 1, "terms": 3, "dots": 1} if individual else {"scales": 0, "terms": 1, "dots": 0}
    moved = _tile_traffic(exchange, reduction, sizes, **values)
    columns = 4 if individual else 2
    return replace(
        moved,
        scalars=moved.scalars + hops * (4 + 2) * 8 + _all_reduced(sums, sizes),
        state=sizes.batch * (8 * hops + 2 * columns * 4 * hops / sizes.world_size),
    )


def _tile_traffic(exchange: str, reduction: str, sizes: Sizes, *, scales: int, terms: int, dots: int) -> Traffic:
    """Return the traffic of the two passes of `megaclip.losses.distributed_tiles`.

    scales: number of per-sample values that ranks exchange with a column for the statistics; terms: number that they
    exchange with a row, and with a column, for the gradient (its log-normaliser is one); dots: number of sums that
    return with a column's gradient.
    """
    if sizes.world_size == 1:
        return Traffic(0, 0, 0)
    hops, rows = sizes.hops, sizes.batch * sizes.embedding
    # Units of b*D features, b*D gradients, b per-sample values. In a ring one more hop returns results to their owner.
    features, gradients, values = {
        ("ring", "feature"): (2 * hops, hops + 1, (scales + 1 + terms + dots) * hops + 1 + dots),
        ("ring", "scalar"): (3 * hops, 0, (scales + 1 + 2 * terms) * hops + 1),
        ("all_gather", "feature"): (hops, hops, (scales + 1 + terms + dots) * hops),
        ("all_gather", "scalar"): (2 * hops, 0, (scales + 1 + 2 * terms) * hops),
    }[exchange, reduction]
    return Traffic(
        features * rows * sizes.feature_bytes,
        gradients * rows * sizes.gradient_bytes,
        values * sizes.batch * sizes.sum_bytes,
    )


def _all_reduced(elements: int, sizes: Sizes) -> float:
    """Return the bytes that a rank sends in an all-reduce of `elements` sums."""
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
