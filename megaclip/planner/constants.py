"""Numbers in the formulas that come from measurements or from others' code, each with its source.

Memory of the device is what `torch.cuda.max_memory_allocated` counts, unless a name says otherwise.
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
"""Bytes of host memory per rank without any data where training runs on the CPU."""
HOST_WORKER = GIB // 4
"""Bytes of host memory of one loader process that it does not share with the rank that forked it."""
PREFETCHED_BATCHES = 2
"""Chunks that each loader process holds ready (PyTorch's prefetch_factor)."""
HOST_MARGIN = 0.8
"""Share of a host's free memory and disk that a plan may use; checkpoints and other programs need the rest."""
EVALUATED_TEXTS = 256
"""Prompts that a rank encodes at a time for zero-shot classification (`megaclip.evaluation.evaluate`)."""
EVALUATION_TILES = 128 * MIB
"""Bytes of the similarities that an evaluation holds at a time (`megaclip.evaluation.evaluate`)."""
EMBEDDINGS_SHARE = 0.1
"""Share of a GPU's memory above which embeddings and their gradients are kept in host memory."""

IMAGE_SHARE = 0.544
"""Share of a GPU's product rate that a ViT's forward and backward passes reach: ViT-B/16, 512 images in 126.5 ms on an
H200. `--calibrate` measures it."""
TEXT_SHARE = 0.343
"""Share of a GPU's product rate that the narrower text tower reaches: 512 captions in 34 ms."""
LOSS_SHARE = 0.8
"""Share of a GPU's product rate that the loss reaches: 0.73 to 0.89 on H200 (docs/performance.md)."""

ZERO_3_BLOCK_SECONDS = 4e-3
"""Seconds of host time that DeepSpeed 0.19 takes around one block in one pass at ZeRO-3: ViT-L/14 in chunks of 128 on
one H200, limited by the host, takes 4.5 s for 1,152 of them."""
OFFLOADED_ADAM_BYTES = 28
"""Bytes per parameter that Adam in host memory reads and writes: master, two moments, gradient."""
OFFLOADED_ADAM_RATE = 32e9
"""Bytes per second of Adam in host memory on one rank: ViT-g/14 on the hosts of one and two H200s, 1.2 and 0.5 s per
step."""

DECODED_PER_CORE = 800.0
"""JPEG images decoded, cropped and resized to 224 pixels, per second and core."""
