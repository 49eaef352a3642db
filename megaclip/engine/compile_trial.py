"""Measure whether torch.compile makes the towers faster, before a run with megaclip.compile "measure" starts.

The towers of timm, Hugging Face and open_clip are too many for a table of gains. So a copy of the towers, with random
weights, runs a chunk forward and backward as plain PyTorch and compiled. When the run compiles its own towers, it finds
most of the compiled code in the cache on disk.
"""

import functools
import gc
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaclip.comm.collectives import gather_objects
from megaclip.comm.machine import seconds
from megaclip.errors import first_line
from megaclip.models import DualEncoder, build_model
from megaclip.models.compilation import report_compilation
from megaclip.planner import Workload

WORTHWHILE = 0.97
"""Largest time of compiled towers divided by that of plain PyTorch with which a run compiles. It is below 1, so that
the noise of a measurement rarely changes the decision when a run is resumed."""


def compiled_is_faster(workload: Workload, device: torch.device) -> tuple[bool, str]:
    """Return whether a run should compile its towers, and the reason. Every rank calls it; the answers are equal.

    A failed measurement, such as a failed compilation or too little memory for the copy, is a reason not to compile.
    """
    try:
        own: tuple[float, float] | str = _measured(workload, device)
    except Exception as error:  # also those of compilers, which compile backward passes and kernels when they first run
        own = first_line(error)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    of_ranks = gather_objects(own)
    if failed := [each for each in of_ranks if isinstance(each, str)]:
        return False, f"the gain could not be measured: {failed[0]}"
    plain, compiled = map(max, zip(*of_ranks, strict=True))
    gain = f"a chunk takes {1e3 * plain:.1f} ms as plain PyTorch and {1e3 * compiled:.1f} ms compiled, as measured now"
    return compiled < WORTHWHILE * plain, gain


def _measured(workload: Workload, device: torch.device) -> tuple[float, float]:
    """Return the seconds of one chunk in each trained tower, forward and backward, plain and compiled."""
    dtype = torch.bfloat16 if workload.compute_bytes == 2 else torch.float32
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # by default of every GPU
        model = build_model(workload.model).to(device, dtype).train()
        for name, unlocked in (("image", workload.image_unlocked), ("text", workload.text_unlocked)):
            if unlocked is not None:
                model.lock_tower(name, unlocked)
        if workload.checkpointing:
            model.set_activation_checkpointing(functools.partial(checkpoint, use_reentrant=False))
        runs = _chunks(model, workload, device)
        plain = sum(median(seconds(run)) for run in runs)
        with report_compilation("measure", 0):
            model.compile_towers(workload.compiles_image_tower, lambda block: True)
            compiled = sum(median(seconds(run)) for run in runs)
    return plain, compiled


def _chunks(model: DualEncoder, workload: Workload, device: torch.device) -> list[Callable[[], None]]:
    """Return for each trained tower a function that runs a chunk of random samples forward and backward."""
    size, text, batch = workload.model.vision_cfg.image_size, workload.model.text_cfg, workload.batch
    images = torch.randn(batch.micro_batch, 3, size, size, dtype=model.logit_scale.dtype, device=device)
    tokens = torch.randint(2, model.vocab_size, (batch.text_micro_batch, text.context_length), device=device)

    def run(tower: nn.Module, inputs: Tensor) -> None:
        outputs = tower(inputs)
        features = outputs[0] if isinstance(outputs, tuple) else outputs
        features.float().square().mean().backward()

    return [
        functools.partial(run, tower, inputs)
        for tower, inputs in ((model.visual, images), (model.text, tokens))
        if any(parameter.requires_grad for parameter in tower.parameters())
    ]
