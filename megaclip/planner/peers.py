"""The same training in open_clip's and Inf-CL's released code, by the formulas of what that code keeps on a GPU.

Under data parallelism every GPU has all parameters, gradients, Adam's two moments and, among several, DDP's buckets.
With automatic mixed precision these are float32 beside bf16 copies of the weights, and pixels wait as float32; with
pure bf16 everything is bf16. What differs between the methods:

* open_clip: the whole local batch in one graph, or, with --accum-freq, one chunk in the graph while all chunks' pixels
  stay on the GPU (`accum_images` in its train.py) and the loss, over all logits, runs once per chunk.
* Inf-CL's released trainer (its data offload is commented out): the gradient cache, all pixels on the GPU, the loss
  once. Its paper's peaks (Table 1, ViT-L/14) grow by what this formula says and lie within 1% of it.
"""

from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import CUBLAS_WORKSPACES, PEER_ACTIVATIONS, PEER_LOSS_SHARES, PEER_TOWER_SPEED
from megaclip.planner.losses import LossSizes, inf_cl_loss_bytes, open_clip_loss_bytes
from megaclip.planner.towers import forward_seconds, towers
from megaclip.planner.workload import Workload

OPEN_CLIP = "open_clip"
OPEN_CLIP_ACCUMULATING = "open_clip --accum-freq"
INF_CL = "Inf-CL"
PEERS = (OPEN_CLIP, OPEN_CLIP_ACCUMULATING, INF_CL)


def peer_gpu_bytes(workload: Workload, method: str, *, autocast: bool = True) -> float:
    """Peak of one GPU; `method` is one of PEERS, micro-batches the workload's; autocast: amp_bf16, else pure_bf16."""
    image, text = towers(workload)
    width = 4 if autocast else 2
    buckets = width if workload.world_size > 1 else 0
    parameters = workload.total * (4 * width + buckets + (2 if autocast else 0))
    batch = workload.local_batch
    micro_batch = batch if method == OPEN_CLIP else min(workload.image_micro_batch, batch)
    sizes = LossSizes(batch, workload.model.embed_dim, workload.world_size, feature_bytes=width)
    waiting = text.waiting_inputs if workload.checkpointing else text.saved_bytes
    graph = waiting(micro_batch, 2) + image.backward_peak(micro_batch, 2, workload.checkpointing)
    graph *= PEER_ACTIVATIONS["amp_bf16" if autocast else "pure_bf16"]
    data = batch * (image.input_numbers * width + 8 * text.tokens)
    loss = inf_cl_loss_bytes(sizes) if method == INF_CL else open_clip_loss_bytes(sizes, autocast=autocast)
    features = 4 * sizes.features  # both towers' and their gradients
    # open_clip evaluates the loss inside the graph; the gradient cache has none at that time.
    peak = max(graph, loss) if method == INF_CL else graph + loss
    return parameters + CUBLAS_WORKSPACES + data + features + peak


def peer_step_seconds(workload: Workload, cluster: Cluster, method: str) -> float:
    """Towers and loss of one step under autocast, at the cluster's rates."""
    batch = workload.local_batch
    chunks = 1 if method == OPEN_CLIP else max(1, batch // workload.image_micro_batch)
    passes = (3 if chunks == 1 else 4) + (1 if workload.checkpointing else 0)
    seconds = passes * batch * sum(forward_seconds(workload, cluster.rates)) / PEER_TOWER_SPEED
    sizes = LossSizes(batch, workload.model.embed_dim, workload.world_size)
    # The shares were measured on 8 b B D operations, whatever a method computes.
    counted = 8 * sizes.logits * sizes.embed_dim
    if method == INF_CL:
        return seconds + counted / (cluster.rates.product_flops * PEER_LOSS_SHARES["Inf-CL"])
    return seconds + chunks * counted / (cluster.rates.product_flops * PEER_LOSS_SHARES["open_clip"])
