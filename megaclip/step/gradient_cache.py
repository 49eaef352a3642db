"""Compute the gradient of a contrastive batch that is too large for one forward pass of the towers.

The gradient cache (Gao et al., 2021, arXiv:2101.06983) has three parts:

1. Encode every chunk. Keep the embeddings of all chunks, and the graphs of some (`KeptGraphs`).
2. Evaluate the loss once over all embeddings, and cache its gradients with respect to them.
3. Back-propagate each chunk's surrogate: the inner product of the chunk's embeddings and their cached gradients. The
   kept graphs come first. The other chunks are then encoded again, with the same random state.

The result is the gradient of the whole batch, not of the chunks. It does not depend on the graphs that are kept. One
tower runs after the other, so a step without kept graphs holds the activations of one chunk in one tower only. A tower
without trainable parameters runs once.

Batch norms normalise a chunk by its own mean and deviation, in both encodings. Their running statistics change once per
chunk, in the first encoding. At the end of the step they are averaged over the ranks, so they are equal on every rank.

Scale. DeepSpeed averages parameter gradients over the W data-parallel ranks. The losses therefore return feature
gradients that are W times those of the global mean loss. They return the whole gradients of the scale and the bias on
every rank. So the surrogate is not divided by the number of chunks.

Shapes: b rows of this rank, D embedding.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from megaclip.comm.collectives import average_over_ranks
from megaclip.devices import upload
from megaclip.errors import NonFiniteError
from megaclip.models import DualEncoder
from megaclip.step.batch import StepBatch, Tower
from megaclip.step.gradient_sums import GradientSums
from megaclip.step.layout import KeptGraphs, encodes_together, kept_graphs
from megaclip.step.running_statistics import restored, running_statistics
from megaclip.zero.backward import gradients_to_come, resume_backward
from megaclip.zero.gathered_tower import GatheredTower

ContrastiveLoss = Callable[..., Tensor]  # (image features, text features, scale[, logit_bias]) -> loss


@dataclass(frozen=True)
class RandomState:
    """Seeds of a step's random numbers, calculated from the step number. Replay and resume need no saved state."""

    seed: int
    step: int
    rank: int

    def reseed(self, tower: Tower, chunk: int) -> None:
        """Seed every device's generator for this chunk of a tower; a second call replays the same numbers."""
        entropy = np.random.SeedSequence([self.seed, self.step, self.rank, int(tower), chunk])
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1)))


def trained_towers(model: DualEncoder) -> list[Tower]:
    """Return the towers with trainable parameters."""
    return [tower for tower, module in _modules(model).items() if any(p.requires_grad for p in module.parameters())]


def _modules(model: DualEncoder) -> dict[Tower, nn.Module]:
    return {Tower.IMAGE: model.visual, Tower.TEXT: model.text}


def accumulate_gradients(
    engine: DeepSpeedEngine,
    loss_function: ContrastiveLoss,
    batch: StepBatch,
    log_scale: Tensor,
    random_state: RandomState,
    *,
    logit_bias: Tensor | None = None,
    coalesce: bool,
    kept: KeptGraphs | None = None,
    accumulation_dtype: torch.dtype = torch.float32,
    embeddings_on_cpu: bool = False,
    check_loss: Callable[[], None] = lambda: None,
) -> Tensor:
    """Leave the gradient of one whole contrastive batch in the engine, ready for `engine.step()`.

    If the loss is infinite or NaN, all gradients become NaN, and `megaclip.zero.optimizers.update` refuses them. On a
    GPU this function only queues work. The host never waits for the GPU, so that the GPU never waits for the host.

    Args:
        engine: a DeepSpeed engine around a `DualEncoder`.
        loss_function: (image features (b, D), text features (b, D), scale (1,), and logit_bias (1,) if the model has
            one) -> global mean loss, under the reduction contract of `megaclip.losses`; rows in the order of the batch.
            Other arguments of a loss (sample ids, the epoch) are bound to it. Gradients of the loss's own parameters
            accumulate in these parameters.
        batch: this rank's share of the batch, in as many chunks per tower as on every other rank.
        log_scale: (1,) float32, the master value of logit_scale.
        random_state: seeds of this step, replayed for each chunk.
        logit_bias: (1,) float32, the master value of logit_bias; None if the model has none.
        coalesce: reduce parameter gradients once, after the last chunk (ZeRO 1 to 3).
        kept: chunks whose graphs are kept, the same on every rank. None: those of megaclip.keep_graphs 0.
        accumulation_dtype: dtype in which coalesced gradients add up over chunks, before they are rounded.
        embeddings_on_cpu: keep embeddings and their gradients in host memory while the towers run.
        check_loss: called after the loss's own backward pass; raises NonFiniteError, on every rank, if the update of
            the loss's own parameters and state would not be finite.

    Returns:
        the global mean loss, () on the engine's device, the same on every rank.

    Raises:
        NonFiniteError: `check_loss` raised; nothing was back-propagated to the towers.
        DataError: the data of a rank failed; the caller must not update.
    """
    embeddings_device = torch.device("cpu") if embeddings_on_cpu else engine.device
    gathered = GatheredTower(engine, _modules(engine.module).values())
    passes = _Passes(engine, batch, random_state, kept, coalesce, embeddings_device, gathered)
    with gathered.kept():
        features = passes.embed()
    batch.agree()
    scalars = [log_scale] if logit_bias is None else [log_scale, logit_bias]
    orders = {tower: batch.order(tower) for tower in Tower}
    loss, cached = _loss_and_gradients(
        loss_function, features, orders, scalars, engine.device, random_state.step, check_loss
    )
    statistics = running_statistics(engine.module)
    with engine.coalesce_grad_reduction() if coalesce else nullcontext(), restored(statistics), gathered.kept():
        sums = GradientSums(engine.module, accumulation_dtype) if coalesce and passes.count > 1 else None
        passes.back_propagate(cached, sums)
    engine.set_gradient_accumulation_boundary(True)  # coalesce_grad_reduction has restored the flag
    average_over_ranks(statistics)
    if passes.read_again:
        batch.agree()
    return loss


@dataclass
class _Cached:
    """Gradients of the loss for this rank's whole share of the batch."""

    features: dict[Tower, Tensor]
    """Gradients of the features by tower, (b, D), in the order of the chunks, on the device that keeps embeddings."""
    scalars: Sequence[Tensor]
    """Gradients of the log scale and, if the model has one, of the logit bias, each (1,)."""


_Outputs = tuple[Tensor | None, ...]  # features by tower, then the scalars, as `DualEncoder.forward` returns them


class _Pass(NamedTuple):
    """Chunks that one forward pass encodes and one backward pass back-propagates."""

    towers: tuple[Tower, ...]
    """One tower, or both if each has one chunk."""
    chunk: int


class _Graph(NamedTuple):
    """The outputs of a forward pass whose graph is kept."""

    outputs: _Outputs
    gradients_to_come: dict[nn.Module, int]
    """ZeRO-3's count of input gradients that each module waits for before it frees its parameters."""


class _Passes:
    """The passes over the towers: encode all chunks, back-propagate the kept graphs, encode the other chunks again.

    A tower's gradients accumulate in the order of its chunks. This order does not depend on which graphs are kept.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        batch: StepBatch,
        random_state: RandomState,
        kept: KeptGraphs | None,
        coalesce: bool,
        embeddings_device: torch.device,
        gathered: GatheredTower,
    ) -> None:
        self._engine, self._batch, self._random_state = engine, batch, random_state
        self._embeddings_device = embeddings_device
        self._gathered = gathered
        self._trained = trained_towers(engine.module)
        chunks = [batch.chunk_count(tower) for tower in Tower]
        is_trained = [tower in self._trained for tower in Tower]
        self._kept = kept or kept_graphs(0, chunks, is_trained)
        assert all(kept <= count for kept, count in zip(self._kept, chunks, strict=True)), (self._kept, chunks)
        self._graphs: dict[_Pass, _Graph] = {}
        self._forward_order = _forward_order(chunks, is_trained)
        self._trained_order = [towers for towers in self._forward_order if towers[0] in self._trained]
        # The graphs of the text tower, which are smaller, are the first to be back-propagated.
        self._kept_passes = [
            _Pass(towers, index) for towers in reversed(self._trained_order) for index in range(self._kept[towers[0]])
        ]
        self._repeated_passes = [
            _Pass(towers, index)
            for towers in self._trained_order
            for index in range(self._kept[towers[0]], chunks[towers[0]])
        ]
        self._backward_order = self._kept_passes + self._repeated_passes
        self._with_other_tower = self._passes_with_both_towers(coalesce)

    @property
    def count(self) -> int:
        """Number of backward passes."""
        return max(1, len(self._backward_order))

    @property
    def read_again(self) -> bool:
        """True if some chunks are read for the second time, on every rank."""
        return bool(self._repeated_passes)

    def _passes_with_both_towers(self, coalesce: bool) -> set[_Pass]:
        """Return the passes over one tower that include the other tower, with one blank row and a gradient of zero.

        DeepSpeed overwrites the last step's gradients in a step's first backward pass (stage 3, offload) and copies the
        sums to the host in its last one (offload), but only for parameters that take part in that pass.
        """
        if coalesce or len(self._trained) < 2 or self.count == 1:
            return set()
        first, last = self._backward_order[0], self._backward_order[-1]
        if self._engine.zero_offload_optimizer() is not None:
            return {first, last}
        return {first} if self._engine.zero_optimization_stage() == 3 else set()

    def embed(self) -> dict[Tower, Tensor]:
        """Encode every chunk; return the features, (b, D) per tower, in the order of the chunks."""
        features: dict[Tower, Tensor] = {}
        for towers in self._forward_order:
            for index, inputs in enumerate(self._inputs(towers, again=False)):
                this_pass, keeps = _Pass(towers, index), index < self._kept[towers[0]]
                outputs = self._forward(this_pass, inputs, with_graph=keeps)
                for tower in towers:
                    self._store(features, tower, index, outputs[tower])
                if keeps:
                    self._graphs[this_pass] = _Graph(outputs, gradients_to_come(self._engine.module))
        return features

    def back_propagate(self, cached: _Cached, sums: GradientSums | None) -> None:
        """Back-propagate the cached gradients of features and scalars; leave the parameters' gradients in the engine.

        sums: sums of gradients, if DeepSpeed reduces them after the last chunk only. None: it reduces each chunk's
        gradients.
        """
        if not self._trained:
            self._backward(self._engine(None, None), {}, cached.scalars)
            return
        for this_pass, outputs in self._outputs():
            is_last = this_pass == self._backward_order[-1]
            # The gradient is multiplied by zero, not left out: ZeRO expects the same parameters in every backward pass.
            scalars = cached.scalars if is_last else [0 * gradient for gradient in cached.scalars]
            gradients = {
                tower: cached.features[tower][self._rows(tower, this_pass.chunk)] for tower in this_pass.towers
            }
            self._backward(outputs, gradients, scalars, is_last=is_last)
            del outputs  # frees the rest of their graph before the next one is built
            if sums is not None:
                sums.add()
        if sums is not None:
            sums.write_back()

    def _outputs(self) -> Iterator[tuple[_Pass, _Outputs]]:
        """Yield each pass of the backward order with the outputs of its graph."""
        for this_pass in self._kept_passes:
            self._gather(this_pass)
            graph = self._graphs.pop(this_pass)
            resume_backward(self._engine, graph.gradients_to_come)
            yield this_pass, graph.outputs
        for towers in self._trained_order:
            for index, inputs in enumerate(self._inputs(towers, again=True), start=self._kept[towers[0]]):
                this_pass = _Pass(towers, index)
                yield this_pass, self._forward(this_pass, inputs, with_graph=True)

    def _backward(
        self,
        outputs: _Outputs,
        gradients: dict[Tower, Tensor],
        scalar_gradients: Sequence[Tensor],
        *,
        is_last: bool = True,
    ) -> None:
        """Back-propagate a scalar whose gradient with respect to the model's outputs is the cached gradient."""
        features, scalars = outputs[: len(Tower)], outputs[len(Tower) :]
        surrogate = torch.zeros((), device=self._engine.device)
        for tower in Tower:
            output = features[tower]
            if output is None:
                continue
            wide = torch.promote_types(output.dtype, torch.float32)
            gradient = gradients[tower].to(output.device, non_blocking=True).to(wide) if tower in gradients else 0.0
            surrogate = surrogate + (output.to(wide) * gradient).sum()
        for scalar, gradient in zip(scalars, scalar_gradients, strict=True):
            assert scalar is not None, "the model returns its scalars"
            surrogate = surrogate + (scalar * gradient).sum()
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(surrogate, scale_wrt_gas=False)

    def _inputs(self, towers: tuple[Tower, ...], *, again: bool) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of the chunks that these towers encode together, one tensor per tower.

        again: as for `StepBatch.chunks`. A tower that is not trained reads each chunk once.
        """
        read_once = self._kept[towers[0]] if towers[0] in self._trained else self._batch.chunk_count(towers[0])
        return zip(*(self._batch.chunks(tower, read_once=read_once, again=again) for tower in towers), strict=True)

    def _forward(self, this_pass: _Pass, inputs: Sequence[Tensor], *, with_graph: bool) -> _Outputs:
        """Encode chunks with their random numbers.

        The model runs the image tower first and then calls `before_text`. So a tower draws the same numbers whether or
        not the other tower runs in this pass. Blank rows do not change running statistics.
        """
        model: DualEncoder = self._engine.module
        self._gather(this_pass)
        self._random_state.reseed(this_pass.towers[0], this_pass.chunk)
        model.before_text = functools.partial(self._random_state.reseed, Tower.TEXT, this_pass.chunk)
        by_tower = dict(zip(this_pass.towers, inputs, strict=True))
        pieces = self._batch.pieces(this_pass.chunk) if Tower.TEXT in by_tower else None
        unchanged: list[Tensor] = []
        if with_graph and this_pass in self._with_other_tower:
            other = Tower(1 - this_pass.towers[0])
            by_tower[other] = model.blank(self._batch.blank(other))
            unchanged = model.statistics(_modules(model)[other])
        try:
            with torch.set_grad_enabled(with_graph), restored(unchanged):
                return self._engine(by_tower.get(Tower.IMAGE), by_tower.get(Tower.TEXT), pieces)
        finally:
            model.before_text = None  # evaluations do not reseed

    def _gather(self, this_pass: _Pass) -> None:
        """Keep the parameters of the pass's tower gathered, in a step of several passes."""
        if len(this_pass.towers) == 1:
            self._gathered.use(_modules(self._engine.module)[this_pass.towers[0]])

    def _store(self, features: dict[Tower, Tensor], tower: Tower, index: int, chunk: Tensor | None) -> None:
        assert chunk is not None, "the model returns features of every input"
        if tower not in features:
            shape = (self._batch.rows(), chunk.shape[1])
            features[tower] = _empty(shape, chunk, self._embeddings_device)
        features[tower][self._rows(tower, index)].copy_(chunk.detach(), non_blocking=True)

    def _rows(self, tower: Tower, index: int) -> slice:
        """Return the rows of a chunk."""
        count = self._batch.rows() // self._batch.chunk_count(tower)
        return slice(index * count, (index + 1) * count)


def _forward_order(chunks: Sequence[int], is_trained: Sequence[bool]) -> list[tuple[Tower, ...]]:
    """Return the towers in the order in which they encode the batch: both at once, or one after the other.

    A text tower that is not trained keeps no graph, so it runs first, unless it has to wait for several chunks of
    images (`StepBatch.chunks`).
    """
    if encodes_together(chunks, is_trained):
        return [tuple(Tower)]
    text_first = not is_trained[Tower.TEXT] and chunks[Tower.IMAGE] == 1
    return [(tower,) for tower in sorted(Tower, reverse=text_first)]


def _loss_and_gradients(
    loss_function: ContrastiveLoss,
    features: dict[Tower, Tensor],
    orders: dict[Tower, Tensor | None],
    scalars: Sequence[Tensor],
    device: torch.device,
    step: int,
    check_loss: Callable[[], None],
) -> tuple[Tensor, _Cached]:
    """Evaluate the loss and its gradients on `device`. Empty `features`, so that their memory is freed.

    All gradients are NaN if the loss is not finite.

    Features and returned gradients are in the order of the chunks and on the same devices. `orders` has
    `StepBatch.order` of each tower. The loss receives the rows in the order of the batch.
    """
    kept_on = {tower: embeddings.device for tower, embeddings in features.items()}
    leaves = {tower: _batch_order(features.pop(tower).to(device), orders[tower]).requires_grad_() for tower in Tower}
    log_scale, *bias = scalar_leaves = [scalar.detach().clone().requires_grad_() for scalar in scalars]
    loss = loss_function(leaves[Tower.IMAGE], leaves[Tower.TEXT], log_scale.exp(), *bias)
    loss.backward()  # not autograd.grad, which would not leave gradients in a loss's own parameters
    value = loss.detach()
    refused = ~value.isfinite()
    try:
        check_loss()
    except NonFiniteError as error:
        if not refused:
            raise
        raise NonFiniteError(f"step {step}: the loss is {float(value)}, so the update was not made") from error
    gradients = {}
    for tower in Tower:
        gradient = _chunk_order(_gradient(leaves.pop(tower)), orders[tower]).masked_fill_(refused, math.nan)
        if kept_on[tower] != device:
            gradient = _empty(gradient.shape, gradient, kept_on[tower]).copy_(gradient)
        gradients[tower] = gradient
    return value, _Cached(gradients, [_gradient(leaf).masked_fill_(refused, math.nan) for leaf in scalar_leaves])


def _batch_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Reorder rows from the order of the chunks to the order of the batch."""
    return rows if order is None else rows.index_select(0, upload(order.argsort(), rows.device))


def _chunk_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Reorder rows from the order of the batch to the order of the chunks."""
    return rows if order is None else rows.index_select(0, upload(order, rows.device))


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "the loss depends on its features and scalars"
    return leaf.grad


def _empty(shape: Sequence[int], like: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor like `like` on `device`; page-locked on the host of a GPU, so that copies do not block."""
    pinned = device.type == "cpu" and like.device.type != "cpu"
    return torch.empty(tuple(shape), dtype=like.dtype, device=device, pin_memory=pinned)
