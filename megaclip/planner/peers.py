"""The same training in open_clip's and Inf-CL's released code, by the formulas of what that code keeps on a GPU.

Both train with automatic mixed precision under data parallelism: float32 parameters, gradients, DDP's buckets and two
Adam moments on every GPU, bf16 copies of the weights while they are used, bf16 activations. What differs:

* open_clip: the whole local batch in one graph, or, with --accum-freq, one chunk in the graph while all chunks' pixels
  stay on the GPU in float32 (`accum_images` in its train.py) and the loss, over all logits, runs once per chunk.
* Inf-CL's released trainer (its data offload is commented out): the gradient cache, all pixels on the GPU in float32,
  the loss once.
"""

from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import CUBLAS_WORKSPACES, PEER_LOSS_SHARES
from megaclip.planner.losses import (
    LossSizes,
    inf_cl_loss_bytes,
    open_clip_loss_bytes,
)
from megaclip.planner.towers import towers
from megaclip.planner.workload import Workload

OPEN_CLIP = "open_clip"
OPEN_CLIP_ACCUMULATING = "open_clip --accum-freq"
INF_CL = "Inf-CL"
PEERS = (OPEN_CLIP, OPEN_CLIP_ACCUMULATING, INF_CL)

_PIXEL_BYTES = 4  # normalised float32 images


def peer_gpu_bytes(workload: Workload, method: str) -> float:
    """Peak of one GPU; `method` is one of PEERS. Micro-batches are the workload's."""
    image, text = towers(workload)
    parameters = workload.total * (4 + 4 + 4 + 8 + 2)
    batch, micro_batch = workload.local_batch, min(workload.image_micro_batch, workload.local_batch)
    sizes = _float32_sizes(workload)
    if method == OPEN_CLIP:
        micro_batch = batch
    graph = text.saved_bytes(micro_batch, 2) + image.backward_peak(micro_batch, 2, workload.checkpointing)
    if workload.checkpointing:
        graph -= text.saved_bytes(micro_batch, 2) - text.waiting_inputs(micro_batch, 2)
    data = batch * (image.input_numbers * _PIXEL_BYTES + text.input_bytes)
    loss = inf_cl_loss_bytes(sizes) if method == INF_CL else open_clip_loss_bytes(sizes)
    features = 4 * sizes.features  # both towers' and their gradients
    # open_clip evaluates the loss inside the graph; the gradient cache has none at that time.
    peak = max(graph, loss) if method == INF_CL else graph + loss
    return parameters + CUBLAS_WORKSPACES + data + features + peak


def peer_step_seconds(workload: Workload, cluster: Cluster, method: str) -> float:
    """Towers and loss of one step, at the cluster's rates."""
    batch = workload.local_batch
    chunks = 1 if method == OPEN_CLIP else max(1, batch // workload.image_micro_batch)
    passes = (3 if chunks == 1 else 4) + (1 if workload.checkpointing else 0)
    operations = sum(tower.forward_operations() for tower in towers(workload))
    seconds = passes * batch * operations / cluster.rates.tower_flops
    sizes = LossSizes(batch, workload.model.embed_dim, workload.world_size)
    # The shares were measured on 8 b B D operations, whatever a method computes.
    counted = 8 * sizes.logits * sizes.embed_dim
    if method == INF_CL:
        return seconds + counted / (cluster.rates.product_flops * PEER_LOSS_SHARES["Inf-CL"])
    return seconds + chunks * counted / (cluster.rates.product_flops * PEER_LOSS_SHARES["open_clip"])


def _float32_sizes(workload: Workload) -> LossSizes:
    return LossSizes(workload.local_batch, workload.model.embed_dim, workload.world_size, feature_bytes=4)
