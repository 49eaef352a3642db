"""An MLP with GELU for compiled towers on Hopper, with fewer passes over memory than PyTorch's compiler makes.

The compiler runs each matrix product alone. Then it reads and writes the hidden layer for GELU, reads two tensors and
writes one of that size for GELU's gradient, and reads that again for the gradient of the bias. The products of the
package quack-kernels do all this themselves (`mlp_quack.py`). Without the package, on other GPUs, in float32, in
evaluations and in what is not compiled, PyTorch's own operations run.

Shapes: m tokens, C width, H hidden width.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

_HOPPER = (9, 0)
_PRODUCTS = "megaclip.ops.mlp_quack"


def has_mlp(device: torch.device, dtype: torch.dtype, hidden_width: int, width: int) -> bool:
    """Return whether `mlp` runs for tensors of this kind; log the reason if it could run with another package."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or hidden_width % 8 or width % 8:  # the products require 16 bytes
        return False
    if torch.version.hip or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    try:
        importlib.import_module(_PRODUCTS)
    except ImportError as error:
        reason = f"quack-kernels cannot be imported ({first_line(error)}); run  pip install 'megaclip[hopper]'"
        log_once(_logger.info, f"compiled MLPs take more time than necessary on this GPU, because {reason}")
        return False
    log_once(_logger.info, "compiled MLPs: the products of quack-kernels compute the activation")
    return True


def mlp(x: Tensor, first: nn.Linear, second: nn.Linear, kind: str) -> Tensor:
    """Return two linear layers C -> H -> C with an activation function between them: (.., C) in, (.., C) out.

    first, second: with biases. kind: see `activate`.
    """
    recomputes = not torch._functorch.config.ban_recompute_materialized_backward  # as `compiled_class` sets it
    parameters = first.weight, first.bias, second.weight, second.bias
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters))
    keeps = (1 if recomputes else 2) if has_graph else 0
    return _forward(x.flatten(0, -2), *parameters, kind, keeps)[0].unflatten(0, x.shape[:-1])


def activate(z: Tensor, kind: str) -> Tensor:
    """Return the activation of z, of the same shape.

    kind: "none" or "tanh", the names of `nn.GELU`, or "quick", OpenAI's x * sigmoid(1.702 x).
    """
    return z * torch.sigmoid(1.702 * z) if kind == "quick" else F.gelu(z, approximate=kind)


@torch.library.custom_op("megaclip::mlp", mutates_args=())
def _forward(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kind: str, keeps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (m, C), z = x w1^T + b1 (m, H), and its activation (m, H).

    The last two are for the backward pass: empty for `keeps` 0; for 1, only the last is empty.
    """
    if x.is_cuda:
        z, hidden = _product("linear_activation", x, w1, b1, kind, keeps > 0)
    else:
        z = torch.addmm(b1, x, w1.t())
        hidden = activate(z, kind)
    out = torch.addmm(b2, hidden, w2.t())  # DeepSpeed replaces F.linear in the whole process at ZeRO-3
    return out, z if keeps > 0 else z.new_empty(0), hidden if keeps > 1 else z.new_empty(0)


@_forward.register_fake
def _(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kind: str, keeps: int
) -> tuple[Tensor, Tensor, Tensor]:
    z, hidden = (x.new_empty((len(x), len(w1)) if keeps > least else 0) for least in (0, 1))
    return x.new_empty(len(x), len(w2)), z, hidden


@torch.library.custom_op("megaclip::mlp_backward", mutates_args=())
def _backward(gradient: Tensor, w2: Tensor, z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of z (m, H) and of the first bias (H,) from that of the output (m, C)."""
    if z.is_cuda:
        return _product("linear_activation_backward", gradient, w2, z, kind)
    through = gradient @ w2
    if kind == "quick":
        s = torch.sigmoid(1.702 * z)
        dz = through * (s + 1.702 * z * s * (1 - s))
    else:
        dz = torch.ops.aten.gelu_backward(through, z, approximate=kind)
    return dz, dz.sum(0)


@_backward.register_fake
def _(gradient: Tensor, w2: Tensor, z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), z.new_empty(z.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w1, _, w2, _, ctx.kind, ctx.keeps = inputs
    ctx.save_for_backward(x, w1, w2, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, w1, w2, z, hidden = ctx.saved_tensors
    dz, db1 = _backward(gradient, w2, z, ctx.kind)
    if ctx.keeps == 1:
        hidden = activate(z, ctx.kind)
    return dz @ w1, dz.t() @ x, db1, gradient.t() @ hidden, gradient.sum(0), None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _product(name: str, *arguments: Any) -> Any:
    """Return what a function of `mlp_quack.py` returns. Raises ConfigError if its kernel cannot be compiled or run."""
    try:
        return getattr(importlib.import_module(_PRODUCTS), name)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler of CuTe DSL, CUDA or the folder of compiled kernels
        raise ConfigError(
            f"quack-kernels cannot compute an MLP: {type(error).__name__}: {first_line(error)}; mend its installation, "
            "or run  pip uninstall quack-kernels"
        ) from error
