"""Bytes that a rank moves in a step: features, parameters and gradients to other ranks; with offload, to host and disk.

What the loss sends is counted in `megaclip.losses.costs`. The rest is counted by reading the gradient cache
(`megaclip.engine.gradient_cache`) and DeepSpeed 0.19's `stage_1_and_2.py` and `stage3.py`. Per trained parameter of
this rank's share, with offload_optimizer:

* stage 3: every reduction sends the accumulated gradient down and back up (`partition_grads`), the last one also a
  float32 gradient down; a working copy that stays on the GPU is written anew after the step;
* stages 1 and 2, where gradients accumulate in the working dtype: every reduction sends the sum down, and all but the
  first fetch it before (`async_accumulate_grad_in_cpu_via_gpu`); a step's only reduction after several backward passes
  does both. The last one sends a float32 gradient down; the step sends the working copy up.

With offload_param every pass over a block fetches this rank's share of it.

To and from disk ("nvme") go the float32 gradients, once each way; master and optimizer states, likewise; and parameters
beyond `max_in_cpu`, read in every pass and written after the step.
"""

from typing import NamedTuple

from megaclip.losses.costs import LOSS_COSTS, Sizes, Traffic
from megaclip.planner.states import parameters_on_disk
from megaclip.planner.towers import tower_work
from megaclip.planner.workload import Workload


class _Handled(NamedTuple):
    """Elements of all ranks together, over a whole step."""

    gathered: int
    """Parameters that a pass over their tower uses, once for each pass."""
    reduced: int
    """Gradients, once for each reduction."""


def feature_traffic(workload: Workload) -> Traffic:
    """What the loss of a settled workload sends per step, in bytes."""
    sizes = Sizes(
        world_size=workload.world_size,
        batch=workload.local_batch,
        embedding=workload.model.embed_dim,
        feature_bytes=min(workload.compute_bytes, workload.payload_bytes),
        gradient_bytes=workload.payload_bytes,
    )
    return LOSS_COSTS[workload.loss].traffic(workload.exchange, workload.reduction, sizes)


def parameter_traffic(workload: Workload) -> float:
    """Bytes of gradients and parameters that a rank sends to others per step."""
    ranks = workload.world_size
    share = workload.compute_bytes * (ranks - 1) / ranks
    handled = _handled(workload)
    if workload.zero.stage < 3:
        # An all-reduce sends twice what a reduce-scatter does; the updated working copy is gathered.
        return share * (2 * handled.reduced + workload.trained)
    return share * (handled.reduced + handled.gathered)


def offload_traffic(workload: Workload) -> float:
    """Bytes between a rank's GPU and host memory per step: parameters, gradients and, with cpu_checkpointing, the
    blocks' inputs."""
    zero, width, handled = workload.zero, workload.compute_bytes, _handled(workload)
    moved = 0.0
    if zero.offload_optimizer != "none":
        moved += 4 * workload.trained  # the last gradients, in float32
        if zero.offload_parameters == "none":
            moved += width * workload.trained
        if zero.stage == 3:
            moved += 2 * workload.gradient_bytes * handled.reduced
        elif workload.gradient_bytes == width and workload.cached:
            first = workload.trained if _reduces_every_chunk(workload) else 0
            moved += width * (2 * handled.reduced - first)
    if zero.offload_parameters != "none":
        moved += width * handled.gathered
    moved /= workload.world_size
    if workload.checkpointing == "cpu":
        for work in tower_work(workload):
            if work.parameters.trained:
                moved += 2 * work.tower.waiting_inputs(workload.local_batch, width)
    return moved


def disk_traffic(workload: Workload) -> float:
    """Bytes that a rank writes to and reads from the disk that ZeRO-3 offloads to, per step."""
    moved = 0.0
    if workload.zero.offload_optimizer == "nvme":
        moved += 2 * workload.trained / workload.world_size * (4 + 4 + workload.optimizer_state_bytes)
    on_disk = parameters_on_disk(workload)
    passes = _handled(workload).gathered / workload.total
    return moved + on_disk * (passes + workload.trained / workload.total)


def _reduces_every_chunk(workload: Workload) -> bool:
    return workload.zero.stage >= 2 and not workload.coalesce


def _handled(workload: Workload) -> _Handled:
    gathered = reduced = 0
    every_chunk = _reduces_every_chunk(workload)
    for _, parameters, _, chunks in tower_work(workload):
        gathered += parameters.total * chunks * (2 + workload.cached if parameters.trained else 1)
        reduced += parameters.trained * (chunks if every_chunk else 1)
    # The other tower takes part in the first backward pass, with offload also in the last one.
    image, text = workload.parameters
    offloads = workload.zero.offload_optimizer != "none"
    if workload.cached and image.trained and text.trained and not workload.coalesce:
        for tower, takes_part in ((text, offloads or workload.zero.stage == 3), (image, offloads)):
            gathered += 2 * tower.total * takes_part
            reduced += tower.trained * (takes_part and every_chunk)
    return _Handled(gathered, reduced)
