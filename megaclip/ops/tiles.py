"""Tile operations: sums over one block of the similarity matrix, from which all losses are built.

`tile_stats` returns the log-sum-exp of both directions from one matrix product. `tile_grads` returns the gradients of
both sides from one recomputation. `tile_sigmoid` returns loss and gradients of the sigmoid loss in one pass. All run on
one device, without autograd.

Positives are excluded from every tile. The losses add the positives' terms per row, because `1 - p_ii` would be lost if
`p_ii` were rounded to the precision of a tile.

This module checks the arguments, expands numbers to vectors and calls one of two implementations:

    tiles_torch    plain PyTorch, any device and dtype
    tiles_triton   Triton kernels for CUDA, and for Triton's interpreter on the CPU

Shapes: m rows, n columns, D embedding. `s_ij = <x_i, y_j>`.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger, log_once
from megaclip.ops.types import (
    DEFAULT_OPTIONS,
    FEATURE_DTYPES,
    Accumulators,
    Ids,
    Limits,
    Scalars,
    Terms,
    TermVectors,
    TileOptions,
    accumulation_dtype,
)

LOWEST_CAPABILITY = (8, 0)
"""The lowest compute capability of GPUs with hardware for the kernels' bfloat16 products."""

_logger = get_logger(__name__)


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    col_scale: Scalars,
    *,
    diagonal: int | None = None,
    ids: Ids | None = None,
    limits: Limits | None = None,
    options: TileOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Return `row_lse_i = log sum_j exp(row_scale_i*s_ij)` (m,) and `col_lse_j = log sum_i exp(col_scale_j*s_ij)` (n,).

    x (m, D), y (n, D): bfloat16, float16, float32 or float64, both of one dtype on one device.
    row_scale: a number or (m,). col_scale: a number or (n,).
    diagonal: the column of row 0's positive. Entries with `i + diagonal == j` are left out. The diagonal may be
        negative or lie outside the block. None leaves nothing out.
    ids: int64 ids of the rows (m,) and of the columns (n,), on the device of x; those of the columns ascend. Entries
        with equal ids are left out, and whole columns with the id `megaclip.ops.types.NO_NEGATIVE`. None leaves nothing
        out.
    limits: `megaclip.ops.types.Limits`. They run in PyTorch only.

    Results are float32, float64 for float64 features. An empty sum gives -inf.

    Raises ValueError for arguments that do not fit together.
    """
    dtype = _check_features(x, y, options, ids)
    run, more = _implementation(options, x, limits)
    row_scale = _vector(row_scale, "row_scale", x, dtype)
    col_scale = _vector(col_scale, "col_scale", y, dtype)
    with _plain_arithmetic(x):
        return run.tile_stats(x, y, row_scale, col_scale, diagonal=diagonal, ids=ids, options=options, **more)


def tile_grads(
    x: Tensor,
    y: Tensor,
    row: Terms,
    col: Terms,
    *,
    diagonal: int | None = None,
    ids: Ids | None = None,
    limits: Limits | None = None,
    values: tuple[Tensor, Tensor] | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    need_dots: bool = True,
    add_to: Accumulators = (None, None),
    options: TileOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx (m, D), dy (n, D), row_dot (m,) and col_dot (n,), float32 (float64 for float64 features).

    `P_ij = row.weight_i*exp(row.scale_i*s_ij - row.shift_i) + col.weight_j*exp(col.scale_j*s_ij - col.shift_j)`;
    `dx = P y`, `dy = P^T x`, `row_dot_i = sum_j (row part of P_ij)*s_ij`, `col_dot_j = sum_i (column part of
    P_ij)*s_ij`.

    x, y, diagonal, ids, limits, errors: as in `tile_stats`.
    row: numbers or (m,). col: numbers or (n,). A direction whose scale, shift and weight are 0 is left out.
    values: (m, C) and (n, C) of the features' dtype: `dx = P values[1]` (m, C) and `dy = P^T values[0]` (n, C). None: x
        and y.
    need_dx, need_dy: False saves the product of that side, which is then returned as None.
    need_dots: False saves the sums of both dots, which are then None. Their total is also `sum(x * dx)`.
    add_to: contiguous tensors with shape and dtype of dx and dy, which are added to them in place. They are returned.
        None allocates a new tensor.
    """
    dtype = _check_features(x, y, options, ids)
    _check_accumulators(add_to, *(values or (x, y)), dtype)
    run, more = _implementation(options, x, limits)
    row_vectors, col_vectors = _term_vectors(row, _ROW_NAMES, x, dtype), _term_vectors(col, _COL_NAMES, y, dtype)
    with _plain_arithmetic(x):
        return run.tile_grads(
            x,
            y,
            row_vectors,
            col_vectors,
            diagonal=diagonal,
            ids=ids,
            values=values,
            need_dx=need_dx,
            need_dy=need_dy,
            need_dots=need_dots,
            add_to=add_to,
            options=options,
            **more,
        )


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    diagonal: int | None = None,
    ids: Ids | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    add_to: Accumulators = (None, None),
    options: TileOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return row_loss (m,), dx (m, D), dy (n, D), row_dot (m,) and row_sum (m,) of the sigmoid loss's negatives.

    With `z_ij = scale*s_ij + bias` and `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`,
    `dy = P^T x`, `row_dot_i = sum_j P_ij*s_ij`, `row_sum_i = sum_j P_ij` (SigLIP, equation 1, without the positives
    and without the factor 1/B).

    scale, bias: numbers or tensors with one element. Everything else: as in `tile_grads`.
    """
    dtype = _check_features(x, y, options, ids)
    _check_accumulators(add_to, x, y, dtype)
    run, _ = _implementation(options, x)
    scale, bias = _vector(scale, "scale", x[:1], dtype), _vector(bias, "bias", x[:1], dtype)
    with _plain_arithmetic(x):
        return run.tile_sigmoid(
            x,
            y,
            scale,
            bias,
            diagonal=diagonal,
            ids=ids,
            need_dx=need_dx,
            need_dy=need_dy,
            add_to=add_to,
            options=options,
        )


def _plain_arithmetic(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Disable autograd and autocast. Each is disabled only if it is enabled, because disabling takes microseconds."""
    autocast = torch.is_autocast_enabled(x.device.type)
    if not autocast and not torch.is_grad_enabled():
        return contextlib.nullcontext()
    return _without_autograd(x.device.type, autocast)


@contextlib.contextmanager
def _without_autograd(device_type: str, autocast: bool) -> Iterator[None]:
    """Disable autograd, and if `autocast` that of the device type too."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if autocast else contextlib.nullcontext():
        yield


def _check_features(x: Tensor, y: Tensor, options: TileOptions, ids: Ids | None) -> torch.dtype:
    """Raise ValueError unless x and y can be multiplied with these options; return the dtype of the results."""
    for side, own_ids in zip((x, y), ids or (), strict=False):
        if own_ids.shape != side.shape[:1] or own_ids.dtype != torch.int64 or own_ids.device != side.device:
            raise ValueError(
                f"ids are {tuple(own_ids.shape)} {own_ids.dtype} on {own_ids.device}; expected ({len(side)},) "
                f"torch.int64 on {side.device}"
            )
    # On a GPU the comparison would wait for its work.
    if ids is not None and not ids[1].is_cuda and (ids[1][1:] < ids[1][:-1]).any():
        raise ValueError("the ids of the columns do not ascend; sort the columns by id")
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y have shapes {tuple(x.shape)} and {tuple(y.shape)}; expected (m, D) and (n, D)")
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"x is {x.dtype} on {x.device} and y is {y.dtype} on {y.device}; expected one dtype on one device"
        )
    if x.dtype not in FEATURE_DTYPES:
        raise ValueError(f"the features are {x.dtype}; expected bfloat16, float16, float32 or float64")
    if x.dtype == torch.float64 and options.precision != "auto":
        raise ValueError(f"precision is {options.precision!r}; float64 features require 'auto'")
    return accumulation_dtype(x)


def _check_accumulators(add_to: Accumulators, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the accumulators have the shape, dtype, device and layout of new results."""
    for total, features in zip(add_to, (x, y), strict=True):
        if total is None:
            continue
        if total.shape != features.shape or total.dtype != dtype or total.device != features.device:
            raise ValueError(
                f"an accumulator is {tuple(total.shape)} of {total.dtype} on {total.device}; expected "
                f"{tuple(features.shape)} of {dtype} on {features.device}"
            )
        if not total.is_contiguous():
            raise ValueError(f"an accumulator has strides {total.stride()}; expected a contiguous accumulator")


_ROW_NAMES = ("row.scale", "row.shift", "row.weight")
_COL_NAMES = ("col.scale", "col.shift", "col.weight")


def _term_vectors(terms: Terms, names: tuple[str, ...], features: Tensor, dtype: torch.dtype) -> TermVectors:
    return TermVectors(*(_vector(value, name, features, dtype) for value, name in zip(terms, names, strict=True)))


def _vector(value: Scalars, name: str, features: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as a vector in `dtype`, with one element per row of `features` on the same device.

    A single number is repeated with stride 0, which needs no kernel launch.
    """
    count = len(features)
    if not isinstance(value, Tensor):
        # Filled on the device, because a copy from the host would wait for the device.
        return features.new_full((1,), value, dtype=dtype).expand(count)
    vector = value.to(features.device, dtype).detach()
    if vector.numel() == 1:
        return vector.reshape(1).expand(count)
    if vector.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; expected a number or shape ({count},)")
    return vector.contiguous()


def implementation_for(options: TileOptions, x: Tensor) -> str:
    """Return "torch" or "triton", the implementation that runs for tensors like x."""
    return _automatic(x)[0] if options.implementation == "auto" else options.implementation


def require_implementation(
    implementation: str, device: torch.device, dtype: torch.dtype, setting: str = "implementation"
) -> None:
    """Raise ConfigError if `implementation` is "triton" and its kernels do not support features of a dtype on a device.

    setting: name of the setting, for the error.
    """
    if implementation != "triton":
        return
    problem = reason_without_kernels(device)
    if not problem and dtype == torch.float64:
        problem = "the features are float64, and the kernels accept bfloat16, float16 and float32"
    if problem:
        raise ConfigError(f"{setting} is 'triton', but {problem}; set it to 'auto' or 'torch'")


@functools.cache
def reason_without_kernels(device: torch.device) -> str:
    """Return why the Triton kernels cannot run on a device, or an empty string if they can."""
    try:
        kernels = importlib.import_module("megaclip.ops.tiles_triton")
    except ImportError as error:
        return f"the Triton kernels cannot be imported: {first_line(error)}"
    if device.type != "cuda":
        return "" if kernels.INTERPRETED else f"the Triton kernels require features on CUDA, not on {device.type}"
    if torch.version.hip:
        return "the Triton kernels require an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        return f"the Triton kernels require compute capability 8.0; this GPU has {capability[0]}.{capability[1]}"
    return ""


def _implementation(
    options: TileOptions, x: Tensor, limits: Limits | None = None
) -> tuple[ModuleType, dict[str, Limits]]:
    """Return the module that runs for tensors like x, and further arguments; log once which one it is and why."""
    require_implementation(options.implementation, x.device, x.dtype)
    name: str = options.implementation
    reason = "selected by the setting"
    if name == "auto":
        name, reason = _automatic(x)
    if limits is not None:
        if options.implementation == "triton":
            raise ConfigError("implementation is 'triton', and its kernels have no limits; set it to 'auto' or 'torch'")
        name, reason = "torch", "the kernels have no limits of similarities"
    log_once(_logger.info, f"tiles of logits run in {name} ({reason})")
    return importlib.import_module(f"megaclip.ops.tiles_{name}"), {} if limits is None else {"limits": limits}


def _automatic(x: Tensor) -> tuple[str, str]:
    """Return the implementation for tensors like x, and the reason for the log."""
    if not x.is_cuda:
        return "torch", f"features on {x.device.type}"
    if x.dtype == torch.float64:
        return "torch", "float64 features"
    if reason := reason_without_kernels(x.device):
        return "torch", reason
    return "triton", f"{x.dtype} features on CUDA"
