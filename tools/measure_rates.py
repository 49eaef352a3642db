"""Measure this machine's rates for the planner: products, attention, memory, loss, copies, links and disk.

usage: python tools/measure_rates.py rates.json [--model ViT-B-32] [--micro-batch 256]

`megaclip plan --rates rates.json` reads the file. Start it under a launcher with all GPUs of a host to measure the
links too. On a CPU it measures in float32 and at smaller sizes.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from PIL import Image

from megaclip.checkpoint.output import prepare_file, writing
from megaclip.comm.groups import resolve
from megaclip.comm.machine import seconds, slowest_link
from megaclip.commands.argument_types import integer
from megaclip.data import ImageTransform
from megaclip.engine.process_group import start_process_group
from megaclip.errors import MegaclipError
from megaclip.models import ModelConfig, VisionConfig, load_model_config
from megaclip.ops.tiles import tile_grads, tile_stats
from megaclip.ops.types import Terms
from megaclip.planner.tower_costs import attention_operations

_DECODED_IMAGES = 64
_WRITTEN_BYTES = 2**29


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="RATES.json", help="file for the rates")
    parser.add_argument("--model", default="ViT-B-32", help="the model whose image tower has the sizes to time")
    parser.add_argument("--micro-batch", type=integer(1), help="samples to time at once (default 256; 8 on a CPU)")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher's
    arguments = parser.parse_args()
    try:
        return _measure(arguments.out, arguments.model, arguments.micro_batch)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _measure(out: Path, model_name: str, micro_batch: int | None) -> int:
    prepare_file(out)
    start_process_group()
    model = load_model_config(model_name, "own")
    assert isinstance(model, ModelConfig), "the measured shapes are those of MegaCLIP's towers"
    measured = measure_rates(model, micro_batch or (256 if torch.cuda.is_available() else 8), out.absolute().parent)
    if dist.get_rank() == 0:
        text = json.dumps({"machine": machine_name(), "rates": measured}, indent=1)
        with writing(out):
            out.write_text(text)
        print(text)
        missing = "network" if "link" in measured else "link (it needs several ranks) and network"
        print(f"not measured: {missing}; with --rates they are those of --gpu, or of --link and --network")
    dist.destroy_process_group()
    return 0


def measure_rates(model_config: ModelConfig, micro_batch: int, folder: Path) -> dict[str, float]:
    """Return rates by their names in `planner.Rates`: all except the network rate and, on one rank, the link rate.

    Every rank calls it and receives its own rates. The link rate is that of the slowest rank.

    Args:
        model_config: the model whose image tower has the sizes to time.
        micro_batch: samples whose attention and norms are timed at once.
        folder: a folder on the disk to time.
    """
    device = torch.device(get_accelerator().current_device_name())
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    tower = model_config.vision_cfg
    measured = dict(
        product_flops=_product(device, dtype, 8192 if gpu else 1024),
        attention_flops=_attention(tower, micro_batch, device, dtype),
        memory=_memory(tower, micro_batch, device, dtype),
        loss_flops=_loss(device, dtype, 16384 if gpu else 1024, model_config.embed_dim),
        host_to_device=_copy(device, 2**28 if gpu else 2**26),
        disk_write=_disk(folder, _WRITTEN_BYTES),
        decoded=_decoding(model_config.vision_cfg.image_size),
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        measured["link"] = slowest_link(resolve(None), device)
    return measured


def machine_name() -> str:
    """Return the name of the measured machine."""
    if get_accelerator().device_name() == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _product(device: torch.device, dtype: torch.dtype, side: int) -> float:
    factor = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _median_seconds(lambda: factor @ factor)


def _attention(tower: VisionConfig, samples: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of attention in one layer, forward and backward, by the planner's formula."""
    tokens = 1 + tower.grid_size**2
    shape = (samples, tokens, tower.heads, tower.head_width)
    query, key, value = (torch.randn(shape, device=device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient = torch.ones_like(query)

    def forward_and_backward() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    taken = _median_seconds(forward_and_backward)
    return 3 * samples * attention_operations(tokens, tokens, tower.heads, tower.head_width) / taken


def _memory(tower: VisionConfig, samples: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the bytes per second of a layer norm, GELU and a residual sum over the tokens, forward and backward."""
    x = torch.randn(samples, 1 + tower.grid_size**2, tower.width, device=device).to(dtype).requires_grad_()
    gradient = torch.ones_like(x)
    taken = _median_seconds(lambda: torch.autograd.grad(x + F.gelu(F.layer_norm(x, x.shape[2:])), x, gradient))
    # Forward: norm 2, GELU 2, sum 3. Backward: norm 3, GELU 3, sum of both gradients of x 3.
    return 16 * x.numel() * dtype.itemsize / taken


def _loss(device: torch.device, dtype: torch.dtype, batch: int, embed_dim: int) -> float:
    x, y = (torch.nn.functional.normalize(torch.randn(batch, embed_dim, device=device)).to(dtype) for _ in range(2))

    def forward_and_backward() -> None:
        row, col = tile_stats(x, y, 14.0, 14.0, diagonal=0)
        row_terms, col_terms = Terms(14.0, row, 1 / batch), Terms(14.0, col, 1 / batch)
        tile_grads(x, y, row_terms, col_terms, diagonal=0, need_dots=False)

    return 8 * batch**2 * embed_dim / _median_seconds(forward_and_backward)


def _copy(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _median_seconds(lambda: target.copy_(source, non_blocking=True))


def _disk(folder: Path, size: int) -> float:
    block = os.urandom(2**22)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - started)


def _decoding(size: int) -> float:
    """Return the number of JPEG images, of twice the model's size, that this process decodes and crops per second."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (size // 4, size // 4, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(coarse).resize((2 * size, 2 * size)).save(encoded, "JPEG", quality=90)
    content, transform = encoded.getvalue(), ImageTransform(size, training=True)
    return _DECODED_IMAGES / _median_seconds(
        lambda: [transform(content, seeds=(0, 0, index)) for index in range(_DECODED_IMAGES)]
    )


def _median_seconds(run: Callable[[], Any]) -> float:
    return statistics.median(seconds(run))


if __name__ == "__main__":
    sys.exit(main())
