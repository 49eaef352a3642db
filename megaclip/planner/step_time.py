"""Seconds of a step on a described cluster, term by term, and the term that dominates.

`StepTime` has the terms. Terms that run at the same time count as the longest of them:

* The host runs ahead of a tower's kernels, or the kernels wait for the host. The towers run one after the other, so the
  times of both are not balanced against each other.
* A ring's exchange of features runs behind the loss, except between GPUs of one host (`Cluster.hides_exchanges`).
* Gradients that are reduced in the background (overlap_comm) and parameters that are gathered ahead run behind the
  towers, and so do copies to the GPU (a second stream). Decoding, in other processes, runs behind the whole step.
  Without loader processes the rank itself decodes, and the term is added.
* A thread writes a step store on disk, and on a GPU it is read one chunk ahead of the towers. On a CPU each chunk is
  read when it is needed, and the term is added. The term assumes that host memory caches nothing of the file.
* Offload is added completely. At the end of every backward pass DeepSpeed waits for the gradients of its last bucket.
  It fetches fewer than two blocks ahead, and only if a pass is like the previous one.
"""

from dataclasses import dataclass, replace

from megaclip.losses.costs import LOSS_COSTS
from megaclip.planner import constants
from megaclip.planner.cluster import Cluster
from megaclip.planner.memory import MemoryPlan, plan_memory, store_bytes
from megaclip.planner.phases import loss_sizes
from megaclip.planner.towers import TowerWork, tower_work
from megaclip.planner.traffic import feature_traffic, offload_traffic, parameter_traffic, tensor_traffic
from megaclip.planner.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: each term alone, and the total with overlaps."""

    forward: float
    """The towers over all chunks, without a graph or with a graph that is kept."""
    forward_again: float
    """The towers over the chunks that are encoded twice; 0 if all graphs are kept."""
    backward: float
    """The towers' backward passes, over the part with a graph, with the forward passes of activation checkpointing."""
    loss: float
    """8 or 10 b B D operations, for the sigmoid loss 6 or 8 (docs/mathematics.md), at the loss's rate."""
    features: float
    """Features and their gradients between ranks."""
    parameters: float
    """Gradients and, at stage 3, the parameters of every pass between ranks."""
    tensor_parallel: float
    """The blocks' sums over the ranks of a replica, which nothing hides; 0 without tensor parallelism."""
    copies: float
    """Samples to the GPU, twice where chunks are encoded twice."""
    disk: float
    """The step store's file, written and read; 0 if images are kept elsewhere."""
    decoding: float
    """Samples read, decoded and cropped."""
    host: float
    """DeepSpeed's hooks around every block in every pass at ZeRO-3, which take as long for small chunks."""
    host_wait: float
    """The GPU's waits for hooks that take longer than a tower's kernels, and for ZeRO-3's reductions."""
    offload: float
    """Parameters, gradients and blocks' inputs between host and GPU."""
    update: float
    """Checks, clipping, Adam and new working copies: on the GPU the kernel launches for every parameter, and the bytes
    that they read and write; with offload_optimizer Adam in host memory."""
    features_hidden: bool
    """True if the term `features` runs behind `loss`."""
    parameters_hidden: bool
    """True if the term `parameters` runs behind the towers."""
    disk_hidden: bool
    """True if the term `disk` runs behind the towers."""
    decoding_hidden: bool
    """True if the term `decoding` runs behind the step, in other processes."""
    global_batch: int

    @property
    def towers(self) -> float:
        return self.forward + self.forward_again + self.backward

    @property
    def total(self) -> float:
        loss = max(self.loss, self.features) if self.features_hidden else self.loss + self.features
        behind = [self.towers + self.host_wait, self.copies]
        added = [loss, self.tensor_parallel, self.offload, self.update]
        (behind if self.parameters_hidden else added).append(self.parameters)
        (behind if self.disk_hidden else added).append(self.disk)
        seconds = max(behind) + sum(added)
        return max(seconds, self.decoding) if self.decoding_hidden else seconds + self.decoding

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.total

    @property
    def samples_per_s_of_data(self) -> float:
        """Samples per second that the loader processes of all ranks decode."""
        return self.global_batch / self.decoding

    @property
    def samples_per_s_without_data(self) -> float:
        """Samples per second if decoding takes no time."""
        return replace(self, decoding=0.0).samples_per_s

    @property
    def dominant(self) -> str:
        """Name of the longest term."""
        terms = {
            "towers": self.towers,
            "loss": self.loss,
            "communication": self.features + self.parameters + self.tensor_parallel,
            "data": max(self.copies, self.disk, self.decoding),
            "host": self.host + self.offload,
            "update": self.update,
        }
        return max(terms, key=lambda name: terms[name])


def plan_time(workload: Workload, cluster: Cluster) -> StepTime:
    """Return the step's terms on one rank of `cluster`, at its rates."""
    return time_of(plan_memory(workload, cluster), cluster)


def time_of(plan: MemoryPlan, cluster: Cluster) -> StepTime:
    """Return the terms of a planned step, as `plan_time` does."""
    workload = plan.workload
    section, rates, batch = workload.megaclip, cluster.rates, workload.local_batch
    forward = again = backward = host = host_wait = 0.0
    for work in tower_work(workload):
        seconds = work.seconds(cluster)
        first = batch * seconds.forward
        second = first * work.encoded_again / work.chunks
        last = batch * seconds.backward
        forward, again, backward = forward + first, again + second, backward + last
        hooks, reductions = _host_seconds(workload, work)
        host += hooks
        host_wait += max(0.0, hooks - first - second - last) + reductions
    readings = workload.image_readings if section.data_offload == "reread" else 1.0
    on_disk = cluster.gpus_per_host * (plan.image_place == "disk")
    sizes = loss_sizes(workload)
    loss_operations = LOSS_COSTS[section.loss].products[section.reduction] * sizes.logits * sizes.embedding
    return StepTime(
        forward=forward,
        forward_again=again,
        backward=backward,
        loss=loss_operations / rates.loss_flops,
        features=feature_traffic(workload).total / cluster.slowest_link,
        parameters=parameter_traffic(workload) / cluster.slowest_link,
        tensor_parallel=tensor_traffic(workload) / cluster.tensor_link(workload.tensor_ranks),
        copies=workload.image_readings * store_bytes(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        disk=on_disk * (1 + workload.image_readings) * store_bytes(workload) / rates.disk_write,
        decoding=readings * batch / (workload.loaded_per_core(rates.decoded) * cluster.loader_cores(workload.workers)),
        host=host,
        host_wait=host_wait,
        offload=offload_traffic(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        update=_update_seconds(workload, cluster),
        features_hidden=section.exchange == "ring" and cluster.hides_exchanges,
        parameters_hidden=bool(workload.zero.overlap_comm) and not workload.coalesces,
        disk_hidden=bool(cluster.gpu_memory),
        decoding_hidden=workload.workers > 0,
        global_batch=workload.batch.global_batch,
    )


def _host_seconds(workload: Workload, work: TowerWork) -> tuple[float, float]:
    """Return the seconds of DeepSpeed's hooks at ZeRO-3 around one tower's blocks, and those of its reductions."""
    if workload.zero.stage != 3:
        return 0.0, 0.0
    backward = bool(work.trained) * (1 + bool(workload.checkpointing))
    seconds = constants.ZERO_3_BLOCK_SECONDS + (constants.ZERO_3_GATHER_SECONDS if workload.replicas > 1 else 0.0)
    forward, graph = work.passes
    blocks = (work.chunks + work.encoded_again) * forward.layers
    reductions = (1 if workload.coalesces else work.chunks) * len(work.parameters.trainable) * (workload.replicas > 1)
    return (blocks + work.chunks * backward * graph.layers) * seconds, reductions * constants.ZERO_3_REDUCTION_SECONDS


def _update_seconds(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds of the update. At ZeRO-3 a rank updates a part of every tensor."""
    stage, ranks = workload.zero.stage, workload.replicas
    if workload.offloads_optimizer:
        return workload.trained / ranks * constants.OFFLOADED_ADAM_BYTES / constants.OFFLOADED_ADAM_RATE
    own = workload.trained / (ranks if stage else 1)
    if stage < 3:
        return constants.GROUPED_UPDATE_SECONDS + own * constants.GROUPED_UPDATE_BYTES / cluster.rates.memory
    tensors = sum(len(parameters.trainable) for parameters in workload.parameters)
    return tensors * constants.UPDATE_TENSOR_SECONDS + own * constants.UPDATE_BYTES / cluster.rates.memory
