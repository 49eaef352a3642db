"""DeepSpeed's state of a backward pass, in steps that keep several graphs and back-propagate them later.

Every forward pass resets this state, such as the number of earlier backward passes. For each module ZeRO-3 counts the
gradients to wait for before it frees the module's parameters. It keeps the count of the last forward pass only.
"""

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn


def gradients_to_come(model: nn.Module) -> dict[nn.Module, int]:
    """Return the counts that the last forward pass has left in the modules; none below ZeRO-3."""
    return {module: count for module in model.modules() if (count := vars(module).get("ds_grads_remaining"))}


def resume_backward(engine: DeepSpeedEngine, counts: dict[nn.Module, int]) -> None:
    """Prepare the backward pass of a graph that is not the last one.

    counts: `gradients_to_come` after the graph's own forward pass.
    """
    if isinstance(engine.optimizer, ZeROOptimizer):
        engine.optimizer.clear_backward_seen_flag()
    for module, count in counts.items():
        module.ds_grads_remaining = count  # type: ignore[assignment]  # DeepSpeed sets it on the module too
