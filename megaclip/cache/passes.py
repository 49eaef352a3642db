"""The core of the gradient cache: the passes of encoders over their chunks.

The gradient cache (Gao et al., 2021, arXiv:2101.06983) has three parts:

1. Encode every chunk. Keep the features of all chunks, and the graphs of some.
2. Evaluate the loss once over all features. Cache its gradients with respect to them.
3. Back-propagate each chunk's surrogate: the inner product of the chunk's features and their cached gradients. The kept
   graphs come first. The other chunks are then encoded again, with the same random numbers.

The result is the gradient of the whole batch. It does not depend on the graphs that are kept.

`Passes` does parts 1 and 3. A `ChunkSource` provides the chunks of one encoder, keeps their features, and returns their
gradients. A `PassEngine` runs the backward passes and reduces the parameters' gradients over the ranks.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Role = Hashable
"""Name of an output: the number of an input of the loss, or another name."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of one forward pass."""

    features: dict[Role, Tensor]
    """Features by role. A scalar () is a term of the loss of its own."""
    scalars: Sequence[Tensor] = ()
    """Inputs of the loss that every forward pass returns. Their gradients are added in the last backward pass."""


class PassEngine(Protocol):
    """What `Passes` needs of an engine."""

    @property
    def device(self) -> torch.device:
        """Device of the backward passes."""

    def encoding(self) -> AbstractContextManager[None]:
        """Enclose the first encoding of all chunks."""

    def accumulate(self, passes: int) -> AbstractContextManager[None]:
        """Enclose all backward passes of a step. Gradients are reduced over ranks once, at the end."""

    def state_of_graph(self) -> Any:
        """Return what the engine needs to back-propagate the last forward pass after other passes."""

    def resume_graph(self, state: Any) -> None:
        """Prepare the backward pass of a kept graph."""

    def backward(self, surrogate: Tensor, *, is_last: bool) -> None:
        """Back-propagate a scalar whose gradients are not divided by the number of passes."""

    def add_gradients(self) -> None:
        """Add the gradients of a pass to those of earlier passes, after its graph has been freed."""


class ChunkSource(Protocol):
    """The chunks of one encoder, or of several that one forward pass runs together. Each rank has equally many."""

    count: int
    """Number of chunks."""
    kept: int
    """Number of first chunks whose graphs are kept."""
    is_trained: bool
    """False: no backward passes. A source may set it in its first forward pass."""

    def inputs(self, *, again: bool) -> Iterator[Any]:
        """Yield the inputs of all chunks or, again, of those whose graphs are not kept."""

    def forward(self, chunk: int, inputs: Any, *, with_graph: bool, again: bool) -> Outputs:
        """Encode a chunk. Again: with the random numbers of the first time."""

    def store(self, chunk: int, outputs: Outputs) -> None:
        """Keep the features of a chunk, without their graph."""

    def gradients(self, chunk: int) -> dict[Role, Tensor]:
        """Return the cached gradients of the features of a chunk, by role. Other features have gradient zero."""

    def resume(self, chunk: int) -> None:
        """Prepare the backward pass of a kept graph."""


class Passes:
    """The passes of one step. An encoder's gradients accumulate in the order of its chunks if its sources are equal.

    in_order: the kept graphs of the first source are back-propagated first, not those of the last source.
    """

    def __init__(self, sources: Sequence[ChunkSource], engine: PassEngine, *, in_order: bool = False) -> None:
        self._sources, self._engine, self._in_order = sources, engine, in_order
        self._graphs: dict[tuple[ChunkSource, int], tuple[Outputs, Any]] = {}

    @property
    def _trained(self) -> list[ChunkSource]:
        return [source for source in self._sources if source.is_trained]

    @property
    def order(self) -> list[tuple[ChunkSource, int]]:
        """The backward passes in their order. The kept graphs come first."""
        return [(source, chunk) for source in self._with_kept for chunk in range(source.kept)] + self.repeated

    @property
    def _with_kept(self) -> list[ChunkSource]:
        return self._trained if self._in_order else self._trained[::-1]

    @property
    def repeated(self) -> list[tuple[ChunkSource, int]]:
        """The chunks that are encoded twice."""
        return [(source, chunk) for source in self._trained for chunk in range(source.kept, source.count)]

    def encode(self) -> None:
        """Encode every chunk."""
        with self._engine.encoding():
            for source in self._sources:
                for chunk, inputs in enumerate(source.inputs(again=False)):
                    keeps = chunk < source.kept
                    outputs = source.forward(chunk, inputs, with_graph=keeps, again=False)
                    source.store(chunk, outputs)
                    if keeps and source.is_trained:
                        self._graphs[source, chunk] = outputs, self._engine.state_of_graph()

    def back_propagate(
        self,
        scalar_gradients: Sequence[Tensor] = (),
        *,
        loss_gradients: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple,
        without_encoders: Callable[[], Outputs] = lambda: Outputs({}),
    ) -> None:
        """Leave the parameters' gradients in the engine.

        Args:
            scalar_gradients: gradients of the scalars of `Outputs`, added in the last pass.
            loss_gradients: runs the backward pass of the loss, which may have parameters of the engine. Returns tensors
                whose graphs no pass has built, and their gradients, for the last pass.
            without_encoders: returns the scalars if no encoder is trained.
        """
        order = self.order
        with self._engine.accumulate(max(1, len(order))):
            joined = loss_gradients()
            if not order:
                self._backward(without_encoders(), {}, scalar_gradients, joined, is_last=True)
            for number, (source, chunk, outputs) in enumerate(self._with_graphs(), start=1):
                is_last = number == len(order)
                # The gradient is multiplied by zero, not left out: ZeRO expects the same parameters in every pass.
                scalars = scalar_gradients if is_last else [0 * gradient for gradient in scalar_gradients]
                self._backward(outputs, source.gradients(chunk), scalars, joined if is_last else (), is_last=is_last)
                del outputs  # frees the rest of their graph before the next one is built
                self._engine.add_gradients()

    def _with_graphs(self) -> Iterator[tuple[ChunkSource, int, Outputs]]:
        """Yield each pass of `order` with its outputs."""
        for source in self._with_kept:
            for chunk in range(source.kept):
                source.resume(chunk)
                outputs, state = self._graphs.pop((source, chunk))
                self._engine.resume_graph(state)
                yield source, chunk, outputs
                del outputs
        for source in self._trained:
            for chunk, inputs in enumerate(source.inputs(again=True), start=source.kept):
                yield source, chunk, source.forward(chunk, inputs, with_graph=True, again=True)

    def _backward(
        self,
        outputs: Outputs,
        gradients: dict[Role, Tensor],
        scalar_gradients: Sequence[Tensor],
        joined: Sequence[tuple[Tensor, Tensor]],
        *,
        is_last: bool,
    ) -> None:
        """Back-propagate a scalar whose gradient with respect to the outputs is the cached gradient, in float32."""
        surrogate = torch.zeros((), device=self._engine.device)
        for role, output in outputs.features.items():
            wide = torch.promote_types(output.dtype, torch.float32)
            cached = gradients.get(role)
            gradient = 0.0 if cached is None else cached.to(output.device, non_blocking=True).to(wide)
            surrogate = surrogate + (output.to(wide) * gradient).sum()
        for scalar, gradient in [*zip(outputs.scalars, scalar_gradients, strict=True), *joined]:
            surrogate = surrogate + (scalar * gradient).sum()
        if surrogate.requires_grad:
            self._engine.backward(surrogate, is_last=is_last)


@contextmanager
def restored(statistics: Sequence[Tensor], *, only_on_failure: bool = False) -> Iterator[None]:
    """Restore running statistics of batch norms to their values before the body of the `with` statement.

    only_on_failure: do so only if the body raises.
    """
    before = [values.clone() for values in statistics]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_failure:
            for values, kept in zip(statistics, before, strict=True):
                values.data.copy_(kept)  # through .data, because kept graphs refer to them but never read them
