"""The table of bounds for all numeric comparisons, with the reason for each bound, and the functions that apply them.

Every error is relative to the size of the compared values. Every bound follows from the dtype, the number of terms of
the longest sum, and the factor by which a computation magnifies rounding errors. The order of a sum depends on the
processor: vectors of 4, 8 or 16 numbers, fused multiplications, one thread or several. A bound must therefore hold for
any order.

`rounding` returns such a bound. The rounding errors of a sum of n terms are n random steps of up to u. Here u is half
the distance from 1 to the next number of the dtype. With a probability of 1 - 2 exp(-l**2 / 2), the sum of the steps is
at most l * sqrt(n) * u. The source is theorem 2.4 of Higham and Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), 2019. The bounds use l = 2, times a margin of three, so that no comparison should
use more than a third of its bound. `make test-portable` measures these shares.

Planted faults must exceed their bounds by a factor of `MARGIN` or more. A bound that is too wide fails this test.

With the environment variable MEGACLIP_TEST_ERRORS=FILE, every comparison appends one JSON line to FILE.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

F32 = torch.float32
MARGIN = 3.0
"""Factor by which a planted fault must exceed its bound."""
SPREAD = 3 * 2.0
"""Margin of three, times l of the theorem above."""


def rounding(dtype: torch.dtype, terms: float, magnification: float = 1.0) -> float:
    """Return the bound of the relative error of sums of `terms` numbers in any order, with this magnification."""
    return SPREAD * math.sqrt(terms) * torch.finfo(dtype).eps / 2 * magnification


def stored(dtype: torch.dtype, times: int = 1) -> float:
    """Return the bound, in norms, of values that are rounded to `dtype` this number of times.

    A rounding error is uniform in [-u, u] relative to the power of two below the value. Its root mean square is u /
    sqrt(3). The bound multiplies this by the same margin of three.
    """
    return 3 * math.sqrt(times / 3) * torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Bound:
    """The largest error that a comparison accepts."""

    name: str
    limit: float
    """Largest accepted error, relative to the size of the expected values."""
    norm: bool = False
    """Compare the Euclidean norms of the difference and the expected values. Default: compare the largest entries."""
    smallest_size: float = 1e-3
    """Smallest size to which an error is relative.

    Features have length 1, so smaller expected values are the rest of larger terms that cancel.
    """

    def magnified(self, factor: float) -> "Bound":
        """Return the bound of a case that magnifies rounding errors by a further factor."""
        return replace(self, limit=factor * self.limit)


@dataclass(frozen=True)
class Comparison:
    """The error of one comparison and its bound."""

    bound: Bound
    error: float
    """Error relative to the size of the expected values. NaN if a computed value is NaN."""
    what: str = ""

    @property
    def share(self) -> float:
        """Error as a share of its bound. Infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.bound.limit

    def __str__(self) -> str:
        share = f"{self.share:.3g} times its bound"
        return f"{self.what or 'result'} is off by {self.error:.2e}, {share} {self.bound.name} ({self.bound.limit:.2e})"


# Two steps of training through the engine (tests/distributed/engine_cases.py): B = 12 samples, features of D = 16
# numbers, logit scale 14.3, losses of 3.2 to 3.6. A similarity is a sum of D products of two features. Each tower
# rounds its features in about 30 operations, 10 in each of three blocks. The logit scale multiplies these rounding
# errors. The loss and the gradient of log(logit scale) are means over B samples, so rounding errors average out. The
# second step adds the rounding errors of the first step, through the parameters.
_LOGITS = 2 * (16 + 2 * 30) / 12
ENGINE = {
    "loss": Bound("engine loss", rounding(F32, _LOGITS, 14.3 / 3.2)),
    # The gradient of log(logit scale) is at least 0.9 in the step where it is largest. Its terms are up to 14.3.
    "scale_gradient": Bound("engine scale gradient", rounding(F32, _LOGITS, 14.3 / 0.9)),
    # Relative to the value of each step. The gradient of the second step is 30 times smaller, because terms cancel.
    "norm": Bound("engine norm", rounding(F32, _LOGITS, 30)),
    # Relative to the largest move. A parameter is rounded to float32 after each of two updates, relative to its value.
    # logit_scale is 2.66, and with clipping the smallest of the largest moves is 4.4e-3. The rounding errors of
    # gradients are smaller, and Adam does not magnify them because its eps is 5e-2.
    "parameters": Bound("engine parameters", rounding(F32, 2, 2.66 / 4.4e-3)),
}
# Moving averages of equal float32 weights by two formulas, after two or three updates of two roundings each.
WEIGHT_AVERAGE = Bound("moving average", rounding(F32, 6))
# Captions of several lengths. Token embeddings have entries of 0.02, and the first layer norm divides by their size, so
# their gradients have terms of up to 8. The scale multiplies the rounding errors of the terms. Where terms cancel, Adam
# turns a rounding error into a move of learning rate / eps = 0.2 times its size. The largest moves are 1.3e-2.
CAPTION_ENGINE = ENGINE | {
    "parameters": Bound("caption engine parameters", rounding(F32, _LOGITS, 14.3 * 8 * 0.2 / 1.3e-2))
}
# The same two steps with open_clip's small towers, with about 60 operations per block and gradient norms of up to 120.
# The parameters are rounded to float32 as above. Batch norms divide by the deviation of 12 values in the smallest maps,
# which magnifies rounding errors twice. A variance has twice the relative error of the values.
OPEN_CLIP_ENGINE = {
    "loss": Bound("open_clip engine loss", 2 * ENGINE["loss"].limit),
    "norm": Bound("open_clip engine norm", 2 * ENGINE["norm"].limit),
    "parameters": Bound("open_clip engine parameters", 2 * ENGINE["parameters"].limit),
    "statistics": Bound("open_clip engine statistics", rounding(F32, 2 * _LOGITS, 2 * 2)),
}
# The same two steps in bfloat16. Each of about 60 operations rounds its result.
OPEN_CLIP_BF16 = {
    "loss": Bound("open_clip bfloat16 loss", stored(torch.bfloat16, 60)),
    "statistics": Bound("open_clip bfloat16 statistics", stored(torch.bfloat16, 60)),
}
# Gradient norms of one model computed in two ways, both from float64 sums. DeepSpeed rounds the sum of squares, its
# root and the norm over the parameter groups to float32.
SAME_NORM = Bound("same gradient norm", rounding(F32, 3))
# The same two steps with FastCLIP: 1 / tau = 3.3 replaces the logit scale, and losses are near 1.
FASTCLIP_ENGINE = {
    "loss": Bound("FastCLIP engine loss", rounding(F32, _LOGITS, 3.3)),
    "parameters": ENGINE["parameters"],
    # Temperatures and log(1 / tau) are rounded to float32 after each of two updates.
    "tau": Bound("FastCLIP engine tau", rounding(F32, 2)),
    "log_scale": Bound("FastCLIP engine log_scale", rounding(F32, 2)),
    # The exponent is the difference of two similarities, divided by tau.
    "u": Bound("FastCLIP engine u", rounding(F32, _LOGITS, 2 * 3.3)),
}
# Two steps in bfloat16 compared with float64. Each of about 60 operations of the towers rounds its result: 10 in each
# of three blocks, forwards and backwards. Adam turns small gradients into moves with the same relative error. The
# gradients of the features contain rounding errors magnified by the logit scale: 14.3 in losses near 2.6.
BF16_RUN = {
    "norm": Bound("bfloat16 norm", stored(torch.bfloat16, 60)),
    "move": Bound("bfloat16 move", stored(torch.bfloat16, 60) * 14.3 / 2.6, norm=True),
}
# Runs that are compared with each other, relative to each scalar's own value. Both are in float32, follow up to 11
# updates, and differ in the order of sums over ranks and chunks. Rounding errors of similarities reach losses of 3 and
# more through a logit scale of 14.3. A probability, and so the gradient, changes by this scale times its own value.
RUN = {
    "loss": Bound("run loss", rounding(F32, 11, 14.3 / 3)),
    "gradient_norm": Bound("run gradient_norm", rounding(F32, 11, 14.3)),
    "logit_scale": Bound("run logit_scale", rounding(F32, 11)),
}
# A value that is stored as float32, in TensorBoard's file or a checkpoint, and one product or exponential of it.
WRITTEN = Bound("value written as float32", rounding(F32, 2))
WRITTEN_BF16 = Bound("value written as bfloat16", stored(torch.bfloat16))


def _by_dtype(name: str, limits: dict[torch.dtype, float], norm: bool = False) -> dict[torch.dtype, Bound]:
    return {
        dtype: Bound(f"{name} {str(dtype).removeprefix('torch.')}", limit, norm=norm) for dtype, limit in limits.items()
    }


# Losses compute in float64 for float64 features and in float32 for all others, including products of 16-bit features.
# The relative error of exp(z) is the absolute error of the logit z and of the log-sum-exp that is subtracted from it:
# half a unit in the last place of a scale of up to 100 for each. This is more than the rounding errors of the sum of
# products in a similarity, whose partial sums are below 1.
_EXPONENTIAL = {dtype: rounding(dtype, 2, 100) for dtype in (torch.float64, F32)}
VALUE = _by_dtype("value", _EXPONENTIAL | {dtype: _EXPONENTIAL[F32] for dtype in (torch.bfloat16, torch.float16)})
# Gradients are computed like the values, and returned in the dtype of the features. 16-bit gradients are rounded when
# they are sent to other ranks, and when they are returned.
GRADIENT = _by_dtype("gradient", _EXPONENTIAL) | _by_dtype(
    "gradient", {dtype: stored(dtype, 2) for dtype in (torch.bfloat16, torch.float16)}, norm=True
)
# Triton's interpreter truncates a gradient that it stores in bfloat16. The error is twice that of rounding.
GRADIENT_TRUNCATED = Bound("gradient bfloat16 truncated", 2 * stored(torch.bfloat16), norm=True)
# Float64 sums of up to 18 exponentials of differences of two similarities, divided by tau = 0.3. Values have size 1.
FASTCLIP = Bound("FastCLIP loss", rounding(torch.float64, 18, 10), smallest_size=1.0)
# The gradient of a bfloat16 payload is rounded once, when it is sent.
BF16_PAYLOAD = Bound("bfloat16 payload", stored(torch.bfloat16), norm=True)
# Losses at scale 1000, relative to the scale. They are differences of logits, which are sums of 8 products.
EXTREME_LOSS = Bound("loss at an extreme scale", rounding(F32, 8))

# A similarity is a float32 sum of up to 2048 products, of which a GPU's tensor cores add 16 at a time.
_SLICES = 2048 / 16
# Tiles, for scales of up to 20. Larger scales use `magnified`. Gradients are compared by norms.
TILE_GRADIENT = {
    # P is rounded to bfloat16 for its products with features; Triton's interpreter truncates it.
    "bf16": Bound("tile gradient bf16", stored(torch.bfloat16), norm=True),
    "bf16 truncated": Bound("tile gradient bf16 truncated", 2 * stored(torch.bfloat16), norm=True),
    # On GPUs only. Both factors of both products (similarities, then P and features) are truncated to the 11 bits of
    # TF32. The error is twice that of rounding. A sum of D errors is 1 / sqrt(D) of the similarity's largest value. The
    # smallest D is 16, so the bound is 20 * stored / 4.
    "tf32": Bound("tile gradient tf32", 20 / 4 * 2 * stored(torch.float16, 4), norm=True),
    # The exponential of a logit, whose similarity is a sum of products as below.
    "float32": Bound("tile gradient float32", rounding(F32, _SLICES, 20), norm=True),
}
# Relative to the scale: rounding of the similarity, of the logit, of the sum and of its logarithm.
TILE_VALUE = {
    "float32": Bound("tile value float32", rounding(F32, _SLICES + 4)),
    # Both factors are truncated to 11 bits, each by up to 2**-10.
    "tf32": Bound("tile value tf32", 2 * 2.0**-10),
}
# The parts of up to 16 blocks are added to an accumulator one by one.
TILE_SUM = Bound("tile sum", rounding(F32, 16))
# Operations on rows: sums of up to 2048 products.
ROWS = _by_dtype("rows", {dtype: rounding(dtype, 2048) for dtype in (torch.float64, F32)}, norm=True)
# bfloat16 tiles when the probability of every positive is above 0.999.
CONVERGED = Bound("converged training", 1e-2, norm=True)

# Towers. Features have length 1 and pass through up to 12 + 12 layers of sums of up to 3072 products. Each layer adds
# to a residual, so the rounding errors of layers add up like those of terms.
FEATURES = {
    "float64": Bound("features float64", rounding(torch.float64, 24, math.sqrt(24))),
    "float32": Bound("features float32", rounding(F32, 24, math.sqrt(24))),
    # bfloat16 features: each number is rounded once.
    "bfloat16": Bound("features bfloat16", stored(torch.bfloat16)),
}
# Gradients of towers in float64, relative to the largest gradient of a tensor: one layer forwards and one backwards.
TOWER_GRADIENT = Bound("tower gradient", rounding(torch.float64, 1000), smallest_size=1.0)
# Sines and cosines of positions, and resized tables of positions: a few rounding errors of values up to 1.
POSITIONS = Bound("positions", rounding(F32, 4))
# The difference that `megaclip.checkpoint.verify` accepts between the features of open_clip and ours: its TOLERANCE.
EXPORT = Bound("export", 1e-5)
# Retrieval and zero-shot scores: float64 sums of products of unit vectors of up to 64 numbers.
SIMILARITY = Bound("similarity", rounding(torch.float64, 64))
CLASS_WEIGHTS = Bound("zero-shot class weights", rounding(F32, 24))
# Means of float64 values, and schedules of learning rates.
SCALAR = Bound("float64 scalar", rounding(torch.float64, 100))
# Two optimizer steps of open_clip's trainer with its loss and with ours, relative to the largest move of a tensor. The
# parameter, up to 1, is rounded at each of two steps. A move is at least 1e-3 of the parameter.
TRAINER = Bound("open_clip trainer", rounding(F32, 2, 1e3))

# GPU tests (make test-gpu). Scales are 20, and P is rounded to bfloat16 for bfloat16 features.
NCCL_VALUE = Bound("NCCL value", 1e-5)
NCCL_GRADIENT = _by_dtype("NCCL gradient", {torch.float64: 1e-11, F32: 1e-4, torch.bfloat16: 6e-3}, norm=True)
# The gradient is a mean of p_ij * (s_ij - s_ii), terms of size 1 that cancel at the right temperature.
NCCL_TEMPERATURE = _by_dtype("NCCL temperature", {torch.float64: 1e-12, F32: 1e-6, torch.bfloat16: 1e-4})
# Relative to the norm of a gradient, or to a thousandth of the largest norm: fused kernels add in another order. In
# float32, because in bfloat16 the gradients of the first tokens' attention consist of rounding errors only.
COMPILED = Bound("compiled towers on a GPU", 1e-3, norm=True)
# Attention in bfloat16: inputs are exact. Probabilities, their gradients and results are each rounded once. A gradient
# of a probability is a difference of two rounded sums.
ATTENTION = Bound("bfloat16 attention on a GPU", stored(torch.bfloat16, 4), norm=True)
# The same in float32, under an interpreter.
FLOAT32_ATTENTION = Bound("float32 attention in an interpreter", rounding(F32, 100), norm=True)
# An MLP in bfloat16: the hidden layer before and after the activation, its gradient, and results are each rounded once.
MLP = Bound("bfloat16 MLP on a GPU", stored(torch.bfloat16, 4), norm=True)


Values = Tensor | np.ndarray | Sequence[float] | float


def compare(got: Values, expected: Values, bound: Bound, what: str = "", *, size: float | None = None) -> Comparison:
    """Return the error of `got` relative to `size`. Default: the size of `expected` as `bound` measures it."""
    a, b = _float64(got), _float64(expected)
    assert a.shape == b.shape, f"{what or 'result'} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    difference = (a - b).masked_fill(a == b, 0)  # infinities of one sign are equal
    finite = b[b.isfinite()]
    if bound.norm:
        error, own_size = difference.norm().item(), finite.norm().item()
    else:
        error, own_size = _largest(difference), _largest(finite)
    return Comparison(bound, error / max(own_size if size is None else size, bound.smallest_size), what)


def _float64(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.from_numpy(np.array(values, dtype=np.float64))  # torch would make float32 of Python's numbers


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def exceeded(comparisons: Iterable[Comparison]) -> list[str]:
    """Record the comparisons; return a message for each that exceeds its bound."""
    comparisons = list(comparisons)
    for comparison in comparisons:
        _record(comparison, fault=False)
    return [str(comparison) for comparison in comparisons if not comparison.share <= 1]


def unnoticed(comparisons: Iterable[Comparison], fault: str) -> list[str]:
    """Record a planted fault. Return a message unless the largest error is at least `MARGIN` times its bound."""
    farthest = max(comparisons, key=lambda comparison: comparison.share)
    _record(replace(farthest, what=f"{fault}: {farthest.what}"), fault=True)
    return [] if farthest.share >= MARGIN else [f"a fault is not noticed: {fault}; {farthest}"]


def assert_close(got: Values, expected: Values, bound: Bound, what: str = "", *, size: float | None = None) -> None:
    """Fail if the error exceeds its bound."""
    problems = exceeded([compare(got, expected, bound, what, size=size)])
    assert not problems, problems[0]


def assert_far(got: Values, wrong: Values, bound: Bound, fault: str, *, size: float | None = None) -> None:
    """Fail unless the difference of `got` from a result with a planted fault is at least `MARGIN` times the bound."""
    problems = unnoticed([compare(got, wrong, bound, size=size)], fault)
    assert not problems, problems[0]


def _record(comparison: Comparison, *, fault: bool) -> None:
    """Append to the file that MEGACLIP_TEST_ERRORS names. A line is one write, so processes may share the file."""
    path = os.environ.get("MEGACLIP_TEST_ERRORS")
    if not path:
        return
    entry: dict[str, Any] = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)"),
        "what": comparison.what,
        "bound": comparison.bound.name,
        "error": comparison.error,
        "limit": comparison.bound.limit,
        "share": comparison.share,
        "fault": fault,
    }
    with open(path, "a", buffering=1) as file:
        file.write(json.dumps(entry) + "\n")
