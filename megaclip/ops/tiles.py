"""Tiles of the similarity matrix: what every contrastive loss here is built from (one device, no ranks, no autograd).

`tile_stats` gives both directions' log-sum-exp from one product, `tile_grads` both sides' gradients from one
recomputation. Positives never enter a tile: their terms are done outside, per row, because `1 - p_ii` is lost when
`p_ii` is rounded. This module checks arguments, expands numbers to vectors, picks an implementation and calls it:

    tiles_torch    plain PyTorch, any device and dtype
    tiles_triton   kernels for CUDA (and Triton's interpreter); same functions, same arguments

Shapes: m rows, n columns, D embedding. `s_ij = <x_i, y_j>`.
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from megaclip.logging import get_logger, log_once

Scalars = float | Tensor  # a number, a 0-d or one-element tensor, or one value per row or per column
Accumulators = tuple[Tensor | None, Tensor | None]  # of dx and of dy

IMPLEMENTATIONS = ("auto", "torch", "triton")
PRECISIONS = ("auto", "float32", "tf32", "bf16")
FEATURE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_logger = get_logger(__name__)


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    col_scale: Scalars,
    *,
    diagonal: int | None = None,
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor]:
    """`row_lse_i = log sum_j exp(row_scale_i*s_ij)` (m,) and `col_lse_j = log sum_i exp(col_scale_j*s_ij)` (n,).

    x (m, D), y (n, D): one dtype of bfloat16, float16, float32, float64, one device. Results are float32, float64 for
    float64 features. An empty sum gives -inf.

    diagonal: the column, in this block, of local row 0's positive; entries with `i + diagonal == j` are left out. It
        may be negative or beyond the last column. None leaves nothing out.
    precision: how features are multiplied. "auto": as they are (float32 without TF32); "float32", "tf32", "bf16":
        rounded to that first. Sums are float32 in every case. float64 features allow "auto" only.
    implementation: "auto" (triton for CUDA tensors when it can be imported, else torch), "torch" or "triton".
    tile_budget_mib: MiB that the buffers of one tile of logits may take together.

    Raises ValueError for arguments that do not fit together.
    """
    dtype = _check_features(x, y, precision, tile_budget_mib)
    run = _implementation(implementation, x)
    row_scale = _vector(row_scale, "row_scale", x, dtype)
    col_scale = _vector(col_scale, "col_scale", y, dtype)
    with _plain_arithmetic(x):
        return run.tile_stats(
            x, y, row_scale, col_scale, diagonal=diagonal, precision=precision, tile_budget_mib=tile_budget_mib
        )


def tile_grads(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    row_shift: Scalars,
    row_weight: Scalars,
    col_scale: Scalars,
    col_shift: Scalars,
    col_weight: Scalars,
    *,
    diagonal: int | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    need_dots: bool = True,
    add_to: Accumulators = (None, None),
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """dx (m, D), dy (n, D), row_dot (m,), col_dot (n,) of one block, in float32 (float64 for float64 features).

    `P_ij = row_weight_i*exp(row_scale_i*s_ij - row_shift_i) + col_weight_j*exp(col_scale_j*s_ij - col_shift_j)`;
    `dx = P y`, `dy = P^T x`, `row_dot_i = sum_j (row part of P_ij)*s_ij`, `col_dot_j = sum_i (column part of
    P_ij)*s_ij`.

    Row values are numbers or (m,), column values numbers or (n,). To leave a direction out set its scale, shift and
    weight to 0. Everything else as in `tile_stats`.

    need_dx, need_dy: a side that is not needed costs no product and is returned as None.
    need_dots: False leaves the dots at zero and saves their sums; the total over both of them is also `sum(x * dx)`.
    add_to: accumulators (m, D) and (n, D) of results' dtype, contiguous, that dx and dy are added to in place and
        returned as; None makes a new one.
    """
    dtype = _check_features(x, y, precision, tile_budget_mib)
    _check_accumulators(add_to, x, y, dtype)
    run = _implementation(implementation, x)
    rows = [_vector(value, name, x, dtype) for name, value in _named("row", row_scale, row_shift, row_weight)]
    cols = [_vector(value, name, y, dtype) for name, value in _named("col", col_scale, col_shift, col_weight)]
    with _plain_arithmetic(x):
        return run.tile_grads(
            x,
            y,
            *rows,
            *cols,
            diagonal=diagonal,
            need_dx=need_dx,
            need_dy=need_dy,
            need_dots=need_dots,
            add_to=add_to,
            precision=precision,
            tile_budget_mib=tile_budget_mib,
        )


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    diagonal: int | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    add_to: Accumulators = (None, None),
    precision: str = "auto",
    implementation: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """row_loss (m,), dx (m, D), dy (n, D), row_dot (m,), row_sum (m,) of the sigmoid loss's negatives, in one pass.

    With `z_ij = scale*s_ij + bias` and `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`,
    `dy = P^T x`, `row_dot_i = sum_j P_ij*s_ij`, `row_sum_i = sum_j P_ij` (SigLIP, equation 1, without its positives
    and its factor 1/B). scale, bias: numbers or tensors of one element. need_dx, need_dy, add_to: as in `tile_grads`.
    Everything else as in `tile_stats`.
    """
    dtype = _check_features(x, y, precision, tile_budget_mib)
    _check_accumulators(add_to, x, y, dtype)
    run = _implementation(implementation, x)
    scale, bias = (_vector(value, name, x[:1], dtype) for value, name in ((scale, "scale"), (bias, "bias")))
    with _plain_arithmetic(x):
        return run.tile_sigmoid(
            x,
            y,
            scale,
            bias,
            diagonal=diagonal,
            need_dx=need_dx,
            need_dy=need_dy,
            add_to=add_to,
            precision=precision,
            tile_budget_mib=tile_budget_mib,
        )


@contextlib.contextmanager
def _plain_arithmetic(x: Tensor) -> Iterator[None]:
    """Without autograd and autocast (entering autocast takes microseconds: only where it is on)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        yield


def accumulation_dtype(features: Tensor) -> torch.dtype:
    """The dtype of sums over these features: float64 for float64, float32 for every other."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _named(side: str, scale: Scalars, shift: Scalars, weight: Scalars) -> list[tuple[str, Scalars]]:
    return [(f"{side}_scale", scale), (f"{side}_shift", shift), (f"{side}_weight", weight)]


def _check_features(x: Tensor, y: Tensor, precision: str, tile_budget_mib: float) -> torch.dtype:
    """Raise ValueError unless x and y can be multiplied as asked; return the dtype of the results."""
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"expected x (m, D) and y (n, D) with one D, got {tuple(x.shape)} and {tuple(y.shape)}")
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"expected x and y of one dtype on one device, got {x.dtype} on {x.device} and {y.dtype} on {y.device}"
        )
    if x.dtype not in FEATURE_DTYPES:
        raise ValueError(f"expected bfloat16, float16, float32 or float64 features, got {x.dtype}")
    if precision not in PRECISIONS:
        raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if x.dtype == torch.float64 and precision != "auto":
        raise ValueError(f"float64 features are multiplied in float64: precision must be 'auto', got {precision!r}")
    if tile_budget_mib <= 0:
        raise ValueError(f"expected a positive tile_budget_mib, got {tile_budget_mib}")
    return accumulation_dtype(x)


def _check_accumulators(add_to: Accumulators, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the accumulators have the shape, dtype, device and layout of new ones."""
    for total, features in zip(add_to, (x, y), strict=True):
        if total is None:
            continue
        if total.shape != features.shape or total.dtype != dtype or total.device != features.device:
            raise ValueError(
                f"expected an accumulator {tuple(features.shape)} of {dtype} on {features.device}, got "
                f"{tuple(total.shape)} of {total.dtype} on {total.device}"
            )
        if not total.is_contiguous():
            raise ValueError("expected a contiguous accumulator")


def _vector(value: Scalars, name: str, features: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as a vector, one element per row of `features`, in `dtype` on the same device.

    One number is repeated with stride 0, which costs no launch.
    """
    count = len(features)
    if not isinstance(value, Tensor):
        # Filled on the device: a copy to it would wait for it.
        return features.new_full((1,), value, dtype=dtype).expand(count)
    vector = torch.as_tensor(value, dtype=dtype, device=features.device).detach()
    if vector.numel() == 1:
        return vector.reshape(1).expand(count)
    if vector.shape != (count,):
        raise ValueError(f"expected {name} to be a number or of shape ({count},), got shape {tuple(vector.shape)}")
    return vector.contiguous()


def _implementation(name: str, x: Tensor) -> ModuleType:
    """The module that runs `name` for tensors like x; says once in the log which one that is, and why."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected implementation to be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    if name == "auto":
        name, reason = _automatic(x)
    else:
        reason = "as asked"
    log_once(_logger.info, f"logit tiles run in {name} ({reason})")
    return importlib.import_module(f"megaclip.ops.tiles_{name}")


def _automatic(x: Tensor) -> tuple[str, str]:
    if not x.is_cuda:
        return "torch", f"features on {x.device.type}"
    if x.dtype == torch.float64:
        return "torch", "float64 features"
    try:
        importlib.import_module("megaclip.ops.tiles_triton")
    except ImportError as error:
        return "torch", f"the Triton kernels cannot be imported: {error}"
    return "triton", f"{x.dtype} features on CUDA"
