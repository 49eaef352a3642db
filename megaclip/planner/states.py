"""Bytes of parameters, gradients and optimizer states on each rank: on the GPU and in host memory.

The formulas follow DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py` and `stage3.py`. P is the number of trained
parameters on one rank, W the number of replicas, which without tensor parallelism is the number of ranks. In float32
training too, stages 1 to 3 have a float32 master: DeepSpeed clones the partition. At stage 0 the parameters themselves
are updated.

* Stages 1 and 2 keep the whole working copy, and P/W of the master and of its states. With contiguous_gradients, which
  offload_optimizer needs, a backward pass allocates at its first gradient the bucket in which gradients are reduced
  (`reduce_bucket_size` elements, two with overlap_comm): 1 GB at DeepSpeed's default.
* Stage 1 keeps every gradient until the update, which first frees those that other ranks need; stage 2 keeps P/W of
  them, in the dtype they accumulate in. The update joins its gradients, converts them to float32 (without a copy if
  they already are one float32 tensor), and frees the originals. torch's Adam needs another P/W float32 numbers.
* Stage 3 keeps P/W of everything, and the bucket, throughout the step. Parameters below the persistence threshold stay
  whole. The others are whole while they are used or fetched ahead, in two copies. Those at the end of a tower, as many
  as half of `stage3_max_reuse_distance`, stay whole from one pass over the tower to the next
  (`megaclip.zero.gathered_tower`). With offload_param this is so only between a forward pass and its backward pass
  (DeepSpeed).
* Offload moves master, states and the step's float32 gradients to host memory, and at stage 3 the working copy too.
  Gradients that accumulate move there at stage 3, and at stage 2 if they accumulate in the working dtype.
"""

from dataclasses import dataclass, field

from megaclip.config.ds_config import count_kept
from megaclip.planner.workload import Parameters, Workload


@dataclass
class States:
    """Bytes per rank: those in memory during the whole step, by name, and additional ones."""

    gpu: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    bucket: float = 0.0
    """Bytes of the reduce bucket on the GPU that exist during backward passes only."""
    reduction: float = 0.0
    """Bytes on the GPU on top of gradients and bucket while the last bucket is reduced."""
    update: float = 0.0
    """Bytes on the GPU on top of the states and `updated_gradient_bytes` during the optimizer's step."""


def states_of(workload: Workload) -> States:
    """Return the bytes of parameters, master, optimizer states and DeepSpeed's buffers."""
    if workload.zero.stage == 3:
        return _stage_3(workload)
    return _stages_0_to_2(workload)


def gradient_bytes(workload: Workload, whole: int) -> float:
    """Return the bytes on the GPU of the gradients of `whole` parameters after their backward passes."""
    return whole * workload.compute_bytes if workload.coalesces else reduced_gradient_bytes(workload, whole)


def reduced_gradient_bytes(workload: Workload, whole: int) -> float:
    """Return the bytes on the GPU of the gradients of `whole` parameters after their reduction, until the step."""
    zero = workload.zero
    if zero.stage == 3 or not whole:
        return 0  # at stage 3 they are part of the states
    if zero.stage < 2:
        return whole * (workload.gradient_bytes if zero.stage else workload.compute_bytes)
    if workload.offloads_optimizer and workload.gradient_bytes == workload.compute_bytes:
        return 0  # in host memory
    return workload.trained / workload.replicas * workload.gradient_bytes


def updated_gradient_bytes(workload: Workload) -> float:
    """Return the bytes on the GPU of the reduced gradients at the update. Stage 1 frees those of other ranks first."""
    reduced = reduced_gradient_bytes(workload, workload.trained)
    return reduced / workload.replicas if workload.zero.stage == 1 and not workload.offloads_optimizer else reduced


def checkpoint_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes of the tensors that a rank saves, and those that ranks of the first replica save besides."""
    part = workload.trained / workload.replicas
    trained = part * (4 + workload.optimizer_state_bytes)
    total = workload.total if workload.megaclip.lora is None else workload.trained  # not the weights below adapters
    if workload.zero.stage == 0:
        return 0.0, total * workload.compute_bytes + workload.trained * workload.optimizer_state_bytes
    if workload.zero.stage < 3:
        return trained, total * workload.compute_bytes
    frozen = (total - workload.trained) / workload.replicas * workload.compute_bytes
    return frozen + trained, 0.0


def _stages_0_to_2(workload: Workload) -> States:
    zero, replicas = workload.zero, workload.replicas
    part = workload.trained / replicas
    states = States(gpu={"parameters": workload.total * workload.compute_bytes})
    if zero.stage == 0:
        states.gpu["optimizer states"] = workload.trained * workload.optimizer_state_bytes
        if replicas > 1:
            states.reduction = min(workload.trained, 5e8) * workload.compute_bytes
        return states
    is_reduced = replicas > 1 or workload.gradient_bytes != workload.compute_bytes  # see zero/update.py
    if (zero.contiguous_gradients and is_reduced) or workload.offloads_optimizer:
        states.bucket = zero.reduce_bucket_size * workload.compute_bytes * (2 if zero.overlap_comm else 1)
    filled = min(zero.reduce_bucket_size, workload.trained)
    states.reduction = filled * workload.compute_bytes
    if workload.coalesces:
        states.reduction += part * workload.gradient_bytes
    if workload.offloads_optimizer:
        states.cpu["master parameters"] = part * (4 + workload.compute_bytes)
        states.cpu["optimizer states"] = part * workload.optimizer_state_bytes
        states.cpu["gradients"] = part * 4
        if workload.gradient_bytes == workload.compute_bytes and not workload.one_chunk_each:
            states.cpu["gradients"] += part * workload.compute_bytes
        largest = max((size for tower in workload.parameters for size in tower.trainable), default=0)
        states.gpu["offload staging"] = largest * workload.compute_bytes
        return states
    states.gpu["master parameters"] = part * 4
    states.gpu["optimizer states"] = part * workload.optimizer_state_bytes
    stepping = part * (4 + workload.optimizer_temporary_bytes) - updated_gradient_bytes(workload)
    if zero.stage == 1 or workload.gradient_bytes == workload.compute_bytes:
        joining = part * 4
        if zero.stage == 2:  # the last chunk's gradients, beside those that have accumulated
            states.reduction += part * workload.compute_bytes
    else:
        joining = 0.0
    states.update = max(joining, stepping)
    return states


def _stage_3(workload: Workload) -> States:
    zero, replicas = workload.zero, workload.replicas
    part = workload.trained / replicas
    states = States()
    persistent = sum(
        size
        for tower in workload.parameters
        for size in (*tower.trainable, *tower.frozen)
        if size <= zero.param_persistence_threshold
    )
    shares = workload.total / replicas * workload.compute_bytes
    (states.cpu if workload.offloads_parameters else states.gpu)["parameters"] = shares
    if replicas > 1:
        states.gpu["whole small parameters"] = persistent * workload.compute_bytes
    states.gpu["reduce bucket"] = zero.reduce_bucket_size * workload.compute_bytes if zero.contiguous_gradients else 0.0
    filled = min(zero.reduce_bucket_size, workload.trained)
    states.reduction = filled * (workload.compute_bytes + workload.gradient_bytes / replicas)
    accumulated = part * workload.gradient_bytes
    if not workload.offloads_optimizer:
        states.gpu["gradients"] = accumulated
        states.gpu["master parameters"] = part * 4
        states.gpu["optimizer states"] = part * workload.optimizer_state_bytes
        group = min(part, zero.sub_group_size)
        joining = group * (workload.gradient_bytes + (4 if workload.gradient_bytes == 2 else 0))
        stepping = group * (4 + workload.optimizer_temporary_bytes)
        states.update = max(joining, stepping)
        return states
    states.cpu["gradients"] = accumulated + part * 4
    states.cpu["master parameters"] = part * 4
    states.cpu["optimizer states"] = part * workload.optimizer_state_bytes
    return states


def reduction_under_way(workload: Workload, states: States, tower: Parameters, activations: float) -> float:
    """Return the bytes that reducing the first full bucket adds to the peak of a backward pass, when some activations
    are freed already."""
    if workload.coalesces or workload.zero.stage < 2 or workload.zero.reduce_bucket_size >= tower.trained:
        return 0  # reduced after the pass, or at its end
    return max(0.0, states.reduction - activations * workload.zero.reduce_bucket_size / tower.trained)


def gathered_bytes(workload: Workload, tower: Parameters, *, other: Parameters | None = None) -> float:
    """Return the bytes of a tower's parameters, or of both towers' if one pass runs both, that are whole on the GPU
    while it runs; 0 below stage 3.

    other: the other tower, if it takes part in a backward pass.
    """
    zero = workload.zero
    if zero.stage != 3 or (workload.replicas == 1 and not workload.offloads_parameters):
        return 0
    if workload.encodes_together or workload.pairs:
        tower, other = workload.parameters[0].joined(workload.parameters[1]), None
    large = tower.above(zero.param_persistence_threshold)
    kept = kept_elements(workload, large, offloads=False)  # DeepSpeed fetches as many ahead with offload_param
    if other is not None and not workload.coalesces:
        large = large.joined(other.above(zero.param_persistence_threshold))
    passing = min(large.total - kept, zero.prefetch_bucket_size + max((*large.trainable, *large.frozen), default=0))
    return (kept + 2 * passing) * workload.compute_bytes  # as received, and as parameters


def kept_elements(workload: Workload, large: Parameters, *, offloads: bool) -> int:
    """Return the number of elements that stay gathered from one pass to the next (`megaclip.zero.gathered_tower`).

    large: the parameters above the persistence threshold. offloads: offload_param keeps none. Trained parameters are
    the last of a partly locked tower.
    """
    zero, sizes = workload.zero, (*large.frozen, *large.trainable)
    limits = zero.max_reuse_distance, zero.max_live_parameters, zero.prefetch_bucket_size
    return sum(sizes[len(sizes) - count_kept(sizes, *limits, offloads=offloads) :])
