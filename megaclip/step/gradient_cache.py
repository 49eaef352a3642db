"""Compute the gradient of a contrastive batch that is too large for one forward pass of the towers.

`megaclip.cache.passes` encodes the chunks and back-propagates them. This module adds what a run of two towers has: the
chunks of the step's samples, the reading of images a second time, parameters that stay gathered at ZeRO-3, embeddings
in host memory, random numbers that depend on the step alone, and captions that are sorted by length.

One tower runs after the other, so a step without kept graphs holds the activations of one chunk in one tower only. A
tower without trainable parameters runs once. If an objective pairs images with captions, such as that of a caption
decoder, one pass encodes a chunk of images together with its captions.

Batch norms normalise a chunk by its own mean and deviation, in both encodings. Their running statistics change once per
chunk, in the first encoding. At the end of the step they are averaged over the ranks, so they are equal on every rank.

Scale. DeepSpeed averages parameter gradients over W replicas of T tensor-parallel ranks. Each of the N = W T ranks has
rows of the batch. The losses return feature gradients that are N times those of the global mean loss, and
`megaclip.models.layers.own_rows` divides them by T. They return the whole gradients of the scale and the bias on every
rank. So the surrogate is not divided by the number of chunks.

Shapes: b rows of this rank, D embedding.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megaclip.cache.passes import ChunkSource, Outputs, Passes, Role, restored
from megaclip.comm.collectives import average_over_ranks
from megaclip.devices import upload
from megaclip.errors import ConfigError, NonFiniteError
from megaclip.models import DualEncoder
from megaclip.step.batch import Tower
from megaclip.step.layout import (
    KeptGraphs,
    encodes_together,
    has_cheap_passes,
    kept_graphs,
    one_chunk_each,
    text_first,
)
from megaclip.step.objective_terms import StepTerms
from megaclip.step.sample_store import StepStore
from megaclip.zero.backward import DeepSpeedPasses
from megaclip.zero.gathered_tower import GatheredTower

ContrastiveLoss = Callable[..., Tensor]  # (image features, text features, scale[, logit_bias]) -> loss


@dataclass(frozen=True)
class RandomState:
    """Seeds of a step's random numbers, calculated from the step number. Replay and resume need no saved state."""

    seed: int
    step: int
    replica: int
    """Number of the data-parallel replica. Its tensor-parallel ranks draw equal numbers."""

    def reseed(self, tower: Tower, chunk: int) -> None:
        """Seed the generators of the CPU and of this rank's device for this chunk of a tower; a second call replays the
        same numbers."""
        entropy = np.random.SeedSequence([self.seed, self.step, self.replica, int(tower), chunk])
        seed = int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also formats two tracebacks, for other devices
        get_accelerator().manual_seed(seed)


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
    batch: StepStore,
    read_scalars: Callable[[], Sequence[Tensor]],
    random_state: RandomState,
    *,
    coalesce: bool,
    kept: KeptGraphs | None = None,
    accumulation_dtype: torch.dtype = torch.float32,
    embeddings_on_cpu: bool = False,
    check_loss: Callable[[], None] = lambda: None,
    term_values: dict[str, Tensor] | None = None,
) -> Tensor:
    """Leave the gradient of one whole contrastive batch in the engine, ready for `engine.step()`.

    If the loss is infinite or NaN, all gradients become NaN, and `megaclip.zero.optimizers.update` refuses them. On a
    GPU this function only queues work, so that the GPU never waits for the host. The exception is `check_loss`, where
    the host waits for the GPU if the loss has parameters or state of its own.

    Args:
        engine: a DeepSpeed engine around a `DualEncoder`.
        loss_function: (image features (b, D), text features (b, D), scale (1,), and logit_bias (1,) if the model has
            one) -> global mean loss, under the reduction contract of `megaclip.losses`; rows in the order of the batch.
            Other arguments of a loss (sample ids, the epoch) are bound to it. Gradients of the loss's own parameters
            accumulate in these parameters.
        batch: this rank's share of the batch, in as many chunks per tower as on every other rank.
        read_scalars: returns the master value of logit_scale, (1,) float32, and that of logit_bias if the model has
            one. It is called after the first encoding has been queued.
        random_state: seeds of this step, replayed for each chunk.
        coalesce: reduce parameter gradients once, after the last chunk (ZeRO 1 to 3).
        kept: chunks whose graphs are kept, the same on every rank. None: those of megaclip.keep_graphs 0.
        accumulation_dtype: dtype in which coalesced gradients add up over chunks, before they are rounded.
        embeddings_on_cpu: keep embeddings and their gradients in host memory while the towers run.
        check_loss: called after the loss's own backward pass; raises NonFiniteError, on every rank, if the update of
            the loss's own parameters and state would not be finite.
        term_values: receives the value () of each term of the loss by name, if the model has an objective.

    Returns:
        the global mean loss with the terms of the objective, () on the engine's device, the same on every rank.

    Raises:
        NonFiniteError: `check_loss` raised; nothing was back-propagated to the towers.
        DataError: the data of a rank failed; the caller must not update.
        ConfigError: the objective returned what it may not return; the caller must not update.
    """
    embeddings_device = torch.device("cpu") if embeddings_on_cpu else engine.device
    terms = StepTerms(engine.module.objective, batch, engine.device)
    whole = _Step(engine, batch, random_state, kept, embeddings_device, terms, coalesce=coalesce)
    dtype = None if whole.one_chunk_each else accumulation_dtype
    backward = DeepSpeedPasses(engine, coalesce=coalesce, accumulation_dtype=dtype)
    passes = Passes(whole.sources, backward, in_order=whole.one_chunk_each)
    if not coalesce:
        whole.include_other_tower(passes.order)
    with whole.gathered.kept():
        passes.encode()
        if len(whole.sources) > 1:
            whole.gathered.release()
        batch.agree()
        terms.count()
        loss, scalar_gradients = whole.loss_and_gradients(loss_function, read_scalars(), check_loss)
        statistics = running_statistics(engine.module)
        with restored(statistics):
            passes.back_propagate(scalar_gradients, without_encoders=lambda: whole.outputs(engine(None, None)))
    average_over_ranks(statistics)
    if passes.repeated:
        batch.agree()
    return terms.total(loss, term_values)


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
                rows = {tower: step.rows_of_batch(tower, chunk) for tower in self._towers}
                for_objective = step.terms.inputs(rows, again=again)
                encoded = (by_tower.get(Tower.IMAGE), by_tower.get(Tower.TEXT), pieces)
                outputs = step.outputs(step.engine(*encoded, for_objective))
        finally:
            model.before_text = None  # evaluations do not reseed
        if with_graph:
            step.terms.add(outputs.features)
        for role in step.cached.keys() - outputs.features.keys() if again else ():
            if isinstance(role, str) and step.towers[role] in self._towers:
                raise ConfigError(
                    f"megaclip.objective: the loss depends on {role!r}, which chunk_features returned the first "
                    "time only; return it both times, or detach it in batch_terms"
                )
        return outputs

    def store(self, chunk: int, outputs: Outputs) -> None:
        for role, features in outputs.features.items():
            tower = self._step.towers[role]
            if tower in self._towers:  # not a term, and no blank row
                self._step.store(role, tower, chunk, features)

    def gradients(self, chunk: int) -> dict[Role, Tensor]:
        step = self._step
        own = {role: tower for role, tower in step.towers.items() if tower in self._towers and role in step.cached}
        features = {role: step.cached[role][step.rows(tower, chunk)] for role, tower in own.items()}
        return features | step.terms.gradients()

    def resume(self, chunk: int) -> None:
        """Keep the parameters of the towers gathered, and with both towers those of a decoder."""
        parts = list(self._step.model.parts().values())
        self._step.gathered.use(*(parts if len(self._towers) > 1 else [parts[tower] for tower in self._towers]))


class _Step:
    """The sources of a step, in the order in which they encode the batch, with their features and cached gradients."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        batch: StepStore,
        random_state: RandomState,
        kept: KeptGraphs | None,
        embeddings_device: torch.device,
        terms: StepTerms,
        *,
        coalesce: bool,
    ) -> None:
        self.engine, self.batch, self.random_state = engine, batch, random_state
        self.model: DualEncoder = engine.module
        self.gathered, self.terms = GatheredTower(engine), terms
        self.features: dict[Role, Tensor] = {}
        """Features of the towers (b, D), and those of the objective (b, ...), in the order of the chunks."""
        self.towers: dict[Role, Tower | None] = {tower: tower for tower in Tower}
        """Tower in whose passes the features of a role are computed. None: it is a term, to which both may add."""
        self.cached: dict[Role, Tensor] = {}
        """Gradients of the features."""
        self._embeddings_device = embeddings_device
        self._pairs = terms.pairs
        trained = list(Tower) if self._pairs else trained_towers(self.model)
        chunks, is_trained = [batch.chunk_count(tower) for tower in Tower], [tower in trained for tower in Tower]
        self.one_chunk_each = one_chunk_each(chunks, is_trained, self._pairs)
        self.kept = kept or kept_graphs(0, chunks, is_trained, self._pairs)
        assert all(kept <= count for kept, count in zip(self.kept, chunks, strict=True)), (self.kept, chunks)
        orders: list[tuple[Tower, ...]] = [(tower,) for tower in sorted(Tower, reverse=text_first(chunks, is_trained))]
        cheap_passes = has_cheap_passes(
            engine.zero_optimization_stage(),
            coalesces=coalesce,
            offloads_optimizer=engine.zero_offload_optimizer() is not None,
        )
        if self._pairs or encodes_together(chunks, is_trained, cheap_passes):
            orders = [tuple(Tower)]
        self.sources = [_TowerChunks(towers, self, is_trained=towers[0] in trained) for towers in orders]

    def include_other_tower(self, order: Sequence[tuple[ChunkSource, int]]) -> None:
        """Let the passes over one tower include the other tower where DeepSpeed requires it.

        DeepSpeed overwrites the last step's gradients in a step's first backward pass (stage 3, offload) and copies the
        sums to the host in its last one (offload), but only for parameters that take part in that pass.
        """
        if self._pairs or len(trained_towers(self.model)) < 2 or len(order) == 1:
            return
        offloads = self.engine.zero_offload_optimizer() is not None
        required = [order[0]] if offloads or self.engine.zero_optimization_stage() == 3 else []
        for source, chunk in required + [order[-1]] * offloads:
            assert isinstance(source, _TowerChunks)
            source.with_other_tower.add(chunk)

    def outputs(self, returned: tuple[Any, ...]) -> Outputs:
        """Return the outputs of `DualEncoder.forward` by role: a tower, or the name of a result of the objective."""
        features: dict[Role, Tensor] = {
            tower: each for tower, each in zip(Tower, returned, strict=False) if each is not None
        }
        *scalars, last = returned[len(Tower) :]
        if not isinstance(last, dict):
            return Outputs(features, [*scalars, last])
        for call, results in last.items():
            for name, each in results.items():
                tower = (Tower.TEXT if call == "text" else Tower.IMAGE) if each.ndim else None
                if self.towers.setdefault(name, tower) != tower:
                    raise ConfigError(
                        f"megaclip.objective: {name!r} names features of images and of captions, or features and a "
                        "term; return them under two names"
                    )
                if tower is None:
                    each = each.to(torch.promote_types(each.dtype, torch.float32)) + features.get(name, 0.0)
                features[name] = each
        return Outputs(features, scalars)

    def store(self, role: Role, tower: Tower, chunk: int, features: Tensor) -> None:
        """Copy the features of a chunk to the device that keeps embeddings. tower: that of the chunk."""
        if role not in self.features:
            shape = (self.batch.rows(), *features.shape[1:])
            self.features[role] = _empty(shape, features, self._embeddings_device)
        self.features[role][self.rows(tower, chunk)].copy_(features.detach(), non_blocking=True)

    def rows_of_batch(self, tower: Tower, chunk: int) -> slice | Tensor:
        """Return the samples of a chunk, as rows of the batch, after the chunk has been read."""
        rows, order = self.rows(tower, chunk), self.batch.order(tower)
        return rows if order is None else order[rows]

    def rows(self, tower: Tower, chunk: int) -> slice:
        """Return the rows of a chunk."""
        count = self.batch.rows() // self.batch.chunk_count(tower)
        return slice(chunk * count, (chunk + 1) * count)

    def loss_and_gradients(
        self, loss_function: ContrastiveLoss, scalars: Sequence[Tensor], check_loss: Callable[[], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the contrastive loss, and the gradients of the loss with the terms of the batch by the scalars (1,).

        Set `cached` to those by the features, on the devices and in the order of the features. All gradients are NaN if
        the loss is not finite. `features` is emptied, so that their memory is freed. The loss receives the rows in the
        order of the batch.
        """
        device = self.engine.device
        orders = {role: None if tower is None else self.batch.order(tower) for role, tower in self.towers.items()}
        kept_on = {role: embeddings.device for role, embeddings in self.features.items()}
        leaves = {role: _batch_order(self.features.pop(role).to(device), orders[role]) for role in kept_on}
        for leaf in leaves.values():
            leaf.requires_grad_(leaf.is_floating_point())  # an objective's features may be integers
        log_scale, *bias = scalar_leaves = [scalar.detach().clone().requires_grad_() for scalar in scalars]
        scale = log_scale.exp()
        contrastive = loss_function(leaves[Tower.IMAGE], leaves[Tower.TEXT], scale, *bias)
        loss = self.terms.add_batch_terms(contrastive, leaves, [scale, *bias])
        loss.backward()  # not autograd.grad, which would not leave gradients in a loss's own parameters
        value = loss.detach()
        refused = ~value.isfinite()
        try:
            check_loss()
        except NonFiniteError as error:
            if not refused:
                raise
            step = self.random_state.step
            raise NonFiniteError(f"step {step}: the loss is {float(value)}, so the update was not made") from error
        for role in kept_on:
            leaf = leaves.pop(role)
            if leaf.grad is None and not isinstance(role, Tower):
                continue  # a feature of the objective that the loss does not depend on
            gradient = _chunk_order(_gradient(leaf), orders[role]).masked_fill_(refused, math.nan)
            if kept_on[role] != device:
                gradient = _empty(gradient.shape, gradient, kept_on[role]).copy_(gradient)
            self.cached[role] = gradient
        return contrastive.detach(), [_gradient(leaf).masked_fill_(refused, math.nan) for leaf in scalar_leaves]


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
