"""One training step on a contrastive batch that is larger than what the towers can hold.

The gradient cache (Gao et al., 2021, arXiv:2101.06983): encode every micro-batch without a graph and keep only the
embeddings; evaluate the loss once over all of them; then encode each micro-batch again, with the same random state, and
back-propagate its cached embedding gradients. The result is the gradient of the whole batch, not of the micro-batches.

Scale. DeepSpeed averages parameter gradients over the W data-parallel ranks. The losses hand back feature gradients
that are already W times those of the global mean loss and, on every rank, the whole gradients of the scale and the
bias, so the surrogate is back-propagated as it is: no division by the number of micro-batches.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.data.batch import Batch
from megaclip.errors import NonFiniteError

ContrastiveLoss = Callable[..., torch.Tensor]  # (image features, text features, scale[, logit_bias]) -> loss


@dataclass(frozen=True)
class RandomState:
    """Where the random numbers of a step come from: arithmetic, so that replay and resume need no saved state."""

    seed: int
    step: int
    rank: int

    def enter(self, micro_batch: int) -> None:
        """Seed every device's generator for this micro-batch; calling it again replays the same numbers."""
        entropy = np.random.SeedSequence([self.seed, self.step, self.rank, micro_batch])
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1)))


@dataclass
class _Cached:
    """What the loss gave back for all micro-batches of this rank: gradients, each (micro_batch, D)."""

    image_gradients: Sequence[torch.Tensor]
    text_gradients: Sequence[torch.Tensor]
    scalar_gradients: Sequence[torch.Tensor]  # of the log scale and, if the model has one, the logit bias, each (1,)


def accumulate_gradients(
    engine: DeepSpeedEngine,
    loss_function: ContrastiveLoss,
    micro_batches: Sequence[Batch],
    log_scale: torch.Tensor,
    random_state: RandomState,
    *,
    logit_bias: torch.Tensor | None = None,
    coalesce: bool,
) -> float:
    """Leave the gradient of one whole contrastive batch in the engine, ready for `engine.step()`.

    Args:
        engine: a DeepSpeed engine around a `ClipModel`, with `gradient_accumulation_steps` = len(micro_batches).
        loss_function: (image features (b, D), text features (b, D), scale (1,), and logit_bias (1,) if the model has
            one) -> global mean loss, under the reduction contract of `megaclip.losses`; rows in the order of
            micro_batches. Whatever else a loss needs (sample ids, the epoch) is bound to it; parameters of its own
            receive their gradients.
        micro_batches: this rank's share of the batch, on any device; each is moved to the engine's device when encoded.
        log_scale: (1,) float32, the master value of logit_scale.
        random_state: replayed for each micro-batch.
        logit_bias: (1,) float32, the master value of logit_bias; needed exactly when the model has one.
        coalesce: reduce parameter gradients once, after the last micro-batch (ZeRO 1 to 3).

    Returns:
        the global mean loss, the same on every rank.

    Raises:
        NonFiniteError: the loss is infinite or NaN; nothing was back-propagated.
    """
    cached_in_graph = None
    if len(micro_batches) == 1:  # nothing to cache: the one forward keeps its graph
        random_state.enter(0)
        cached_in_graph = _encode(engine, micro_batches[0])
        embedded = [(cached_in_graph[0].detach(), cached_in_graph[1].detach())]
    else:
        embedded = _embed_without_graph(engine, micro_batches, random_state)
    scalars = [log_scale] if logit_bias is None else [log_scale, logit_bias]
    loss, cached = _loss_and_gradients(loss_function, embedded, scalars, random_state.step)
    del embedded

    last = len(micro_batches) - 1
    with engine.coalesce_grad_reduction() if coalesce else nullcontext():
        for index, batch in enumerate(micro_batches):
            if cached_in_graph is None:
                random_state.enter(index)
                outputs = _encode(engine, batch)
            else:
                outputs = cached_in_graph
            engine.set_gradient_accumulation_boundary(index == last)
            engine.backward(_surrogate(outputs, cached, index, is_last=index == last), scale_wrt_gas=False)
    engine.set_gradient_accumulation_boundary(True)  # coalesce_grad_reduction put the flag back as it was
    return loss


def _encode(engine: DeepSpeedEngine, batch: Batch) -> tuple[torch.Tensor, ...]:
    dtype = engine.get_data_types()[0]
    images = batch.images.to(engine.device, dtype, non_blocking=True)
    return engine(images, batch.tokens.to(engine.device, non_blocking=True))


@torch.no_grad()
def _embed_without_graph(
    engine: DeepSpeedEngine, micro_batches: Sequence[Batch], random_state: RandomState
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    embedded = []
    for index, batch in enumerate(micro_batches):
        random_state.enter(index)
        image_features, text_features, *_ = _encode(engine, batch)
        embedded.append((image_features, text_features))
    return embedded


def _loss_and_gradients(
    loss_function: ContrastiveLoss,
    embedded: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scalars: Sequence[torch.Tensor],
    step: int,
) -> tuple[float, _Cached]:
    image_features = torch.cat([images for images, _ in embedded]).requires_grad_()
    text_features = torch.cat([texts for _, texts in embedded]).requires_grad_()
    log_scale, *bias = leaves = [scalar.detach().clone().requires_grad_() for scalar in scalars]
    loss = loss_function(image_features, text_features, log_scale.exp(), *bias)
    value = float(loss.detach())
    if not np.isfinite(value):
        raise NonFiniteError(
            f"step {step}: the loss is {value} at logit scale {float(log_scale.exp()):.4g}; the update was not made. "
            "Lower the learning rate or lengthen --warmup, and resume from the last checkpoint"
        )
    loss.backward()  # not autograd.grad: a loss with parameters of its own finds their gradients in them
    image_gradient, text_gradient, *scalar_gradients = (_gradient(t) for t in (image_features, text_features, *leaves))
    sizes = [len(images) for images, _ in embedded]
    return value, _Cached(image_gradient.split(sizes), text_gradient.split(sizes), scalar_gradients)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None, "the loss depends on its features and scalars"
    return leaf.grad


def _surrogate(outputs: tuple[torch.Tensor, ...], cached: _Cached, index: int, *, is_last: bool) -> torch.Tensor:
    """A scalar whose gradient in the outputs is the cached gradient; those of scale and bias go in once, whole."""
    image_features, text_features, *scalars = outputs
    total = (image_features.float() * cached.image_gradients[index].float()).sum()
    total = total + (text_features.float() * cached.text_gradients[index].float()).sum()
    for scalar, gradient in zip(scalars, cached.scalar_gradients, strict=True):
        # Times zero, not left out: ZeRO expects the same parameters to take part in every backward pass.
        total = total + (scalar * (gradient if is_last else 0 * gradient)).sum()
    return total
