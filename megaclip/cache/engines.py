"""Engines of the gradient cache: all backward passes of a step, with one reduction of parameter gradients at its end.

| engine | during the passes | at the end |
| --- | --- | --- |
| None, or a module that is not wrapped | | nothing, as after `loss.backward()` |
| `DistributedDataParallel` | `no_sync` | one all-reduce per bucket, through DDP's own hooks |
| FSDP2 (`fully_shard`) | `set_requires_gradient_sync(False)` | one reduce-scatter per group |
| DeepSpeed, ZeRO-0 | the gradient accumulation boundary is not set | one all-reduce per bucket |
| DeepSpeed, ZeRO 1 to 3 | `coalesce_grad_reduction` | one reduction per bucket |
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megaclip.cache.passes import PassEngine
from megaclip.errors import ConfigError
from megaclip.zero.backward import DeepSpeedPasses, can_coalesce


class PlainPasses:
    """Backward passes of PyTorch. modules: wrapped by DDP or FSDP2, or not; empty without an engine."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        parameters = [parameter for module in modules for parameter in module.parameters()]
        self.device = parameters[0].device if parameters else torch.device("cpu")

    @contextmanager
    def encoding(self) -> Iterator[None]:
        with ExitStack() as stack:  # otherwise DDP expects a backward pass after each forward pass with a graph
            for module in self._modules:
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield

    @contextmanager
    def accumulate(self, passes: int) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(_reduced_at_exit(module))
                else:
                    stack.enter_context(_sharded_reduced_at_exit(module))
            yield

    def state_of_graph(self) -> None: ...

    def resume_graph(self, state: Any) -> None: ...

    def backward(self, surrogate: Tensor, *, is_last: bool) -> None:
        surrogate.backward()

    def add_gradients(self) -> None: ...


def modules_of(engine: Any) -> list[nn.Module]:
    """Return the modules of an engine argument: a module, a list of modules, or None. Raises ConfigError."""
    engines = [] if engine is None else list(engine) if isinstance(engine, list | tuple) else [engine]
    modules = [getattr(module, "_orig_mod", module) for module in engines]  # torch.compile's wrapper
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"engine is a {name}; pass a DeepSpeed engine, a module wrapped by DistributedDataParallel or "
                "fully_shard, a list of such modules, or None"
            )
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise ConfigError("engine is sharded by FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2)")
        if isinstance(module, DistributedDataParallel) and module.static_graph:
            raise ConfigError(
                "engine was wrapped with static_graph=True, which expects one backward pass; leave it out"
            )
        if isinstance(module, DeepSpeedEngine) and len(modules) > 1:
            raise ConfigError("engine lists several engines with DeepSpeed; put all encoders into one module")
        if isinstance(module, DeepSpeedEngine) and module.gradient_accumulation_steps() > 1:
            raise ConfigError(
                f"gradient_accumulation_steps is {module.gradient_accumulation_steps()}, but GradientCache takes the "
                "whole batch in one step; set it to 1"
            )
        if isinstance(module, DeepSpeedEngine) and not module.managed_gradient_accumulation():
            raise ConfigError("managed_gradient_accumulation is False, and GradientCache manages it; leave it out")
        if isinstance(module, DeepSpeedEngine) and (module.zenflow or module.super_offload()):
            setting = "zenflow" if module.zenflow else "offload_optimizer.super_offload"
            raise ConfigError(
                f"zero_optimization.{setting} updates weights from the gradients of single backward passes, of which "
                "GradientCache has one per chunk; leave it out"
            )
    return modules


def partitions_parameters(module: nn.Module) -> bool:
    """Return whether forward passes of an engine communicate, because its parameters are partitioned."""
    if isinstance(module, DeepSpeedEngine):
        return bool(module.zero_optimization_stage() == 3)
    return any(isinstance(part, FSDPModule) for part in module.modules())


def passes_of(modules: list[nn.Module]) -> PassEngine:
    """Return the engine of the modules from `modules_of`."""
    if not modules or not isinstance(modules[0], DeepSpeedEngine):
        return PlainPasses(modules)
    engine = modules[0]
    coalesce = engine.zero_optimization_stage() > 0 and can_coalesce(engine)
    return DeepSpeedPasses(engine, coalesce=coalesce, accumulation_dtype=torch.float32)


@contextmanager
def _reduced_at_exit(module: DistributedDataParallel) -> Iterator[None]:
    """Let DDP reduce the gradients of all backward passes of the body at its end, in its buckets and with its hooks.

    A last backward pass adds zero to the gradient of every parameter, so that each bucket becomes ready once. It does
    not depend on which parameters the last chunk has used.
    """
    with module.no_sync():
        yield
    wrapped = module.module
    module.module = _Touch(wrapped)
    module.require_forward_param_sync = False  # DDP fails to broadcast buffers, of which _Touch has none
    try:
        module(torch.zeros(())).backward()
    finally:
        module.module = wrapped


class _Touch(nn.Module):
    """Return zero, as a function of every trained parameter of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters_of_module = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def forward(self, _: Tensor) -> Tensor:
        return torch.stack([parameter.flatten()[:0].sum().float() for parameter in self._parameters_of_module]).sum()


@contextmanager
def _sharded_reduced_at_exit(module: nn.Module) -> Iterator[None]:
    """Let FSDP2 reduce the gradients of all backward passes of the body at its end. Do nothing if it does not shard."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_is_last_backward(False)
    try:
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True, recurse=False)
            part.set_is_last_backward(True)
    for part in sharded:
        state = part._get_fsdp_state()
        if state._is_root:  # the end of a backward pass: reduces what has accumulated, in every group below the root
            state._root_post_backward_final_callback()
