"""Bytes that a rank sends per step: to other ranks, and with offload to host memory.

`megaclip.losses.costs` has the traffic of the loss. The rest follows the gradient cache
(`megaclip.step.gradient_cache`) and DeepSpeed 0.19's `stage_1_and_2.py` and `stage3.py`. With offload_optimizer, per
trained parameter of this rank's share:

* stage 3: every reduction copies the accumulated gradient to the host and back (`partition_grads`); the last one also
  copies a float32 gradient to the host. A working copy that stays on the GPU is written again after the step;
* stages 1 and 2, where gradients accumulate in the working dtype: every reduction copies the sum to the host, and all
  except the first fetch it before (`async_accumulate_grad_in_cpu_via_gpu`). The only reduction of a step with several
  backward passes does both. The last one copies a float32 gradient to the host; the step copies the working copy to the
  GPU.

ZeRO-3 gathers the parameters that it keeps (`kept_elements`) when the passes over their tower begin, and the others in
every pass. Those below the persistence threshold are gathered once, after the update. With offload_param every pass
over a block fetches this rank's share of it.

With tensor parallelism, the W replicas share ZeRO's partitions, and each rank has its part of the split parameters.
`tensor_traffic` has the sums inside a replica.
"""

from megaclip.losses.costs import LOSS_COSTS, Sizes, Traffic
from megaclip.planner.states import kept_elements
from megaclip.planner.towers import tower_work
from megaclip.planner.workload import Parameters, Workload


def exchange_sizes(workload: Workload) -> Sizes:
    """Return the sizes of the loss's exchange between ranks."""
    payload_bytes = 2 if workload.megaclip.payload == "bf16" else 4
    return Sizes(
        world_size=workload.world_size,
        batch=workload.local_batch,
        embedding=workload.model.embed_dim,
        feature_bytes=min(workload.compute_bytes, payload_bytes),
        gradient_bytes=payload_bytes,
        ids=workload.megaclip.same_ids,
    )


def feature_traffic(workload: Workload) -> Traffic:
    """Return the bytes that the loss sends per step. `workload` has no "auto" (`resolve_auto`)."""
    section = workload.megaclip
    return LOSS_COSTS[section.loss].traffic(section.exchange, section.reduction, exchange_sizes(workload))


def parameter_traffic(workload: Workload) -> float:
    """Return the bytes of gradients and parameters that a rank sends to other ranks per step."""
    replicas = workload.replicas
    share = workload.compute_bytes * (replicas - 1) / replicas
    gathered, reduced = _moved_elements(workload)
    if workload.zero.stage < 3:  # an all-reduce sends twice what a reduce-scatter does
        updated = workload.trained if workload.zero.stage else 0  # the working copy, which is gathered
        return share * (2 * reduced + updated)
    return share * (reduced + gathered)


def tensor_traffic(workload: Workload) -> float:
    """Return the bytes that a rank sends per step in the sums over its tensor-parallel group.

    A block sums the outputs of attention and MLP in every forward pass, and the gradients of their inputs in the
    backward pass. With activation checkpointing, running a block again repeats the first of its two sums; PyTorch stops
    before the second.
    """
    ranks, numbers = workload.tensor_ranks, 0.0
    for work in tower_work(workload):
        forward, backward = work.passes
        numbers += (1 + work.encoded_again / work.chunks) * forward.sums
        if work.trained:
            numbers += backward.sums + (work.blocks_share * forward.sums / 2 if workload.checkpointing else 0)
    size = workload.local_batch * numbers * workload.compute_bytes
    return 2 * (ranks - 1) / ranks * size


def offload_traffic(workload: Workload) -> float:
    """Return the bytes between a rank's GPU and host memory per step: parameters, gradients and, with
    cpu_checkpointing, the blocks' inputs."""
    width, (gathered, reduced) = workload.compute_bytes, _moved_elements(workload)
    moved = 0.0
    if workload.offloads_optimizer:
        moved += 4 * workload.trained  # the last gradients, in float32
        if not workload.offloads_parameters:
            moved += width * workload.trained
        if workload.zero.stage == 3:
            moved += 2 * workload.gradient_bytes * reduced
        elif workload.gradient_bytes == width and not workload.one_chunk_each:
            first = workload.trained if _reduces_every_chunk(workload) else 0
            moved += width * (2 * reduced - first)
    if workload.offloads_parameters:
        moved += width * gathered
    moved /= workload.replicas
    if workload.checkpointing == "cpu":
        for work in tower_work(workload):
            if work.trained:  # inputs of locked blocks are copied to the host too, and freed there
                moved += workload.local_batch * sum(costs.block_inputs for costs in work.passes)
    return moved


def _reduces_every_chunk(workload: Workload) -> bool:
    return workload.zero.stage >= 2 and not workload.coalesces


def _moved_elements(workload: Workload) -> tuple[int, int]:
    """Return the elements that ZeRO sends per step, over all ranks that share its partitions: of parameters that ZeRO-3
    gathers, and of gradients, counted once for each gathering and each reduction."""
    image, text = towers = workload.parameters
    kept, again = workload.kept, workload.encoded_again
    every_chunk = _reduces_every_chunk(workload)
    reduced = sum(
        tower.trained * (chunks if every_chunk else 1) for tower, chunks in zip(towers, workload.chunks, strict=True)
    )
    threshold = workload.zero.param_persistence_threshold
    # DeepSpeed gathers the small parameters once, after the update.
    gathered = workload.total - sum(tower.above(threshold).total for tower in towers)
    if workload.encodes_together or workload.pairs:
        forward, backward = workload.chunks[0] + again[0], workload.chunks[0]
        both = _gathered(workload, image.joined(text), forward, backward, offloads=False)
        return gathered + both, reduced
    # In the order of `megaclip.step.gradient_cache`: parameters are released when the other tower's passes begin.
    if kept.image + again[0]:
        turns = [(text, 0, kept.text), (image, again[0], kept.image + again[0]), (text, again[1], again[1])]
    else:
        turns = [(text, again[1], kept.text + again[1])]
    turns = [(image, workload.chunks[0], 0), (text, workload.chunks[1], 0), *turns]
    for tower, forward, backward in turns:
        if forward + backward:
            gathered += _gathered(workload, tower, forward, backward, offloads=workload.offloads_parameters)
    # The gradient cache runs both towers in the first backward pass, and with offload_optimizer in the last one too.
    offloads_optimizer = workload.offloads_optimizer
    if image.trained and text.trained and not workload.coalesces:
        first, last = image if kept.text else text, image if again[1] else text
        for tower, takes_part in ((first, offloads_optimizer or workload.zero.stage == 3), (last, offloads_optimizer)):
            large = tower.above(threshold)
            gathered += (large.total + large.in_backward) * takes_part
            reduced += tower.trained * (takes_part and every_chunk)
    return gathered, reduced


def _gathered(workload: Workload, tower: Parameters, forward: int, backward: int, *, offloads: bool) -> int:
    """Return the elements that so many forward and backward passes in a row over a tower gather."""
    large = tower.above(workload.zero.param_persistence_threshold)
    kept = kept_elements(workload, large, offloads=offloads)
    kept_in_backward = min(kept, large.in_backward)
    once = kept if forward else kept_in_backward
    return once + forward * (large.total - kept) + backward * (large.in_backward - kept_in_backward)
