"""Triton kernels of `attention.py`: each program handles a block of rows of one head and streams over the other side.

The backward pass takes two kernels without atomic additions: one for the gradient of the queries, and one for those of
keys and values, which computes the probabilities once more. So results do not depend on the order of programs.

Shapes: b batch, L tokens, H heads, K channels per head. A tensor (b, L, H, K) is contiguous. Log-sum-exps have base 2.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALL = 32  # tokens that one program with two warps handles
_STAGES = 3  # blocks that are copied to shared memory ahead of the products
_QUERY_REGISTERS = 96  # per thread, so that a multiprocessor of a Hopper GPU has room for five programs instead of four


@triton.jit
def _load_rows(ptr, rows, count, stride, K: tl.constexpr):
    """Return rows (R, K) of one head, with 0 from row `count` on. count: None if all rows exist."""
    places = ptr + rows[:, None] * stride + tl.arange(0, K)[None, :]
    return tl.load(places) if count is None else tl.load(places, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def _store_rows(ptr, values, rows, count, stride, K: tl.constexpr):
    places = ptr + rows[:, None] * stride + tl.arange(0, K)[None, :]
    tl.store(places, values.to(ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _place(count, heads, K: tl.constexpr, ROWS: tl.constexpr):
    """Return the index of this program's head over the whole batch, where its first token is, and its rows (ROWS,)."""
    blocks = tl.cdiv(count, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    start = head // heads * count * heads * K + head % heads * K
    return head, start, tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)


@triton.jit
def _hide(values, rows, cols, count, hidden: tl.constexpr, CAUSAL: tl.constexpr):
    """Return values (R, C) with `hidden` where query `rows` does not attend to key `cols`."""
    if CAUSAL:
        values = tl.where(cols[None, :] <= rows[:, None], values, hidden)
    return values if count is None else tl.where((cols < count)[None, :], values, hidden)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, first, count, highest, total, out, rows, scale, stride, C: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the running maximum, sum and unnormalized output after the C keys from the first one."""
    K: tl.constexpr = q.shape[1]
    cols = first + tl.arange(0, C)
    k = _load_rows(k_ptr, cols, count, stride, K)
    v = _load_rows(v_ptr, cols, count, stride, K)
    s = _hide(tl.dot(q, tl.trans(k)), rows, cols, count, float("-inf"), CAUSAL)
    higher = tl.maximum(highest, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - higher[:, None])
    shrink = tl.exp2(highest - higher)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    return higher, total * shrink + tl.sum(p, 1), out


@triton.jit(do_not_specialize=["count", "heads"])
def _forward_kernel(
    q_ptr,  # in: (b, L, H, K)
    k_ptr,  # in: (b, L, H, K)
    v_ptr,  # in: (b, L, H, K)
    out_ptr,  # out: (b, L, H, K)
    lse_ptr,  # out: (b, H, L) float32
    count,
    heads,
    scale,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute softmax(scale q k^T) v, with a scale for base 2. count: L. LAST: size of the last block of keys."""
    head, start, rows = _place(count, heads, K, ROWS)
    stride = heads * K
    q = _load_rows(q_ptr + start, rows, count, stride, K)
    k_ptr += start
    v_ptr += start
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, K), tl.float32)
    last = (count - 1) // COLS * COLS
    for first in tl.range(0, last, COLS, num_stages=STAGES):
        highest, total, out = _attend(
            q, k_ptr, v_ptr, first, None, highest, total, out, rows, scale, stride, COLS, CAUSAL
        )
    highest, total, out = _attend(q, k_ptr, v_ptr, last, count, highest, total, out, rows, scale, stride, LAST, CAUSAL)
    _store_rows(out_ptr + start, out / total[:, None], rows, count, stride, K)
    tl.store(lse_ptr + head * count + rows, highest + tl.log2(total), mask=rows < count)


@triton.jit
def _add_query_gradient(
    q, grad, k_ptr, v_ptr, first, count, dq, lse, delta, rows, scale, stride, C: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return dq plus the part of the C keys from the first one."""
    K: tl.constexpr = q.shape[1]
    cols = first + tl.arange(0, C)
    k = _load_rows(k_ptr, cols, count, stride, K)
    v = _load_rows(v_ptr, cols, count, stride, K)
    p = _hide(tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), rows, cols, count, 0.0, CAUSAL)
    ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["count", "heads"])
def _query_gradient_kernel(
    q_ptr,  # in: (b, L, H, K)
    k_ptr,  # in: (b, L, H, K)
    v_ptr,  # in: (b, L, H, K)
    out_ptr,  # in: (b, L, H, K)
    lse_ptr,  # in: (b, H, L) float32
    grad_ptr,  # in: (b, L, H, K) gradient of the output
    delta_ptr,  # out: (b, H, L) float32, the products of output and gradient
    dq_ptr,  # out: (b, L, H, K)
    count,
    heads,
    scale,
    factor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradient of the queries. factor: K ** -0.5; the other arguments as in the forward pass."""
    head, start, rows = _place(count, heads, K, ROWS)
    stride = heads * K
    q = _load_rows(q_ptr + start, rows, count, stride, K)
    grad = _load_rows(grad_ptr + start, rows, count, stride, K)
    delta = tl.sum(_load_rows(out_ptr + start, rows, count, stride, K).to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * count + rows, delta, mask=rows < count)
    lse = tl.load(lse_ptr + head * count + rows, mask=rows < count, other=0.0)
    k_ptr += start
    v_ptr += start
    dq = tl.zeros((ROWS, K), tl.float32)
    last = (count - 1) // COLS * COLS
    for first in tl.range(0, last, COLS, num_stages=STAGES):
        dq = _add_query_gradient(q, grad, k_ptr, v_ptr, first, None, dq, lse, delta, rows, scale, stride, COLS, CAUSAL)
    dq = _add_query_gradient(q, grad, k_ptr, v_ptr, last, count, dq, lse, delta, rows, scale, stride, LAST, CAUSAL)
    _store_rows(dq_ptr + start, dq * factor, rows, count, stride, K)


@triton.jit
def _add_key_value_gradients(
    k,
    v,
    q_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    first,
    count,
    dk,
    dv,
    cols,
    scale,
    stride,
    C: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return dk and dv of the keys `cols` plus the parts of the C queries from the first one. p is transposed."""
    K: tl.constexpr = k.shape[1]
    rows = first + tl.arange(0, C)
    q = _load_rows(q_ptr, rows, count, stride, K)
    grad = _load_rows(grad_ptr, rows, count, stride, K)
    if count is None:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    else:
        lse = tl.load(lse_ptr + rows, mask=rows < count, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < count, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if CAUSAL:
        p = tl.where(cols[:, None] <= rows[None, :], p, 0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv)
    ds = p * (tl.dot(v, tl.trans(grad)) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit(do_not_specialize=["count", "heads"])
def _key_value_gradients_kernel(
    q_ptr,  # in: (b, L, H, K)
    k_ptr,  # in: (b, L, H, K)
    v_ptr,  # in: (b, L, H, K)
    lse_ptr,  # in: (b, H, L) float32
    grad_ptr,  # in: (b, L, H, K) gradient of the output
    delta_ptr,  # in: (b, H, L) float32
    dk_ptr,  # out: (b, L, H, K)
    dv_ptr,  # out: (b, L, H, K)
    count,
    heads,
    scale,
    factor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradients of keys and values. ROWS: of keys. COLS and LAST: sizes of blocks of queries."""
    head, start, cols = _place(count, heads, K, ROWS)
    stride = heads * K
    k = _load_rows(k_ptr + start, cols, count, stride, K)
    v = _load_rows(v_ptr + start, cols, count, stride, K)
    q_ptr += start
    grad_ptr += start
    lse_ptr += head * count
    delta_ptr += head * count
    dk = tl.zeros((ROWS, K), tl.float32)
    dv = tl.zeros((ROWS, K), tl.float32)
    last = (count - 1) // COLS * COLS
    for first in tl.range(0, last, COLS, num_stages=STAGES):
        dk, dv = _add_key_value_gradients(
            k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, first, None, dk, dv, cols, scale, stride, COLS, CAUSAL
        )
    dk, dv = _add_key_value_gradients(
        k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, last, count, dk, dv, cols, scale, stride, LAST, CAUSAL
    )
    _store_rows(dk_ptr + start, dk * factor, cols, count, stride, K)
    _store_rows(dv_ptr + start, dv, cols, count, stride, K)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (b, L, H, K), and the log-sum-exps (b, H, L) in float32."""
    b, tokens, heads, _ = q.shape
    out, lse = torch.empty_like(q), q.new_empty((b, heads, tokens), dtype=torch.float32)
    _launch(_forward_kernel, (q, k, v, out, lse), causal)
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from that of the output, all (b, L, H, K)."""
    (dq, dk, dv), delta = (torch.empty_like(q) for _ in range(3)), torch.empty_like(lse)
    factor = q.shape[3] ** -0.5
    registers = {"maxnreg": _QUERY_REGISTERS} if q.shape[1] > _SMALL else {}
    _launch(_query_gradient_kernel, (q, k, v, out, lse, gradient, delta, dq), causal, factor, **registers)
    _launch(_key_value_gradients_kernel, (q, k, v, lse, gradient, delta, dk, dv), causal, factor)
    return dq, dk, dv


def _launch(kernel: Any, tensors: tuple[Tensor, ...], causal: bool, *factor: float, **options: int) -> None:
    """Run a kernel with the fastest sizes of those that were measured on an H100 for 16 to 257 tokens."""
    b, tokens, heads, channels = tensors[0].shape
    rows = 32 if tokens <= _SMALL else 64
    sizes = {"ROWS": rows, "COLS": 32, "LAST": 16 if (tokens - 1) % 32 < 16 else 32, "K": channels}
    options |= {"CAUSAL": causal, "STAGES": _STAGES, "num_warps": rows // 16}
    scale = channels**-0.5 / math.log(2)
    kernel[(b * heads * -(-tokens // rows),)](*tensors, tokens, heads, scale, *factor, **sizes, **options)
