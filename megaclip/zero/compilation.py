"""Use torch.compile in a run: select the parts to compile, log the time, and report failures as errors for users."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from torch import nn

from megaclip.config import TrainingConfig
from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger
from megaclip.models import DualEncoder
from megaclip.models.compilation import compiles_whole_tower
from megaclip.zero.parameters import is_partitioned

logger = get_logger(__name__)


def compile_model(model: DualEncoder, config: TrainingConfig, *, recomputes: bool) -> str:
    """Compile the towers with torch.compile, in the first step; return a description of the compiled parts for the log.

    recomputes: compute layer norms and activation functions again in the backward pass.
    """
    whole = compiles_whole_tower(
        config.zero_stage,
        checkpointing=config.activation_checkpointing,
        coalesces=config.megaclip.coalesce_gradient_reduction,
    )
    return model.compile_towers(whole, _is_gathered_at_once, recomputes=recomputes)


def _is_gathered_at_once(block: nn.Module) -> bool:
    """Return False if ZeRO-3 gathers the parameters of `block` one by one: its hooks would run inside the graph."""
    partitioned = any(is_partitioned(parameter) for parameter in block.parameters())
    return not partitioned or bool(deepspeed.utils.z3_leaf_module(block))


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
