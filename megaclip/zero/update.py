"""Replace the parts of DeepSpeed's optimizer step that handle one parameter tensor at a time.

ViT-B/16 has 398 parameter tensors. DeepSpeed computes the gradient norm from 398 float64 copies and 398 norms, and
runs several kernels and waits for the GPU to clip each parameter group. The GPU then waits for the host. The methods
below are replaced by methods that handle all tensors at once. At ZeRO-1 to 3 they copy the norm to the host, which
reads it several times and would wait for the whole update the last time:

* ZeRO-0, `clip_fp32_gradients`: one grouped product, with the norm that `megaclip.zero.optimizers.update` has
  computed.
* ZeRO-1 and 2, `scaled_global_norm`: one grouped norm and one all-reduce for all parameter groups. It also joins
  each group's gradients, which `_get_preflattened_grad_partition` then returns.
* ZeRO-1 and 2, `unscale_and_clip_grads`: the same factor, without the check that waits for the GPU, and without a
  product if nothing is clipped.
* ZeRO-1 and 2, `_update_model_bit16_weights`: skipped if every weight is already in its flat buffer, as after every
  step.
* ZeRO-1 and 2, `reduce_independent_p_g_buckets_and_remove_grads`: skipped on one data-parallel rank, where DeepSpeed
  would join all gradients and copy them back.
* ZeRO-3, `_get_norm_groups`: one grouped norm and one all-reduce for all sub-groups.

The results are DeepSpeed's: the norm accumulates in float64, and a norm that is not finite is reported as infinite.
With `offload_optimizer` DeepSpeed's own methods run: it computes the norms during the backward pass, and an update on
the CPU takes longer than the launches.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import Tensor

from megaclip.logging import get_logger

logger = get_logger(__name__)


def group_kernels(engine: DeepSpeedEngine) -> None:
    """Replace the methods that fit the engine's ZeRO stage, and log whether the update is grouped."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        engine.clip_fp32_gradients = functools.partial(_clip_by_known_norm, engine)
    elif type(optimizer) is DeepSpeedZeroOptimizer and not optimizer.cpu_offload:
        optimizer.__class__ = GroupedStages1And2
        optimizer._flat = {}
        if dist.get_world_size(group=optimizer.dp_process_group) == 1:
            optimizer.leave_gradients()
    elif type(optimizer) is DeepSpeedZeroOptimizer_Stage3 and _can_group(optimizer):
        optimizer.__class__ = GroupedStage3
    else:
        logger.info("update: DeepSpeed's own, with several operations per parameter tensor")
        return
    logger.info("update: grouped over the parameter tensors")


def _can_group(optimizer: DeepSpeedZeroOptimizer_Stage3) -> bool:
    """Return whether all gradients are on the device and are divided over the same ranks."""
    first, *others = optimizer.sub_group_process_groups
    return not optimizer.offload_optimizer and all(group == first for group in others)


def _clip_by_known_norm(engine: DeepSpeedEngine) -> None:
    """Clip the gradients at ZeRO-0. `update` has left their norm in the engine."""
    torch.nn.utils.clip_grads_with_norm_(
        engine.module.parameters(), engine.gradient_clipping(), engine.get_global_grad_norm(), foreach=True
    )


class GroupedStages1And2(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of ZeRO-1 and 2, without optimizer offload, in float32 or bf16 (loss scale 1)."""

    _flat: dict[int, Tensor]
    """Gradients of groups that have been joined, from the norm to the update."""

    def leave_gradients(self) -> None:
        """Use the gradients where autograd has left them. There is one rank, so they are the averages over all ranks.

        Gradients that add up in float32 beside bf16 weights are excepted: DeepSpeed adds them while it reduces them.
        """
        if not any(map(self._use_compact_grad_partition_buffer, range(len(self.bit16_groups)))):
            self.contiguous_gradients = False  # no bucket
            self.reduce_independent_p_g_buckets_and_remove_grads = lambda parameter, group: None

    def scaled_global_norm(self, norm_type: float = 2) -> Tensor:
        """Return the norm of the gradients of all ranks, () float32 on the host; infinite if it is not finite.

        The flat gradients are queued before the host waits for the norm. The GPU would wait for them afterwards.
        """
        assert norm_type == 2, "only the Euclidean norm"
        gradients: list[Tensor] = []
        for group, parameters in enumerate(self.params_in_partition):
            own = (part for part in self.averaged_gradients[group] if not getattr(part, "_zero_padding", False))
            gradients += _counted(own, parameters, self.model_parallel_rank == 0)
        total = _sum_of_squares(gradients)
        dist.all_reduce(total, group=self.dp_process_group)
        self._model_parallel_all_reduce(total, op=dist.ReduceOp.SUM)
        read_norm = _copied_to_host(total.sqrt().float().nan_to_num(nan=math.inf, posinf=math.inf))
        self._flat = {group: self._flat_gradient(group) for group in range(len(self.bit16_groups))}
        return read_norm()

    def _flat_gradient(self, group: int) -> Tensor:
        """Return the gradients of this rank's part of a group as one tensor, in the dtype of the optimizer.

        Gradients that add up in float32 beside bf16 weights are one tensor already, which is not copied.
        """
        joined: Tensor | None = super()._get_preflattened_grad_partition(group)
        if joined is not None:
            return joined
        parts: list[Tensor] = list(self.averaged_gradients[group])
        flat = torch.zeros_like(self.single_partition_of_fp32_groups[group].detach())  # the last rank's has padding
        sizes = [part.numel() for part in parts]
        places = flat[: sum(sizes)].split(sizes)
        torch._foreach_copy_([place.view_as(part) for place, part in zip(places, parts, strict=True)], parts)
        return flat

    def _get_preflattened_grad_partition(self, group_index: int) -> Tensor | None:
        """Return a group's flat gradient, of which the caller then has the only reference."""
        return self._flat.pop(group_index, None)

    def _release_preflattened_grad_buffers(self, group_index: int | None = None) -> None:
        """Free the flat gradients of an update that is not made."""
        if group_index is None:
            self._flat.clear()

    def unscale_and_clip_grads(self, gradients: Sequence[Tensor], total_norm: Tensor) -> None:
        """Scale gradients down to norm `clip_grad` if `total_norm`, () on the host, is larger; 0 is no limit."""
        if self.clip_grad and (excess := (total_norm + 1e-6) / self.clip_grad) > 1:
            factor = excess.reciprocal()
            for gradient in gradients:
                gradient.mul_(factor)

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Make the group's parameters views of its flat buffer again if one of them is elsewhere."""
        flat = self.bit16_groups_flat[group_index]
        start, size = flat.data_ptr(), flat.element_size()
        places = zip(
            self.round_robin_bit16_groups[group_index], self.round_robin_bit16_offsets[group_index], strict=True
        )
        if any(parameter.data_ptr() != start + offset * size for parameter, offset in places):
            super()._update_model_bit16_weights(group_index)


class GroupedStage3(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's optimizer of ZeRO-3, without optimizer offload."""

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of the gradients of all ranks, () float64 on the host, as the only element of a list."""
        process_group = self.sub_group_process_groups[0]
        every_rank = self._grad_norm_counts_every_rank(self.fp16_groups[0], process_group)
        gradients: list[Tensor] = []
        for sub_group, parameters in enumerate(self.fp16_groups):
            own = self.averaged_gradients[sub_group]
            gradients += _counted(own, parameters, every_rank or self.model_parallel_rank == 0)
        total = _sum_of_squares(gradients)
        dist.all_reduce(total, group=process_group)
        if not every_rank:
            self._model_parallel_all_reduce(total, op=dist.ReduceOp.SUM)
        return [total.sqrt().cpu()]


def _copied_to_host(value: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; return a function that waits for the copy, and returns it."""
    if value.device.type == "cpu":
        return lambda: value
    on_host, copied = value.to("cpu", non_blocking=True), get_accelerator().Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return on_host

    return wait


def _counted(gradients: Iterable[Tensor], parameters: Iterable[Any], replicated_too: bool) -> list[Tensor]:
    """Return the gradients that this rank adds to the norm.

    Parameters that every tensor-parallel rank holds whole count on one of these ranks only.

    gradients: in the order of `parameters`; elements after the last parameter are padding.
    """
    pairs = zip(gradients, parameters, strict=False)
    return [gradient for gradient, parameter in pairs if replicated_too or is_model_parallel_parameter(parameter)]


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, () float64 (float32 on devices without float64)."""
    if not gradients:
        return torch.zeros((), dtype=get_norm_dtype(), device=get_accelerator().current_device_name())
    norms = torch._foreach_norm(gradients, 2, dtype=get_norm_dtype())
    return torch.stack(norms).square().sum()
