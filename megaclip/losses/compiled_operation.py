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
from megaclip.losses.first_order import first_order
from megaclip.losses.id_order import needs_order
from megaclip.losses.sums import LossInputs, finish_gradients, saved
from megaclip.ops import rows
from megaclip.ops.types import accumulation_dtype

if TYPE_CHECKING:
    from megaclip.losses.batch_loss import SummedLoss


def _digest_of_source() -> str:
    """Return a digest of the files from which losses are traced: those of this folder and of ops."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.with_name("ops").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


_SOURCE = _digest_of_source()

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

    def run(
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        negatives: Tensor | None,
        ids: Tensor | None,
        negative_ids: Tensor | None,
        negative_rows: Tensor | None,
        weights: Tensor | None,
        settings: str,
        group: str,
        gradients: bool,
        source: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs = LossInputs(x, y, logit_scale, logit_bias, negatives, ids, negative_ids, negative_rows, weights)
        found = construct(settings).evaluate(inputs, ranks=named(group), gradients=gradients)
        nowhere = x.new_empty(0, dtype=torch.int64)
        # Ignored types: mypy does not know the length of a tuple with an unpacked generator.
        if not gradients:
            return found.loss, *(found.loss.new_empty(0) for _ in range(7)), nowhere  # type: ignore[return-value]
        # Results of an operation must not share memory with each other or with its arguments.
        loss, dx, dy, pull, *others, places = found
        copies = (other.to(x.device, copy=True) for other in others)
        return loss, dx, dy, pull, *copies, nowhere if places is None else places  # type: ignore[return-value]

    def fake(x: Tensor, y: Tensor, *others: Any) -> tuple[Tensor, ...]:
        negatives, gradients = others[2], others[-2]
        sums = x.new_empty((), dtype=accumulation_dtype(x))
        last = (0,) if negatives is None else negatives.shape
        shapes = (x.shape, y.shape, x.shape[:1], (), (), (), last) if gradients else ((0,),) * 7
        ordered = gradients and needs_order(LossInputs(x, y, *others[:7]), construct(others[7]).settings.ids)
        places = x.new_empty(x.shape[:1] if ordered else (0,), dtype=torch.int64)
        return sums, *(sums.new_empty(shape) for shape in shapes), places

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: len(LossInputs._fields)], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @first_order(loss_class.__name__)
    def backward(ctx: Any, d_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *finish_gradients(d_loss, *saved(d_loss, ctx), _finish_both), *(None,) * 4

    # Ranks exchange messages through their hosts, which a CUDA graph cannot repeat. Older versions of PyTorch lack the
    # tag.
    tags = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
    operation = torch.library.custom_op(f"megaclip::{name}", run, mutates_args=(), tags=tags)
    operation.register_fake(fake)
    operation.register_autograd(backward, setup_context=keep)
    return operation
