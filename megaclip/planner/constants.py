"""Every number that the formulas take from measurements, each with where it comes from.

Memory of the device is what `torch.cuda.max_memory_allocated` counts, unless a name says otherwise.
"""

MIB = 2**20
GIB = 2**30

CUBLAS_WORKSPACES = 2 * 32 * MIB
"""cuBLAS takes 32 MiB on Hopper (PyTorch's default CUBLAS_WORKSPACE_CONFIG there), once for each thread that
multiplies: the main one and autograd's."""

OUTSIDE_ALLOCATOR = 2 * GIB
"""Device memory that the allocator does not see: the CUDA context and loaded kernels, NCCL's buffers, and the
allocator's fragments. The fit is checked against the device's memory less this."""

HOST_PROCESS = 4 * GIB
"""Host memory of one rank before any data: PyTorch with CUDA, DeepSpeed, pinned staging."""
HOST_PROCESS_CPU = GIB
"""The same where training runs on the CPU."""
HOST_WORKER = GIB // 4
"""Host memory of one loader process that it does not share with the rank it was forked from."""
PREFETCHED_BATCHES = 2
"""Chunks that each loader process holds ready (PyTorch's prefetch_factor)."""
HOST_MARGIN = 0.8
"""Share of a host's free memory and disk that a plan and the step store may use: the rest is for checkpoints and the
unforeseen."""
EVALUATED_TEXTS = 256
"""Prompts that a rank encodes at a time for zero-shot classification (`megaclip.evaluation.evaluate`)."""
EVALUATION_TILES = 128 * MIB
"""Memory for the similarities of an evaluation (likewise)."""
EMBEDDINGS_SHARE = 0.1
"""Of the GPU's memory: embeddings and gradients that would take more wait in host memory."""

IMAGE_SHARE = 0.544
"""Share of a GPU's product rate that a ViT's forward and backward passes reach: ViT-B/16, 512 images in 126.5 ms on an
H200; `--calibrate` measures it."""
TEXT_SHARE = 0.343
"""The same of the narrower text tower: 512 captions in 34 ms."""
LOSS_SHARE = 0.8
"""The same for the loss: 0.73 to 0.89 on H200 (docs/performance.md)."""
PEER_LOSS_SHARES = {"open_clip": 0.36, "Inf-CL": 0.03}
"""The same of the peers at B = 32,768, D = 512 (docs/performance.md)."""

PEER_ACTIVATIONS = {"amp_bf16": 1.22, "pure_bf16": 1.08}
"""What open_clip's towers keep over what ours keep: ViT-B/16, 512 images on an H200: 33,400 and 29,510 over 27,307
MiB."""
PEER_TOWER_SPEED = 0.64
"""Our towers' time over open_clip's under autocast, forward and backward: likewise, 126.5 over 198.5 ms for images;
text is taken to be alike."""

ZERO_3_BLOCK_SECONDS = 4e-3
"""Host time that DeepSpeed 0.19 spends around one block in one pass at ZeRO-3: ViT-L/14 in chunks of 128 on one H200,
whose GPU waits for it, takes 4.5 s for 1,152 of them."""
OFFLOADED_ADAM_BYTES = 28
"""Per parameter that Adam in host memory reads and writes: master, two moments, gradient."""
OFFLOADED_ADAM_RATE = 32e9
"""Bytes per second of that on one rank: ViT-g/14 on the hosts of one and two H200s, 1.2 and 0.5 s a step."""

DECODED_PER_CORE = 800.0
"""JPEG images decoded, cropped and resized to 224 pixels per second and core."""
