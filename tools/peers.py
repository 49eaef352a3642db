"""Formulas for memory, time and traffic of training with other codes.

tools/plan_sweep.py and tools/bench_comm.py print these beside this project's figures; tests compare them with published
and measured figures.

Under data parallelism every GPU has all parameters, gradients, Adam's two moments and, on several GPUs, DDP's buckets.
With automatic mixed precision these are float32 beside bf16 copies of the weights, and pixels are kept as float32; with
pure bf16 everything is bf16. The methods differ in this:

* open_clip (local loss, gather with gradient): the whole local batch in one graph; or, with --accum-freq, one chunk in
  the graph while all chunks' pixels stay on the GPU (`accum_images` in its train.py) and the loss, over all logits,
  runs once per chunk. The loss keeps all ranks' features, and both directions' logits and their gradients, b x B each.
  Under autocast the cross-entropy works in float32: 16 bytes per logit instead of 8.
* Inf-CL's released trainer (inf-cl 1.2.1; its data offload is commented out): the gradient cache, all pixels on the
  GPU, the loss once. The loss keeps float32 copies of what ranks exchange. Its own forward and backward pass, run with
  the kernels replaced by empty results, keeps 15 U (U = 4 b D bytes) for float32 features on three ranks or more, 13 on
  two, 8 on one; two more for 16-bit features. In Table 1 of its paper (arXiv:2410.17243, ViT-L/14, D = 768) the losses
  take exactly 15 U if a GB is read as 1,000 MiB, and the whole peaks are within 1% of this formula.
* DisCo-CLIP (arXiv:2304.08480): traffic only.
"""

from dataclasses import replace

from megaclip.losses.costs import Sizes, Traffic
from megaclip.planner import Cluster, Workload
from megaclip.planner.constants import CUBLAS_WORKSPACES
from megaclip.planner.towers import tower_work

OPEN_CLIP = "open_clip"
OPEN_CLIP_ACCUMULATING = "open_clip --accum-freq"
INF_CL = "Inf-CL"
PEERS = (OPEN_CLIP, OPEN_CLIP_ACCUMULATING, INF_CL)

LOSS_SHARES = {"open_clip": 0.36, "Inf-CL": 0.03}
"""Share of a GPU's product rate that the peers' losses reach at B = 32,768, D = 512 (docs/performance.md)."""
ACTIVATIONS = {"amp_bf16": 1.22, "pure_bf16": 1.08}
"""Bytes that open_clip's towers keep divided by those that MegaCLIP's keep: ViT-B/16, 512 images on an H200: 33,400 and
29,510 over 27,307 MiB."""
TOWER_SPEED = 0.64
"""Time of MegaCLIP's towers divided by that of open_clip's under autocast, forward and backward: ViT-B/16, 512 images
on an H200, 126.5 over 198.5 ms. The text towers are assumed to have the same ratio."""


def open_clip_loss_bytes(sizes: Sizes, *, autocast: bool = True) -> float:
    """Return the peak of open_clip's ClipLoss with --local-loss --gather-with-grad."""
    gathered = 2 * sizes.world_size * sizes.features if sizes.world_size > 1 else 0
    return (16 if autocast or sizes.feature_bytes == 4 else 8) * sizes.logits + gathered + 2 * sizes.features


def inf_cl_loss_bytes(sizes: Sizes) -> float:
    """Return the peak of Inf-CL's loss over both directions."""
    units = {1: 8, 2: 13}.get(sizes.world_size, 15) + (2 if sizes.feature_bytes == 2 else 0)
    return units * sizes.unit


def open_clip_traffic(sizes: Sizes) -> Traffic:
    """Return open_clip's traffic: both features gathered, both gradients reduce-scattered."""
    return Traffic(features=2 * sizes.side, gradients=2 * sizes.side, scalars=0)


def disco_clip_traffic(sizes: Sizes) -> Traffic:
    """Return DisCo-CLIP's traffic: both features gathered, both gradients all-reduced whole."""
    return Traffic(features=2 * sizes.side, gradients=4 * sizes.side, scalars=0)


def peer_gpu_bytes(workload: Workload, method: str, *, autocast: bool = True) -> float:
    """Return the peak of one GPU with the workload's micro-batches.

    method: one of PEERS. autocast: open_clip's precision amp_bf16, else pure_bf16.
    """
    image, text = (work.costs for work in tower_work(replace(_uncompiled(workload), bf16=True)))
    width = 4 if autocast else 2
    buckets = width if workload.world_size > 1 else 0
    parameters = workload.total * (4 * width + buckets + (2 if autocast else 0))
    batch = workload.local_batch
    micro_batch = batch if method == OPEN_CLIP else min(workload.batch.micro_batch, batch)
    sizes = Sizes(workload.world_size, batch, workload.model.embed_dim, feature_bytes=width)
    kept_text = text.backward.block_inputs if workload.checkpointing else text.graph
    graph = micro_batch * (kept_text + image.backward_peak)
    graph *= ACTIVATIONS["amp_bf16" if autocast else "pure_bf16"]
    data = batch * (width * workload.image_bytes + 2 * workload.caption_bytes)  # numbers of images, int64 tokens
    loss = inf_cl_loss_bytes(sizes) if method == INF_CL else open_clip_loss_bytes(sizes, autocast=autocast)
    features = 4 * sizes.features  # both towers' and their gradients
    # open_clip evaluates the loss inside the graph; the gradient cache has no graph at that time.
    peak = max(graph, loss) if method == INF_CL else graph + loss
    return parameters + CUBLAS_WORKSPACES + data + features + peak


def peer_step_seconds(workload: Workload, cluster: Cluster, method: str) -> float:
    """Return the seconds of towers and loss in one step under autocast, at the cluster's rates."""
    batch = workload.local_batch
    chunks = 1 if method == OPEN_CLIP else max(1, batch // workload.batch.micro_batch)
    forwards = 1 if chunks == 1 else 2
    with_padding = _uncompiled(workload).with_megaclip(cut_captions=False)  # no peer cuts captions
    each = (work.seconds(cluster) for work in tower_work(with_padding))
    seconds = batch * sum(forwards * tower.forward + tower.backward for tower in each) / TOWER_SPEED
    sizes = Sizes(workload.world_size, batch, workload.model.embed_dim, feature_bytes=2)
    # The shares were measured for 8 b B D operations, independently of what a method computes.
    counted = 8 * sizes.logits * sizes.embedding
    if method == INF_CL:
        return seconds + counted / (cluster.rates.product_flops * LOSS_SHARES["Inf-CL"])
    return seconds + chunks * counted / (cluster.rates.product_flops * LOSS_SHARES["open_clip"])


def _uncompiled(workload: Workload) -> Workload:
    """Return the workload without megaclip.compile: ACTIVATIONS and TOWER_SPEED are ratios to plain PyTorch towers."""
    return workload.with_megaclip(compile=False)
