"""The parts of a model that torch.compile compiles: a whole tower, or each of its blocks.

Only training chunks run through compiled code. Batches of an evaluation and single rows have other shapes, and each
shape is another compilation, so they run as plain PyTorch. Compiled code calls PyTorch's random functions, in the same
order as plain PyTorch, so dropout is the same with and without compilation, and in both passes of the gradient cache.

A part compiles as a whole or fails, and `report_compilation` turns the failure into an error for users. The hooks of
its module, such as those with which ZeRO-3 gathers parameters, run before and after the compiled code.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger
from megaclip.ops.attention import has_attention
from megaclip.ops.mlp import has_mlp

logger = get_logger(__name__)

BACKEND: Any = "inductor"
"""Backend of torch.compile. Tests that only count or trace graphs replace it."""
RECOMPILE_LIMIT = 256
"""Largest number of compilations of one function: blocks of both towers, with and without gradients, all shapes."""

Compiled = Callable[..., torch.Tensor]


def compiled_class(kind: type[nn.Module], *, recomputes: bool = False) -> type[nn.Module]:
    """Return a subclass of a module whose forward pass is compiled for training chunks.

    A module becomes compiled when its `__class__` is set to it. Modules of one class and of equal sizes share the code.
    It is compiled at the first call with tensors of a shape, with and without gradients.

    kind: its method `forward`, or the method that its attribute `COMPILED` names, is compiled.
    recomputes: compute layer norms and activation functions again in the backward pass, instead of keeping their
    outputs. This applies to everything that this process compiles from now on.
    """
    import torch._functorch.config
    import torch._inductor.config  # the compiler takes seconds to import, and most processes compile nothing

    torch.compiler.assume_constant_result(has_attention)
    torch.compiler.assume_constant_result(has_mlp)
    torch._inductor.config.fallback_random = True  # inductor's own numbers would differ between the cache's two passes
    name = getattr(kind, "COMPILED", "forward")
    plain = getattr(kind, name)
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    # By default the compiler keeps a value that a matrix product of the backward pass reads. It could compute the value
    # again in the kernel that already reads the inputs of the norm or activation function.
    torch._functorch.config.ban_recompute_materialized_backward = not recomputes
    # Inductor would round the rows of intermediate results up to 128 bytes. A product with such a result cannot add its
    # bias in the same kernel: PyTorch fills the result with the bias first. In SO400M's MLP (4,304 channels, 65,536
    # rows, H200) that took 0.5 ms besides 0.9 ms, and the rounded rows saved nothing. Products require 16 bytes.
    torch._inductor.config.padding_alignment_bytes = 16
    compiled = compiled_function(plain)

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        first = next(iter((*arguments, *options.values())))
        if not self.training or len(first) == 1:
            return plain(self, *arguments, **options)
        return compiled(self, *arguments, **options)

    return type(kind.__name__, (kind,), {name: run})


def compiles_whole_tower(zero_stage: int, *, checkpointing: bool, coalesces: bool) -> bool:
    """Return whether the image tower is compiled as a whole, or each of its blocks.

    Blocks are needed if their activations are computed again one by one, if their parameters are gathered one by one
    (stage 3), and if their gradients are reduced and freed one by one (stage 2 without coalescing). Text blocks are
    always compiled one by one: captions have several lengths, and a block compiles faster than a tower.
    """
    return not checkpointing and (zero_stage < 2 or (zero_stage == 2 and coalesces))


def compiled_function(function: Compiled) -> Compiled:
    """Return a compiled function, such as the preparation of a tower's input. It compiles as a whole or fails."""
    return torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)


@contextmanager
def report_compilation(setting: bool | str, step: int) -> Iterator[None]:
    """Log the seconds of all compilations in the body, and raise their failures as ConfigError.

    setting: megaclip.compile. step: number of the step that the body takes.
    """
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    marks: list[float] = []  # start and end of each compilation, alternating

    def mark(*_: Any) -> None:
        marks.append(time.perf_counter())

    callback_handler.register_start_callback(mark)
    callback_handler.register_end_callback(mark)
    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        cause = getattr(error, "inner_exception", error)  # the backend's own error
        raise ConfigError(
            f"megaclip.compile is {json.dumps(setting)}, and torch.compile failed: {type(cause).__name__}: "
            f"{first_line(cause)}; set megaclip.compile to false, or install what is missing (torch.compile needs a C "
            "compiler and Python's headers, and Triton on GPUs)"
        ) from error
    finally:
        callback_handler.remove_start_callback(mark)
        callback_handler.remove_end_callback(mark)
    if marks:
        seconds = sum(marks[1::2]) - sum(marks[::2])
        logger.info("step %d: torch.compile took %.1f s for %d graphs", step, seconds, len(marks) // 2)
