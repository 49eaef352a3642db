"""Seconds of a step on a described cluster, term by term, and the term that dominates.

    towers         forward without graph, forward again, backward (2 forwards; 3 with activation checkpointing):
                   operations over the measured rate of each tower
    loss           8 or 10 b B D; sigmoid 6 or 8 (docs/mathematics.md) over the loss's rate
    communication  tensor parallel: blocks' outputs and gradients summed over a replica's ranks, which the towers wait
                   for; parameters: gradients reduced and, at stage 3, parameters gathered for every pass; features: the
                   bytes of exchange and reduction
    data           pixels to the GPU twice; to the step store's file and back twice, if it is on disk; decoding by
                   the loader's processes
    host           at ZeRO-3: DeepSpeed's work around every block in every pass, which is the same for small chunks
    offload        parameters, gradients and blocks' inputs between host and GPU
    swap           with "nvme": parameters, gradients and optimizer states between host and disk
    optimizer      with offload_optimizer: Adam in host memory

Terms that run at the same time count as the longest of them:

* A ring's exchange of features runs behind the loss, except between GPUs of one host (`Cluster.hides_exchanges`).
* Gradients that are reduced in the background (overlap_comm) and parameters that are gathered ahead run behind the
  towers, and so do copies to the GPU (a second stream). Decoding, in other processes, runs behind the whole step.
* A thread writes a step store on disk, and on a GPU it is read one chunk ahead of the towers. On a CPU each chunk is
  read when it is needed, and the term is added. The term assumes that host memory caches nothing of the file.
* Offload is added whole. At the end of every backward pass DeepSpeed waits for the gradients of its last bucket, and
  it fetches less than two blocks ahead, and only while one pass is like the last.
"""

from dataclasses import dataclass

from megaclip.losses.costs import LOSS_COSTS
from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import OFFLOADED_ADAM_BYTES, OFFLOADED_ADAM_RATE, ZERO_3_BLOCK_SECONDS
from megaclip.planner.memory import loss_sizes, plan_memory, resolve_auto, store_bytes
from megaclip.planner.towers import forward_seconds, tower_work
from megaclip.planner.traffic import disk_traffic, feature_traffic, offload_traffic, parameter_traffic, tensor_traffic
from megaclip.planner.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: each term alone, and the total with what overlaps."""

    forward: float
    """Seconds of the towers without graph; 0 without the gradient cache."""
    forward_again: float
    """Seconds of the towers with their graph."""
    backward: float
    loss: float
    features: float
    """Seconds of features and their gradients between ranks."""
    parameters: float
    """Seconds of gradients and parameters between ranks."""
    tensor_parallel: float
    """Seconds of the blocks' sums over the ranks of a replica, which nothing hides; 0 without tensor parallelism."""
    copies: float
    """Seconds of samples to the GPU."""
    disk: float
    """Seconds of the step store's file, written and read; 0 if images are kept elsewhere."""
    decoding: float
    """Seconds of samples read, decoded and cropped."""
    host: float
    """Seconds of DeepSpeed's hooks at ZeRO-3, while the GPU works or waits."""
    offload: float
    """Seconds of parameters, gradients and blocks' inputs between host and GPU."""
    swap: float
    """Seconds of ZeRO-3's offload to disk, written and read."""
    optimizer: float
    """Seconds of the optimizer's step in host memory; 0 on the GPU, where it is short."""
    features_hidden: bool
    """True if the term `features` runs behind `loss`."""
    parameters_hidden: bool
    """True if the term `parameters` runs behind the towers."""
    disk_hidden: bool
    """True if the term `disk` runs behind the towers."""
    global_batch: int

    @property
    def towers(self) -> float:
        return self.forward + self.forward_again + self.backward

    @property
    def total(self) -> float:
        loss = max(self.loss, self.features) if self.features_hidden else self.loss + self.features
        behind, added = [self.towers, self.host, self.copies], [loss, self.offload, self.swap, self.optimizer]
        added.append(self.tensor_parallel)
        (behind if self.parameters_hidden else added).append(self.parameters)
        (behind if self.disk_hidden else added).append(self.disk)
        return max(max(behind) + sum(added), self.decoding)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.total

    @property
    def dominant(self) -> str:
        """Name of the longest term."""
        terms = {
            "towers": self.towers,
            "loss": self.loss,
            "communication": self.features + self.parameters + self.tensor_parallel,
            "data": max(self.copies, self.disk, self.decoding),
            "disk": self.swap,
            "host": self.host + self.offload + self.optimizer,
        }
        return max(terms, key=lambda name: terms[name])


def plan_time(workload: Workload, cluster: Cluster) -> StepTime:
    """Return the step's terms on one rank of `cluster`, at its rates."""
    workload = resolve_auto(workload, cluster)
    section, passes = workload.megaclip, workload.image_passes
    rates, batch = cluster.rates, workload.local_batch
    forward = again = backward = 0.0
    for sample, parameters in zip(forward_seconds(workload, rates), workload.parameters, strict=True):
        seconds = batch * sample
        again += seconds
        if parameters.trained:
            forward += seconds if workload.cached else 0.0
            backward += (3 if workload.checkpointing else 2) * seconds
    readings = passes if section.data_offload == "reread" else 1
    sizes = loss_sizes(workload)
    loss_operations = LOSS_COSTS[section.loss].products[section.reduction] * sizes.logits * sizes.embed_dim
    return StepTime(
        forward=forward,
        forward_again=again,
        backward=backward,
        loss=loss_operations / rates.loss_flops,
        features=feature_traffic(workload).total / cluster.slowest_link,
        parameters=parameter_traffic(workload) / cluster.slowest_link,
        tensor_parallel=tensor_traffic(workload) / cluster.tensor_link(workload.tensor_ranks),
        copies=passes * store_bytes(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        disk=_disk_seconds(workload, cluster),
        decoding=readings * batch / (rates.decoded * max(1, workload.workers)),
        host=_host_seconds(workload),
        offload=offload_traffic(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        swap=cluster.gpus_per_host * disk_traffic(workload) / rates.disk_write,
        optimizer=_optimizer_seconds(workload),
        features_hidden=section.exchange == "ring" and cluster.hides_exchanges,
        parameters_hidden=bool(workload.zero.overlap_comm) and not workload.coalesces,
        disk_hidden=bool(cluster.gpu_memory),
        global_batch=workload.batch.global_batch,
    )


def _disk_seconds(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds in which all ranks of a host write the step's images once and read them in every pass."""
    if plan_memory(workload, cluster).image_place.name != "disk":
        return 0.0
    return (1 + workload.image_passes) * cluster.gpus_per_host * store_bytes(workload) / cluster.rates.disk_write


def _host_seconds(workload: Workload) -> float:
    if workload.zero.stage != 3:
        return 0.0
    visits = 0
    for work in tower_work(workload):
        passes = 1 + (bool(work.parameters.trained) * (workload.cached + 1 + bool(workload.checkpointing)))
        visits += work.chunks * passes * work.tower.layers
    return visits * ZERO_3_BLOCK_SECONDS


def _optimizer_seconds(workload: Workload) -> float:
    if workload.offload_optimizer == "none":
        return 0.0
    return workload.trained / workload.replicas * OFFLOADED_ADAM_BYTES / OFFLOADED_ADAM_RATE
