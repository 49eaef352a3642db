"""Compute the gradient of a contrastive batch that is too large for one forward pass of the towers.

`megaclip.cache.passes` encodes the chunks and back-propagates them. This module adds what a run of two towers has: the
chunks of the step's samples, the reading of images a second time, parameters that stay gathered at ZeRO-3, embeddings
in host memory, random numbers that depend on the step alone, and captions that are sorted by length.

One tower runs after the other, so a step without kept graphs holds the activations of one chunk in one tower only. A
tower without trainable parameters runs once.

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
from dataclasses import dataclass

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from megaclip.cache.passes import ChunkSource, Outputs, Passes, restored
from megaclip.comm.collectives import average_over_ranks
from megaclip.devices import upload
from megaclip.errors import NonFiniteError
from megaclip.models import DualEncoder
from megaclip.step.batch import StepBatch, Tower
from megaclip.step.layout import KeptGraphs, encodes_together, kept_graphs
from megaclip.zero.backward import DeepSpeedPasses
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


def running_statistics(model: DualEncoder) -> list[Tensor]:
    """Return the running statistics of the batch norms of both towers."""
    return [*model.statistics(model.visual), *model.statistics(model.text)]


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
    whole = _Step(engine, batch, random_state, kept, embeddings_device)
    passes = Passes(whole.sources, DeepSpeedPasses(engine, coalesce=coalesce, accumulation_dtype=accumulation_dtype))
    if not coalesce:
        whole.include_other_tower(passes.order)
    with whole.gathered.kept():
        passes.encode()
        if len(whole.sources) > 1:
            whole.gathered.release()
        batch.agree()
        scalars = [log_scale] if logit_bias is None else [log_scale, logit_bias]
        orders = {tower: batch.order(tower) for tower in Tower}
        loss, whole.cached, scalar_gradients = _loss_and_gradients(
            loss_function, whole.features, orders, scalars, engine.device, random_state.step, check_loss
        )
        statistics = running_statistics(engine.module)
        with restored(statistics):
            passes.back_propagate(scalar_gradients, without_encoders=lambda: _outputs(engine(None, None)))
    average_over_ranks(statistics)
    if passes.repeated:
        batch.agree()
    return loss


class _TowerChunks:
    """The chunks that one tower encodes, or both towers together, as a `ChunkSource`; its roles are the towers."""

    def __init__(self, towers: tuple[Tower, ...], step: "_Step", *, is_trained: bool) -> None:
        self._towers, self._step, self.is_trained = towers, step, is_trained
        self.count = step.batch.chunk_count(towers[0])
        self.kept = step.kept[towers[0]]
        self.with_other_tower: set[int] = set()
        """Chunks whose passes include the other tower, with one blank row and a gradient of zero."""

    def inputs(self, *, again: bool) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of the chunks, one tensor per tower. A tower that is not trained reads each chunk once."""
        read_once = self.kept if self.is_trained else self.count
        chunks = (self._step.batch.chunks(tower, read_once=read_once, again=again) for tower in self._towers)
        return zip(*chunks, strict=True)

    def forward(self, chunk: int, inputs: Sequence[Tensor], *, with_graph: bool, again: bool) -> Outputs:
        """Encode a chunk with its random numbers.

        The model runs the image tower first and then calls `before_text`. So a tower draws the same numbers whether or
        not the other tower runs in this pass. Blank rows do not change running statistics.
        """
        step, model = self._step, self._step.model
        self.resume(chunk)
        step.random_state.reseed(self._towers[0], chunk)
        model.before_text = functools.partial(step.random_state.reseed, Tower.TEXT, chunk)
        by_tower = dict(zip(self._towers, inputs, strict=True))
        pieces = step.batch.pieces(chunk) if Tower.TEXT in by_tower else None
        unchanged: list[Tensor] = []
        if with_graph and chunk in self.with_other_tower:
            other = Tower(1 - self._towers[0])
            by_tower[other] = model.blank(step.batch.blank(other))
            unchanged = model.statistics(_modules(model)[other])
        try:
            with torch.set_grad_enabled(with_graph), restored(unchanged):
                return _outputs(step.engine(by_tower.get(Tower.IMAGE), by_tower.get(Tower.TEXT), pieces))
        finally:
            model.before_text = None  # evaluations do not reseed

    def store(self, chunk: int, outputs: Outputs) -> None:
        for tower in self._towers:
            self._step.store(tower, chunk, outputs.features[tower])

    def gradients(self, chunk: int) -> dict[int, Tensor]:
        return {tower: self._step.cached[tower][self._step.rows(tower, chunk)] for tower in self._towers}

    def resume(self, chunk: int) -> None:
        """Keep the parameters of the towers gathered."""
        self._step.gathered.use(*(_modules(self._step.model)[tower] for tower in self._towers))


class _Step:
    """The sources of a step, in the order in which they encode the batch, with their features and cached gradients."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        batch: StepBatch,
        random_state: RandomState,
        kept: KeptGraphs | None,
        embeddings_device: torch.device,
    ) -> None:
        self.engine, self.batch, self.random_state = engine, batch, random_state
        self.model: DualEncoder = engine.module
        self.gathered = GatheredTower(engine)
        self.features: dict[Tower, Tensor] = {}
        """Features, (b, D) per tower, in the order of the chunks."""
        self.cached: dict[Tower, Tensor] = {}
        """Their gradients."""
        self._embeddings_device = embeddings_device
        trained = trained_towers(self.model)
        chunks, is_trained = [batch.chunk_count(tower) for tower in Tower], [tower in trained for tower in Tower]
        self.kept = kept or kept_graphs(0, chunks, is_trained)
        assert all(kept <= count for kept, count in zip(self.kept, chunks, strict=True)), (self.kept, chunks)
        orders = _forward_order(chunks, is_trained)
        self.sources = [_TowerChunks(towers, self, is_trained=towers[0] in trained) for towers in orders]

    def include_other_tower(self, order: Sequence[tuple[ChunkSource, int]]) -> None:
        """Let the passes over one tower include the other tower where DeepSpeed requires it.

        DeepSpeed overwrites the last step's gradients in a step's first backward pass (stage 3, offload) and copies the
        sums to the host in its last one (offload), but only for parameters that take part in that pass.
        """
        if len(trained_towers(self.model)) < 2 or len(order) == 1:
            return
        offloads = self.engine.zero_offload_optimizer() is not None
        required = [order[0]] if offloads or self.engine.zero_optimization_stage() == 3 else []
        for source, chunk in required + [order[-1]] * offloads:
            assert isinstance(source, _TowerChunks)
            source.with_other_tower.add(chunk)

    def store(self, tower: Tower, chunk: int, features: Tensor) -> None:
        """Copy the features of a chunk to the device that keeps embeddings."""
        if tower not in self.features:
            shape = (self.batch.rows(), features.shape[1])
            self.features[tower] = _empty(shape, features, self._embeddings_device)
        self.features[tower][self.rows(tower, chunk)].copy_(features.detach(), non_blocking=True)

    def rows(self, tower: Tower, chunk: int) -> slice:
        """Return the rows of a chunk."""
        count = self.batch.rows() // self.batch.chunk_count(tower)
        return slice(chunk * count, (chunk + 1) * count)


def _outputs(returned: tuple[Tensor | None, ...]) -> Outputs:
    """Return the outputs of `DualEncoder.forward` by tower."""
    features = zip(Tower, returned, strict=False)
    scalars = [scalar for scalar in returned[len(Tower) :] if scalar is not None]
    return Outputs({tower: each for tower, each in features if each is not None}, scalars)


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
) -> tuple[Tensor, dict[Tower, Tensor], list[Tensor]]:
    """Return the loss and its gradients by the features (b, D) and the scalars (1,), computed on `device`.

    All gradients are NaN if the loss is not finite. `features` is emptied, so that their memory is freed.

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
    return value, gradients, [_gradient(leaf).masked_fill_(refused, math.nan) for leaf in scalar_leaves]


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
