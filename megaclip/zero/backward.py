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

from megaclip.zero.parameters import is_partitioned


def can_coalesce(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine can reduce the gradients of several backward passes at once at ZeRO 1 to 3."""
    return hasattr(engine.optimizer, "_coalesce_grad_reduction")


def loss_scale_of(engine: DeepSpeedEngine) -> float:
    """Return the factor of losses that `engine.backward` includes for float16; 1.0 for other dtypes."""
    optimizer, scaler = engine.optimizer, engine.torch_autocast_z0_gradscaler
    one = torch.ones((), device=engine.device, requires_grad=True) * 1  # DeepSpeed scales only tensors with a grad_fn
    if isinstance(optimizer, ZeROOptimizer):
        return optimizer.scale_if_loss(one).item() if optimizer.needs_scaler() else 1.0
    return 1.0 if scaler is None else scaler.scale(one).item()


class DeepSpeedPasses:
    """The `PassEngine` (`megaclip.cache.passes`) of a DeepSpeed engine.

    coalesce: reduce gradients once, after the last pass (ZeRO 1 to 3). ZeRO-0 always does.
    accumulation_dtype: dtype in which coalesced gradients add up over passes, before they are rounded. None: no sums
    are needed, because only one pass has gradients of a parameter of the towers.
    """

    def __init__(self, engine: DeepSpeedEngine, *, coalesce: bool, accumulation_dtype: torch.dtype | None) -> None:
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
            if self._coalesce and passes > 1 and self._dtype is not None:
                self._sums = GradientSums(self.engine.module, self._dtype)
            yield
            if self._sums is not None:
                self._sums.write_back()
                self._sums = None
        self.engine.set_gradient_accumulation_boundary(True)  # coalesce_grad_reduction has restored the flag

    def state_of_graph(self) -> dict[nn.Module, int]:
        """Return the counts that the last forward pass has left in the modules; none below ZeRO-3."""
        modules = self.engine.module.modules() if self.engine.zero_optimization_stage() == 3 else ()
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


class GradientSums:
    """Sums in `dtype` of the gradients of all parameters of another dtype.

    Between chunks `parameter.grad` is None, so autograd stores its tensor there and adds nothing. A parameter that
    ZeRO-3 has partitioned accepts no other tensor as gradient than the one that autograd made. There the tensor stays
    and is set to zero.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
        self._partitioned = any(is_partitioned(parameter) for parameter in self._parameters)
        self._dtype = dtype
        self._sums: dict[Tensor, Tensor] = {}

    def add(self) -> None:
        """Add a chunk's gradients to the sums, and remove them from the parameters."""
        gradients = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        new = [parameter for parameter in gradients if parameter not in self._sums]
        self._sums |= {parameter: torch.zeros_like(gradients[parameter], dtype=self._dtype) for parameter in new}
        if not gradients:
            return
        torch._foreach_add_([self._sums[parameter] for parameter in gradients], list(gradients.values()))
        if self._partitioned:
            torch._foreach_zero_(list(gradients.values()))
        else:
            for parameter in gradients:
                parameter.grad = None

    def write_back(self) -> None:
        """Set the parameters' gradients to the rounded sums."""
        while self._sums:
            parameter, total = self._sums.popitem()
            if self._partitioned:
                assert parameter.grad is not None, "gradients are reduced after the last chunk"
                parameter.grad.copy_(total)
            else:
                parameter.grad = total.to(parameter.dtype)
