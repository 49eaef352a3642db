"""One training step on a contrastive batch that is larger than what the towers can hold.

The gradient cache (Gao et al., 2021, arXiv:2101.06983): encode every chunk without a graph and keep only the
embeddings; evaluate the loss once over all of them; then encode each chunk again, with the same random state, and
back-propagate its cached embedding gradients. The result is the gradient of the whole batch, not of the chunks. One
tower runs after the other, so a step holds the activations of one chunk in one tower only. A tower without trainable
parameters runs once.

Scale. DeepSpeed averages parameter gradients over the W data-parallel ranks. The losses return feature gradients that
are already W times those of the global mean loss and, on every rank, the whole gradients of the scale and the bias. So
the surrogate is back-propagated without division by the number of chunks.

Shapes: b rows of this rank, D embedding.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megaclip.engine.step_batch import StepBatch, Tower
from megaclip.errors import NonFiniteError
from megaclip.models import ClipModel
from megaclip.planner.rules import keeps_graph

ContrastiveLoss = Callable[..., Tensor]  # (image features, text features, scale[, logit_bias]) -> loss


@dataclass(frozen=True)
class RandomState:
    """Seeds of a step's random numbers, by arithmetic, so that replay and resume need no saved state."""

    seed: int
    step: int
    rank: int

    def reseed(self, tower: Tower, chunk: int) -> None:
        """Seed every device's generator for this chunk of a tower; a second call replays the same numbers."""
        entropy = np.random.SeedSequence([self.seed, self.step, self.rank, int(tower), chunk])
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1)))


def trained_towers(model: ClipModel) -> list[Tower]:
    """Return the towers with trainable parameters."""
    modules = {Tower.IMAGE: model.visual, Tower.TEXT: model.text}
    return [tower for tower, module in modules.items() if any(p.requires_grad for p in module.parameters())]


def accumulate_gradients(
    engine: DeepSpeedEngine,
    loss_function: ContrastiveLoss,
    batch: StepBatch,
    log_scale: Tensor,
    random_state: RandomState,
    *,
    logit_bias: Tensor | None = None,
    coalesce: bool,
    accumulation_dtype: torch.dtype = torch.float32,
    embeddings_on_cpu: bool = False,
) -> float:
    """Leave the gradient of one whole contrastive batch in the engine, ready for `engine.step()`.

    Args:
        engine: a DeepSpeed engine around a `ClipModel`.
        loss_function: (image features (b, D), text features (b, D), scale (1,), and logit_bias (1,) if the model has
            one) -> global mean loss, under the reduction contract of `megaclip.losses`; rows in the order of the
            batch. Other arguments of a loss (sample ids, the epoch) are bound to it; the gradients of its own
            parameters are left in them.
        batch: this rank's share of the batch, in as many chunks per tower as on every other rank.
        log_scale: (1,) float32, the master value of logit_scale.
        random_state: seeds of this step, replayed for each chunk.
        logit_bias: (1,) float32, the master value of logit_bias; None if the model has none.
        coalesce: reduce parameter gradients once, after the last chunk (ZeRO 1 to 3).
        accumulation_dtype: dtype in which coalesced gradients add up over chunks, before they are rounded.
        embeddings_on_cpu: keep embeddings and their gradients in host memory while the towers run.

    Returns:
        the global mean loss, the same on every rank.

    Raises:
        NonFiniteError: the loss is infinite or NaN; nothing was back-propagated.
        DataError: the data of a rank failed; the caller must not update.
    """
    passes = _Passes(engine, batch, random_state, coalesce, torch.device("cpu") if embeddings_on_cpu else engine.device)
    features = passes.embed()
    batch.agree()
    scalars = [log_scale] if logit_bias is None else [log_scale, logit_bias]
    loss, cached = _loss_and_gradients(loss_function, features, scalars, engine.device, random_state.step)
    with engine.coalesce_grad_reduction() if coalesce else nullcontext():
        sums = _GradientSums(engine.module, accumulation_dtype) if coalesce else None
        passes.back_propagate(cached, sums)
    engine.set_gradient_accumulation_boundary(True)  # coalesce_grad_reduction put the flag back as it was
    batch.agree()
    return loss


@dataclass
class _Cached:
    """Gradients that the loss returned for the whole share of this rank."""

    features: dict[Tower, Tensor]
    """Gradients of the features, each (b, D), on the device where embeddings are kept."""
    scalars: Sequence[Tensor]
    """Gradients of the log scale and, if the model has one, of the logit bias, each (1,)."""


_Outputs = tuple[Tensor | None, ...]  # features by tower, then the scalars, as `ClipModel.forward` returns them


class _Passes:
    """The two passes over the towers: embed every chunk, then encode each again with its graph for its gradients."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        batch: StepBatch,
        random_state: RandomState,
        coalesce: bool,
        embeddings_device: torch.device,
    ) -> None:
        self._engine, self._batch, self._random_state = engine, batch, random_state
        self._embeddings_device = embeddings_device
        model = engine.module
        chunks = {tower: batch.chunk_count(tower) for tower in Tower}
        self._trained = trained_towers(model)
        self._joint = chunks == {Tower.IMAGE: 1, Tower.TEXT: 1}
        self._keeps_graph = keeps_graph(list(chunks.values()), [tower in self._trained for tower in Tower])
        # The tower that keeps its graph runs last, right before its backward pass.
        self._towers = sorted(Tower, key=self._trained.__contains__) if self._keeps_graph else list(Tower)
        self._kept: _Outputs | None = None
        # DeepSpeed overwrites the last step's gradients in a step's first backward pass (stage 3, offload) and copies
        # the sums to the host in its last one (offload), but only for parameters that take part in that pass. So in
        # these chunks the other tower takes part too, with one blank row and a gradient of zero.
        self._with_other_tower: set[tuple[Tower, int]] = set()
        offloads = engine.zero_offload_optimizer() is not None
        if len(self._trained) == 2 and not self._joint and not coalesce:
            if offloads or engine.zero_optimization_stage() == 3:
                self._with_other_tower.add((Tower.IMAGE, 0))
            if offloads:
                self._with_other_tower.add((Tower.TEXT, chunks[Tower.TEXT] - 1))

    def embed(self) -> dict[Tower, Tensor]:
        """Return the features of every row, (b, D) per tower, without gradients, where embeddings are kept."""
        features: dict[Tower, Tensor] = {}
        if self._joint:
            (images,), (tokens,) = (self._batch.chunks(tower, again=False) for tower in Tower)
            self._kept = self._forward(Tower.IMAGE, 0, images, tokens)
            for tower in Tower:
                self._store(features, tower, 0, self._kept[tower])
            return features
        for tower in self._towers:
            keeps_graph = self._keeps_graph and tower in self._trained
            again = tower in self._trained and not keeps_graph
            for index, inputs in enumerate(self._batch.chunks(tower, again=again)):
                with nullcontext() if keeps_graph else torch.no_grad():
                    outputs = self._forward(tower, index, inputs, None)
                self._store(features, tower, index, outputs[tower])
                if keeps_graph:
                    self._kept = outputs
        return features

    def back_propagate(self, cached: _Cached, sums: "_GradientSums | None") -> None:
        """Leave in the engine the parameters' gradients that follow from the cached ones of features and scalars.

        sums: sums of gradients that DeepSpeed does not reduce before the last chunk; None if it reduces each chunk's.
        """
        if self._keeps_graph or not self._trained:
            outputs, self._kept = self._kept or self._engine(None, None), None
            self._backward(outputs, {tower: cached.features[tower] for tower in self._trained}, cached.scalars)
            return
        left = sum(self._batch.chunk_count(tower) for tower in self._trained)
        for tower in self._trained:
            gradients = cached.features[tower]
            rows = self._batch.rows() // self._batch.chunk_count(tower)
            for index, inputs in enumerate(self._batch.chunks(tower, again=False)):
                left -= 1
                # Times zero, not left out: ZeRO expects the same parameters to take part in every backward pass.
                scalars = cached.scalars if left == 0 else [0 * gradient for gradient in cached.scalars]
                own_rows = {tower: gradients[index * rows : (index + 1) * rows]}
                blank = self._batch.blank(Tower(1 - tower)) if (tower, index) in self._with_other_tower else None
                outputs = self._forward(tower, index, inputs, blank)
                self._backward(outputs, own_rows, scalars, is_last=left == 0)
                del inputs, outputs  # frees what is left of their graph before the next one
                if sums is not None:
                    sums.add()
        if sums is not None:
            sums.write_back()

    def _backward(
        self,
        outputs: _Outputs,
        gradients: dict[Tower, Tensor],
        scalar_gradients: Sequence[Tensor],
        *,
        is_last: bool = True,
    ) -> None:
        """Back-propagate a scalar whose gradient in the model's outputs is the cached gradient."""
        features, scalars = outputs[: len(Tower)], outputs[len(Tower) :]
        surrogate = torch.zeros((), device=self._engine.device)
        for tower in Tower:
            output = features[tower]
            if output is None:
                continue
            gradient = gradients[tower].to(output.device, non_blocking=True).float() if tower in gradients else 0.0
            surrogate = surrogate + (output.float() * gradient).sum()
        for scalar, gradient in zip(scalars, scalar_gradients, strict=True):
            assert scalar is not None, "the model returns its scalars"
            surrogate = surrogate + (scalar * gradient).sum()
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(surrogate, scale_wrt_gas=False)

    def _forward(self, tower: Tower, index: int, inputs: Tensor, others: Tensor | None) -> _Outputs:
        """Run one chunk through its tower with the chunk's random numbers, and `others` through the other tower.

        The model runs the image tower first, and the text tower draws no random numbers, so the random numbers are the
        same with and without `others`.
        """
        self._random_state.reseed(tower, index)
        images, tokens = (inputs, others) if tower is Tower.IMAGE else (others, inputs)
        return self._engine(images, tokens)

    def _store(self, features: dict[Tower, Tensor], tower: Tower, index: int, chunk: Tensor | None) -> None:
        assert chunk is not None, "the model returns features of every input"
        if tower not in features:
            shape = (self._batch.rows(), chunk.shape[1])
            features[tower] = _empty(shape, chunk, self._embeddings_device)
        rows = features[tower][index * len(chunk) : (index + 1) * len(chunk)]
        rows.copy_(chunk.detach(), non_blocking=True)


class _GradientSums:
    """Sums of parameter gradients over chunks in a wider dtype. Autograd adds gradients up in the parameters' own
    dtype; in bfloat16 a chunk's gradient is lost beside a sum that is 2^8 times as large.

    Gradients stay in the tensors that autograd made, because a parameter partitioned by ZeRO-3 accepts no other.
    """

    def __init__(self, model: ClipModel, dtype: torch.dtype) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
        self._dtype = dtype
        self._sums: dict[Tensor, Tensor] = {}

    def add(self) -> None:
        """Add a chunk's gradients to the sums and set them to zero."""
        gradients = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        new = [parameter for parameter in gradients if parameter not in self._sums]
        self._sums |= {parameter: torch.zeros_like(gradients[parameter], dtype=self._dtype) for parameter in new}
        if gradients:
            torch._foreach_add_([self._sums[parameter] for parameter in gradients], list(gradients.values()))
            torch._foreach_zero_(list(gradients.values()))

    def write_back(self) -> None:
        """Replace the gradients by the rounded sums."""
        for parameter, total in self._sums.items():
            assert parameter.grad is not None, "gradients are reduced after the last chunk"
            parameter.grad.copy_(total)
        self._sums.clear()


def _loss_and_gradients(
    loss_function: ContrastiveLoss,
    features: dict[Tower, Tensor],
    scalars: Sequence[Tensor],
    device: torch.device,
    step: int,
) -> tuple[float, _Cached]:
    """Evaluate the loss on `device`; empty `features`, so that only their gradients are held, on the same devices."""
    kept_on = {tower: embeddings.device for tower, embeddings in features.items()}
    leaves = {tower: features.pop(tower).to(device).requires_grad_() for tower in Tower}
    log_scale, *bias = scalar_leaves = [scalar.detach().clone().requires_grad_() for scalar in scalars]
    loss = loss_function(leaves[Tower.IMAGE], leaves[Tower.TEXT], log_scale.exp(), *bias)
    value = float(loss.detach())
    if not np.isfinite(value):
        scale = float(log_scale.detach().exp())
        raise NonFiniteError(
            f"step {step}: the loss is {value} at logit scale {scale:.4g}; the update was not made. "
            "Lower the learning rate or lengthen --warmup, and resume from the last checkpoint"
        )
    loss.backward()  # not autograd.grad, which would not leave gradients in a loss's own parameters
    gradients = {}
    for tower in Tower:
        gradient = _gradient(leaves.pop(tower))
        if kept_on[tower] != device:
            gradient = _empty(gradient.shape, gradient, kept_on[tower]).copy_(gradient)
        gradients[tower] = gradient
    return value, _Cached(gradients, [_gradient(leaf) for leaf in scalar_leaves])


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "the loss depends on its features and scalars"
    return leaf.grad


def _empty(shape: Sequence[int], like: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor like `like` on `device`; page-locked on the host of a GPU, so that copies do not block."""
    pinned = device.type == "cpu" and like.device.type != "cpu"
    return torch.empty(tuple(shape), dtype=like.dtype, device=device, pin_memory=pinned)
