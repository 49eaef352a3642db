"""How long a step takes on a described machine, term by term, and which term decides.

    towers         forward without graph, forward again, backward (2 forwards; 3 with activation checkpointing):
                   operations over the measured rate of each tower
    loss           8 or 10 b B D; sigmoid 6 or 8 (docs/mathematics.md) over the loss's rate
    communication  parameters: gradients reduced and, at stage 3, parameters gathered for every pass; features: what
                   exchange and reduction send
    data           pixels to the GPU twice; to the step store's file and back twice, if it is on disk; decoding by
                   the loader's processes
    host           at ZeRO-3: DeepSpeed's work around every block in every pass, which does not shrink with the chunk
    offload        parameters, gradients and blocks' inputs between host and GPU
    swap           with "nvme": parameters, gradients and optimizer states between host and disk
    optimizer      with offload_optimizer: Adam in host memory

With a ring the features' exchange hides behind the loss, so the longer of the two counts; but not between GPUs of one
host (`Cluster.hides_exchanges`), where the two add up. Gradients that are reduced in the background (overlap_comm) and
parameters that are gathered ahead hide behind the towers; so do copies to the GPU (a second stream), and decoding, in
processes of its own, hides behind the whole step. A step store on disk is written by a thread of its own, and on a GPU
it is read one chunk ahead of the towers; on a CPU each chunk is read when its turn comes, and the term is added. It
counts as if host memory kept none of the file, which is why it is on disk. Offload is added whole: at the end of every
backward pass DeepSpeed waits for the gradients of its last bucket, and it looks ahead by less than two blocks, and that
only while one pass is like the last.
"""

from dataclasses import dataclass

from megaclip.losses.costs import LOSS_COSTS
from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import OFFLOADED_ADAM_BYTES, OFFLOADED_ADAM_RATE, ZERO_3_BLOCK_SECONDS
from megaclip.planner.memory import loss_sizes, plan_memory, settled, store_bytes
from megaclip.planner.towers import forward_seconds, tower_work
from megaclip.planner.traffic import disk_traffic, feature_traffic, offload_traffic, parameter_traffic
from megaclip.planner.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; the terms as they would be alone, and the whole with what overlaps."""

    forward: float
    """Towers without graph; 0 if there is one chunk."""
    forward_again: float
    """Towers with their graph."""
    backward: float
    loss: float
    features: float
    """Features and their gradients between ranks."""
    parameters: float
    """Gradients and parameters between ranks."""
    copies: float
    """Samples to the GPU."""
    disk: float
    """The step store's file written and read; 0 if images wait elsewhere."""
    decoding: float
    """Samples read, decoded and cropped."""
    host: float
    """DeepSpeed's hooks at ZeRO-3, while the GPU works or waits."""
    offload: float
    """Parameters, gradients and blocks' inputs between host and GPU."""
    swap: float
    """What ZeRO-3 offloads to disk written and read."""
    optimizer: float
    """The optimizer's step in host memory; on the GPU it is short."""
    features_hidden: bool
    parameters_hidden: bool
    disk_hidden: bool
    global_batch: int

    @property
    def towers(self) -> float:
        return self.forward + self.forward_again + self.backward

    @property
    def total(self) -> float:
        loss = max(self.loss, self.features) if self.features_hidden else self.loss + self.features
        behind, added = [self.towers, self.host, self.copies], [loss, self.offload, self.swap, self.optimizer]
        (behind if self.parameters_hidden else added).append(self.parameters)
        (behind if self.disk_hidden else added).append(self.disk)
        return max(max(behind) + sum(added), self.decoding)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.total

    @property
    def dominant(self) -> str:
        """The term that would help most if it were faster."""
        terms = {
            "towers": self.towers,
            "loss": self.loss,
            "communication": self.features + self.parameters,
            "data": max(self.copies, self.disk, self.decoding),
            "disk": self.swap,
            "host": self.host + self.offload + self.optimizer,
        }
        return max(terms, key=lambda name: terms[name])


def plan_time(workload: Workload, cluster: Cluster) -> StepTime:
    """The step's terms on one rank of `cluster`, at its rates."""
    workload = settled(workload, cluster)
    rates, batch = cluster.rates, workload.local_batch
    forward = again = backward = 0.0
    for sample, parameters in zip(forward_seconds(workload, rates), workload.parameters, strict=True):
        seconds = batch * sample
        again += seconds
        if parameters.trained:
            forward += seconds if workload.cached else 0.0
            backward += (3 if workload.checkpointing else 2) * seconds
    link = rates.link if cluster.hosts == 1 else min(rates.link, rates.network)
    again_read = workload.reads_images_twice
    sizes = loss_sizes(workload)
    loss_operations = LOSS_COSTS[workload.loss].products[workload.reduction] * sizes.logits * sizes.embed_dim
    return StepTime(
        forward=forward,
        forward_again=again,
        backward=backward,
        loss=loss_operations / rates.loss_flops,
        features=feature_traffic(workload).total / link,
        parameters=parameter_traffic(workload) / link,
        copies=(1 + again_read) * store_bytes(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        disk=_disk_seconds(workload, cluster),
        decoding=(1 + (again_read and workload.data_offload == "reread"))
        * batch
        / (rates.decoded * max(1, workload.workers)),
        host=_host_seconds(workload),
        offload=offload_traffic(workload) / rates.host_to_device if cluster.gpu_memory else 0.0,
        swap=cluster.gpus_per_host * disk_traffic(workload) / rates.disk_write,
        optimizer=_optimizer_seconds(workload),
        features_hidden=workload.exchange == "ring" and cluster.hides_exchanges,
        parameters_hidden=workload.zero.overlap_comm and not workload.coalesce,
        disk_hidden=bool(cluster.gpu_memory),
        global_batch=workload.global_batch,
    )


def _disk_seconds(workload: Workload, cluster: Cluster) -> float:
    """All ranks of a host write the step's images once and read them in every pass."""
    if plan_memory(workload, cluster).data_store != "disk":
        return 0.0
    passes = 2 if workload.reads_images_twice else 1
    return (1 + passes) * cluster.gpus_per_host * store_bytes(workload) / cluster.rates.disk_write


def _host_seconds(workload: Workload) -> float:
    if workload.zero.stage != 3:
        return 0.0
    visits = 0
    for work in tower_work(workload):
        passes = 1 + (bool(work.parameters.trained) * (workload.cached + 1 + bool(workload.checkpointing)))
        visits += work.chunks * passes * work.tower.layers
    return visits * ZERO_3_BLOCK_SECONDS


def _optimizer_seconds(workload: Workload) -> float:
    if workload.zero.offload_optimizer == "none":
        return 0.0
    return workload.trained / workload.world_size * OFFLOADED_ADAM_BYTES / OFFLOADED_ADAM_RATE
