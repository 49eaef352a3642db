"""The backward passes of a step of several chunks through DeepSpeed's engine, with one reduction of the gradients.

Every forward pass resets DeepSpeed's state of a backward pass, such as the number of earlier backward passes. For each
module ZeRO-3 counts the gradients to wait for before it frees the module's parameters. It keeps the count of the last
forward pass only. A graph that is kept is therefore back-propagated with the counts of its own forward pass.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from megaclip.zero.gradient_sums import GradientSums


def can_coalesce(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine can reduce the gradients of several backward passes at once at ZeRO 1 to 3."""
    return hasattr(engine.optimizer, "_coalesce_grad_reduction")


class DeepSpeedPasses:
    """The `PassEngine` (`megaclip.cache.passes`) of a DeepSpeed engine.

    coalesce: reduce gradients once, after the last pass (ZeRO 1 to 3). ZeRO-0 always does.
    accumulation_dtype: dtype in which coalesced gradients add up over chunks, before they are rounded.
    """

    def __init__(self, engine: DeepSpeedEngine, *, coalesce: bool, accumulation_dtype: torch.dtype) -> None:
        self.engine, self._coalesce, self._dtype = engine, coalesce, accumulation_dtype
        self._sums: GradientSums | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    def encoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def accumulate(self, passes: int) -> Iterator[None]:
        with self.engine.coalesce_grad_reduction() if self._coalesce else nullcontext():
            if self._coalesce and passes > 1:
                self._sums = GradientSums(self.engine.module, self._dtype)
            yield
            if self._sums is not None:
                self._sums.write_back()
                self._sums = None
        self.engine.set_gradient_accumulation_boundary(True)  # coalesce_grad_reduction has restored the flag

    def state_of_graph(self) -> dict[nn.Module, int]:
        """Return the counts that the last forward pass has left in the modules; none below ZeRO-3."""
        modules = self.engine.module.modules()
        return {module: count for module in modules if (count := vars(module).get("ds_grads_remaining"))}

    def resume_graph(self, state: dict[nn.Module, int]) -> None:
        if isinstance(self.engine.optimizer, ZeROOptimizer):
            self.engine.optimizer.clear_backward_seen_flag()
        for module, count in state.items():
            module.ds_grads_remaining = count  # type: ignore[assignment]  # DeepSpeed sets it on the module too

    def backward(self, surrogate: Tensor, *, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(surrogate, scale_wrt_gas=False)

    def add_gradients(self) -> None:
        if self._sums is not None:
            self._sums.add()
