"""A loss as one operation of a compiled graph: `torch.ops.megaclip.clip_loss` or `siglip_loss`, for `torch.compile`.

torch.compile cannot trace the look-up of process groups, the choice of exchange and reduction, or the messages of a
ring. So the loss adds a single operation to the compiled graph (`traced`). The operation runs the plain code when the
compiled graph runs: it looks up the group by its name and checks the features of all ranks.

The shapes of an operation's results must be known before it runs. So it returns the gradients' sums, as
`LossAndSums`, and not the columns of all ranks, which exist with one exchange only. Its backward pass finishes the
gradients and communicates nothing.

torch.compile traces that backward pass and caches the compiled code on disk, under a key made of the forward graph. So
a digest of the source is an argument of the operation. Without it, another version of MegaCLIP would run the cached
backward pass of this one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megaclip.comm.groups import named
from megaclip.losses.id_order import needs_order
from megaclip.losses.sums import LossInputs, finish_gradients, first_order
from megaclip.ops import rows
from megaclip.ops.types import accumulation_dtype

if TYPE_CHECKING:
    from megaclip.losses.batch_loss import SummedLoss


_FOLDER = Path(__file__).parent
_FILES = sorted([*_FOLDER.glob("*.py"), *_FOLDER.with_name("ops").glob("*.py")])
_SOURCE = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()[:16]
"""Digest of the files from which losses are traced: those of this folder and of ops."""
_SCHEMA = (
    "(Tensor x, Tensor y, Tensor logit_scale, Tensor? logit_bias, Tensor? negatives, Tensor? ids, Tensor? negative_ids,"
    " Tensor? negative_rows, Tensor? weights, str settings, str group, bool gradients, str source)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""Arguments of the operation of a loss, which begin with `LossInputs`, and its results: those of `LossAndSums`."""

_finish_both = torch.library.custom_op("megaclip::finish_gradients", rows.finish_gradients, mutates_args=())


@_finish_both.register_fake
def _(total_x: Tensor, total_y: Tensor, x: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dy = (torch.empty_like(features, memory_format=torch.contiguous_format) for features in (x, y))
    return dx, dy, total_x.new_empty(x.shape[:1])


def traced(loss: SummedLoss, inputs: LossInputs, gradients: bool) -> Tensor:
    """Return the loss () as one operation of the compiled graph that is being traced."""
    return loss.operation(*inputs, loss.settings_json, loss.group_name, gradients, _SOURCE)[0]


def register_loss(name: str, loss_class: type[SummedLoss]) -> Any:
    """Register `torch.ops.megaclip.NAME`, which computes a loss of this class, and return it."""

    @functools.cache
    def construct(settings: str) -> SummedLoss:
        return loss_class(**json.loads(settings))

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, settings, group, gradients, _ = arguments
        inputs = LossInputs(*tensors)
        found = construct(settings).evaluate(inputs, ranks=named(group), gradients=gradients)
        nowhere = inputs.x.new_empty(0, dtype=torch.int64)
        if not gradients:
            return found.loss, *(found.loss.new_empty(0) for _ in range(7)), nowhere
        # Results of an operation must not share memory with each other or with its arguments.
        loss, dx, dy, pull, *others, places = found
        copies = (other.to(inputs.x.device, copy=True) for other in others)
        return loss, dx, dy, pull, *copies, nowhere if places is None else places

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, settings, _, gradients, _ = arguments
        inputs = LossInputs(*tensors)
        x, y, negatives = inputs.x, inputs.y, inputs.negatives
        sums = x.new_empty((), dtype=accumulation_dtype(x))
        last = (0,) if negatives is None else negatives.shape
        shapes = (x.shape, y.shape, x.shape[:1], (), (), (), last) if gradients else ((0,),) * 7
        ordered = gradients and needs_order(inputs, construct(settings).settings.ids)
        places = x.new_empty(x.shape[:1] if ordered else (0,), dtype=torch.int64)
        return sums, *(sums.new_empty(shape) for shape in shapes), places

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.loss = loss_class.__name__
        ctx.save_for_backward(*inputs[: len(LossInputs._fields)], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @first_order
    def backward(ctx: Any, d_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *finish_gradients(d_loss, ctx, _finish_both), *(None,) * 4

    # Ranks exchange messages through their hosts, which a CUDA graph cannot repeat. Older versions of PyTorch lack the
    # tag.
    tags = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
    operation = torch.library.custom_op(f"megaclip::{name}", run, mutates_args=(), schema=_SCHEMA, tags=tags)
    operation.register_fake(fake)
    operation.register_autograd(backward, setup_context=keep)
    return operation
