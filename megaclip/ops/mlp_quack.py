"""Matrix products of `megaclip.ops.mlp` whose epilogues compute the activation, its gradient and that of the bias.

They are products of quack-kernels (CuTe DSL) on Hopper. Each kind of epilogue is compiled once for all sizes, in a few
seconds, and kept on disk.

GELU's epilogues are our own, because CUDA's error function takes as long as the product itself. Formula 7.1.26 of
Abramowitz and Stegun (1964) is exact to 1.5e-7, and needs the exponential that the gradient needs too. Both
approximations of GELU are quack's.
"""

import functools
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir_helpers import math as mlir_math
from quack.activation import act_fn_map, dact_fn_map, relu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecLoad, RowVecReduce
from quack.gemm_config import GemmConfig
from torch import Tensor

# The fastest of the sizes tried, or within 2 % of it, for the MLPs of ViT-B/16, ViT-L/14 and SO400M on an H100.
_TILES = GemmConfig(tile_m=128, tile_n=128, cluster_m=1, cluster_n=2, pingpong=True, is_dynamic_persistent=False)
_APPROXIMATIONS = {"tanh": "gelu_tanh_approx", "quick": "quick_gelu"}


def _normal(z):
    """Return |z|, the probability that a normal variable exceeds it, and exp(-z^2 / 2)."""
    size = cute.math.absf(z)
    density = cute.math.exp2(z * z * -0.7213475204444817, fastmath=True)
    t = mlir_math.rcp(size * 0.2316418882 + 1.0, approx=True, ftz=True)
    tail = ((t * 0.5307027145 - 0.7265760135) * t + 0.7107068705) * t - 0.142248368
    return size, (tail * t + 0.127414796) * t * density, density


def _gelu(z):
    size, tail, _ = _normal(z)
    return relu(z) - size * tail


def _gelu_gradient(z, gradient):
    """Return the gradient of z and GELU of z, as the functions in quack's `dact_fn_map` do."""
    size, tail, density = _normal(z)
    slope = cutlass.select_(z > 0.0, 1.0 - tail, tail) + z * (density * 0.3989422804014327)
    return gradient * slope, relu(z) - size * tail


@functools.cache
def _products(kind: str) -> tuple[Any, Any]:
    """Return the product forward and the one backward."""
    name = _APPROXIMATIONS.get(kind, "")
    activation, gradient = act_fn_map.get(name, _gelu), dact_fn_map.get(name, _gelu_gradient)

    @gemm_epilogue(outputs=("hidden",), ops={"bias": RowVecLoad("bias")})
    def forward(acc, bias):
        z = acc + bias
        return {"D": z, "hidden": activation(z)}

    @gemm_epilogue(reduces={"sums": RowVecReduce("sums")})
    def backward(acc, c):
        dz, _ = gradient(c, acc)
        return {"D": dz, "sums": dz}

    return forward, backward


def linear_activation(x: Tensor, weight: Tensor, bias: Tensor, kind: str, keeps: bool) -> tuple[Tensor, Tensor]:
    """Return z = x weight^T + bias (m, H), empty unless `keeps`, and its activation (m, H).

    x: (m, C). weight: (H, C). bias: (H,). kind: see `megaclip.ops.mlp.activate`.
    """
    product, _ = _products(kind)
    out = product(x, weight.t(), config=_TILES, tuned=False, store_d=keeps, bias=bias.unsqueeze(0))
    return out["D"] if keeps else x.new_empty(0), out["hidden"]


def linear_activation_backward(gradient: Tensor, weight: Tensor, z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return dz = (gradient weight) * activation'(z) (m, H) and its column sums (H,), in the dtype of z.

    gradient: (m, C). weight: (C, H). z: (m, H).
    """
    _, product = _products(kind)
    out = product(gradient.contiguous(), weight, z, config=_TILES, tuned=False)
    return out["D"], out["sums"].to(z.dtype)
