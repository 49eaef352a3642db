"""Numbers in the formulas that come from measurements or from other projects' code, each with its source.

Memory of the device is counted as by `torch.cuda.max_memory_allocated`, unless a name specifies something else.
"""

MIB = 2**20
GIB = 2**30

CUBLAS_WORKSPACES = 2 * 32 * MIB
"""Bytes of cuBLAS's workspaces: 32 MiB on Hopper (PyTorch's default CUBLAS_WORKSPACE_CONFIG there) for each of two
threads that multiply, the main one and autograd's."""

OUTSIDE_ALLOCATOR = 2 * GIB
"""Bytes of device memory outside PyTorch's allocator: the CUDA context, loaded kernels, NCCL's buffers, and the
allocator's fragments. A plan must fit into the device's memory without them."""

HOST_PROCESS = 4 * GIB
"""Bytes of host memory per rank without any data: PyTorch with CUDA, DeepSpeed, pinned staging."""
HOST_PROCESS_CPU = GIB
"""Bytes of host memory per rank without any data if training runs on the CPU."""
HOST_WORKER = GIB // 4
"""Bytes of host memory of one loader process that it does not share with the rank that forked it."""
HOST_MARGIN = 0.8
"""Share of a host's free memory and disk that a plan may use; checkpoints and other programs need the rest."""
GPU_DECODER = 256 * MIB
"""Bytes on the GPU of the images that --image-decoder gpu decodes at a time: their pixels
(`megaclip.data.gpu_decoder.GROUP_BYTES`), the rows that are resized, and the results."""
EVALUATED_TEXTS = 256
"""Prompts that a rank encodes at a time for zero-shot classification (`megaclip.evaluation.Evaluator`)."""
EVALUATION_TILES = 128 * MIB
"""Bytes of the similarities that an evaluation holds at a time (`megaclip.evaluation.ranking.TILE_BUDGET_MIB`)."""

EMBEDDINGS_SHARE = 0.1
"""Share of a GPU's memory above which embeddings and their gradients are kept in host memory."""

PRODUCT_SHARE = 0.94
"""Rate of a tower's matrix products divided by that of a large square product. This number and MEMORY_SHARE are fitted
to towers of widths from 768 to 3,072 on H200s: ViT-B/16's image tower takes 126.5 ms for 512 images, forward and
backward, and the others are in tests/unit/planner/h200_runs.json."""
MEMORY_SHARE = 0.58
"""Share of a GPU's memory bandwidth that norms, activation functions and sums reach."""
ATTENTION_SHARE = 0.23
"""Rate of attention divided by that of a large product, counting whole tiles: one layer of ViT-B/16, 512 images,
forward and backward in 1.82 ms on an H200 (cuDNN)."""
ATTENTION_TILE = 128
"""Tokens of a tile of attention. A sequence of 257 tokens takes as long as one of 384."""
ATTENTION_CHANNELS = 64
"""Channels per head are computed in multiples of this number: 104 take as long as 128."""
TEXT_FACTOR = 1.35
"""Measured time of the text tower divided by its time at the rates above: 512 captions of ViT-B/16 take 34 ms, forward
and backward, on an H200. The cause is not known."""
COMPILED_TIME = {"towers": (0.926, 0.79), "blocks": (0.954, 0.79), "open_clip": (0.92, 0.92)}
"""Time of the compiled image tower and text tower divided by that of plain PyTorch, if the image tower is one graph and
if only its blocks are graphs: forward and backward, 512 samples of ViT-B/16 on an H200, 119.4 and 123.1 over
129.0 ms, and 27.2 over 34.5 ms. open_clip's modules: whole steps of open_clip 4.2.0.dev0, ViT-B/16 at 4,096 and
ViT-B/32 at 16,384 (2,124 and 2,332, 5,092 and 5,493 samples/s); its other towers were not measured."""
SHORT_ATTENTION_TIME = 0.97
"""Time of MegaCLIP's compiled towers on Hopper GPUs with its own kernels for attention of short sequences, divided by
that with PyTorch's. This number and QUACK_TIME are fitted to whole steps on H200s and H100s: ViT-B/16, ViT-L/14 and
PE-Core-L-14-336 in one chunk, and ViT-B/32 at 16,384 (docs/performance.md)."""
QUACK_TIME = 0.91
"""Time of MegaCLIP's compiled towers on Hopper GPUs with the products of quack-kernels, divided by that without."""
RECOMPUTE_TIME = 1.018
"""Time of compiled towers with selective recomputation divided by their time without it: whole steps of one chunk on an
H200, ViT-B/16 at 1,024 (3,676 and 3,610 samples/s) and ViT-L/14 at 256 (895 and 881)."""
LEAST_CUT_CHUNKS = 8
"""Number of cut text chunks that save 59 % of the text positions; four save 52 % (docs/huge_batches.md). With fewer,
larger chunks that are not divided into pieces, the text tower encodes more padding."""
RECOMPUTE_SHARE = 0.06
"""Smallest share of a step's image chunks whose graphs must be kept in addition for selective recomputation to save
time: a second forward pass is a third of a chunk's time, and the recomputation takes RECOMPUTE_TIME."""
COMPILE_LAYER_SECONDS = 2.2
"""Seconds per layer to compile a whole tower, with and without a graph for the backward pass: 26.2 s for the image
tower of ViT-B/16 beside an H200."""
COMPILE_BLOCKS_SECONDS = 8.0
"""Seconds to compile the blocks of a tower for one shape, with and without a graph for the backward pass. The first
step of ViT-B/16 in one chunk took 15.7 s with compiled blocks in both towers."""
KEPT_GRAPHS_MARGIN = 0.1
"""Share of a GPU's usable memory that a plan with kept graphs leaves free: planned peaks are within a tenth of those
measured (docs/planning.md)."""
LOSS_SHARE = 0.8
"""Share of a GPU's product rate that the loss reaches: 0.73 to 0.89 on H200 (docs/performance.md)."""
LINK_SHARE = 0.35
"""Share of the maker's rate of NVLink that NCCL's collectives reach with messages of 15 to 110 MB, with the time in
which they wait for the slower rank. It is fitted to the sums of ViT-bigG-14 and ViT-5B-14, split over two H200s. An
all-gather and a reduce-scatter of 302 MB add 1.6 ms to the loss of four H200s, a share of 0.4 (docs/performance.md)."""
WIDE_SUMS_GAIN = 2.0
"""Rate of sums over four or more GPUs with NVLink, relative to LINK_SHARE: those of ViT-5B-14 at T = 4 on four H200s
reach 0.7 of the maker's rate, as an all-reduce of 118 MB alone does."""

ZERO_3_BLOCK_SECONDS = 3.85e-3
"""Seconds of host time that DeepSpeed 0.19 takes around one block in one pass at ZeRO-3: ViT-L/14 in chunks of 128 on
one H200, limited by the host, takes 4.5 s for 1,152 of them and the update."""
ZERO_3_GATHER_SECONDS = 0.7e-3
"""Seconds of host time on top of ZERO_3_BLOCK_SECONDS if several ranks share the parameters. One rank gathers nothing.
ViT-bigG-14 and ViT-5B-14 on two H200s: 2.6 s for 480 blocks and 3.2 s for 608, with the update. In these runs and in
the one above, DeepSpeed gathered all parameters in every pass. Since then they stay gathered."""
ZERO_3_REDUCTION_SECONDS = 0.15e-3
"""Seconds per parameter tensor that the GPU waits for DeepSpeed's reduction at the end of a backward pass at ZeRO-3, if
several ranks share the gradients: ViT-B/16 in eight image chunks on four GPUs takes 0.30 (H200) and 0.32 s (H100) more
if every backward pass reduces its 197 or 200 tensors."""
GROUPED_UPDATE_SECONDS = 2.1e-3
"""Seconds of host time of the grouped update (`megaclip.zero.update`) at ZeRO-0 to 2."""
GROUPED_UPDATE_BYTES = 56
"""Bytes per parameter of this rank that the grouped update reads and writes on the GPU. Both are fitted to ViT-B/16 and
ViT-L/14 at ZeRO-1 on two H200s, 3.6 and 6.4 ms. On one H200 they take 6.0 and 17.6 ms, planned 5.1 and 10.7."""
UPDATE_TENSOR_SECONDS = 0.11e-3
"""Seconds of host time that an update at ZeRO-3 takes per parameter tensor, limited by kernel launches: DeepSpeed's own
update of ViT-B/16 with 397 tensors takes 44 ms on one H200. The plan is an upper bound for the grouped update."""
UPDATE_BYTES = 104
"""Bytes per trained parameter that DeepSpeed's own update reads and writes on the GPU: 5.6 ms for the 150 M of ViT-B/16
on an H200."""
OFFLOADED_ADAM_BYTES = 28
"""Bytes per parameter that Adam in host memory reads and writes: master, two moments, gradient."""
OFFLOADED_ADAM_RATE = 32e9
"""Bytes per second of Adam in host memory on one rank: ViT-g/14 on the hosts of one and two H200s, 1.2 and 0.5 s per
step."""

CACHED_PER_CORE = 17_800.0
"""Samples per second and core of the loader if it reads image features from a cache: captions of 12 words, one core of
an AMD EPYC (Zen 5), where it decodes 352 images."""
DECODED_PER_CORE = 340.0
"""Samples per second and core of the loader: JPEG files of 384 x 480 pixels (67 KB), cropped and resized to 224, in 14
processes on 16 virtual cores beside an H100. `megaclip inspect` measures the rate for other files and machines."""
