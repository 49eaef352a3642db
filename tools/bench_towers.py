"""Measure the towers on one GPU in bfloat16: attention backends, and torch.compile.

    python tools/bench_towers.py attention
    python tools/bench_towers.py towers --model ViT-B-16 --batch 512 --json towers.json

attention: forward and backward of `scaled_dot_product_attention`, ms, for every backend, length, mask and number of
heads. "default" is PyTorch's own choice, "triton" MegaCLIP's kernels, "best" the fastest of all. The inputs have the
layout of a block: the tokens of a sample side by side, all heads of a token side by side. In the rows "pooled", one
query per sample attends to all tokens, as in the last block; causal ones have a mask. The calls are replayed as a CUDA
graph, so the host's time for launches is left out.

towers: forward and backward of each tower, ms, and its forward pass without a graph; peak memory of the activations;
and seconds of the first call, which compiles. "plain" is PyTorch, "blocks" has all blocks except the last one compiled,
and "tower" is the whole tower as one graph.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaclip.models import ClipModel, build_model, load_model_config
from megaclip.models.blocks import ResidualBlock
from megaclip.models.compilation import compiled_class
from megaclip.ops.attention import attention, is_short

BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MODES = ("plain", "blocks", "tower")
TURN_SECONDS = 0.03
TURNS = 3

Run = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "towers"], help="table to print")
    parser.add_argument("--model", nargs="+", default=["ViT-B-16"], help="presets, for towers")
    parser.add_argument("--batch", type=int, nargs="+", default=[512], help="samples in a tower at a time")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 24, 32, 40, 50, 64, 77, 197, 257], help="lengths")
    parser.add_argument("--heads", nargs="+", default=["8x64", "12x64", "16x88"], help="heads x channels of a head")
    parser.add_argument("--captions", type=int, help="tokens of a caption, for towers (default: all)")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="for towers")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device found; this benchmark requires a GPU")
    warnings.simplefilter("ignore")  # PyTorch warns of every backend that lacks a kernel
    tables = {"attention": attention_rows, "towers": tower_rows}
    rows = []
    for row in tables[options.what](options):
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
        rows.append(row)
        if options.json:
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(options)}
            options.json.write_text(json.dumps({**record, "results": rows}, indent=1, default=str))
    return 0


def _shown(value: Any) -> str:
    return f"{value:<7.4g}" if isinstance(value, float) else f"{value!s:<7}"


def attention_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per batch, number of heads, length, mask and number of queries."""
    for batch, heads, tokens in itertools.product(options.batch, options.heads, options.tokens):
        count, width = (int(number) for number in heads.split("x"))
        for causal, pooled in itertools.product((False, True), (False, True)):
            row: dict[str, Any] = {
                "batch": batch,
                "heads": heads,
                "L": tokens,
                "mask": "causal" if causal else "none",
                "queries": "pooled" if pooled else "all",
            }
            times = {}
            for name, backend in BACKENDS.items():
                if name == "math" and not pooled:
                    continue  # it keeps L x L numbers per head
                run = _attention_call(batch, count, width, tokens, causal, pooled)
                with nullcontext() if backend is None else sdpa_kernel(backend):
                    times[name] = _graph_milliseconds(run)
            if not pooled and is_short(*2 * [torch.empty(1, 1, tokens, width)]):
                run = _attention_call(batch, count, width, tokens, causal, pooled, triton=True)
                times["triton"] = _graph_milliseconds(run)
            row |= {name: "-" if value is None else value for name, value in times.items()}
            measured = {name: value for name, value in times.items() if value is not None and name != "default"}
            yield row | {"best": min(measured, key=lambda name: measured[name], default="-")}


def _attention_call(
    batch: int, heads: int, width: int, tokens: int, causal: bool, pooled: bool, triton: bool = False
) -> Run:
    """Return a function that runs attention forward and backward on inputs in the layout of `Attention`."""
    q, k, v = (
        torch.randn(batch, length, heads * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for length in (1 if pooled else tokens, tokens, tokens)
    )
    gradient = torch.randn_like(q)
    last = torch.randint(tokens, (batch,), device="cuda")
    mask = (torch.arange(tokens, device="cuda") <= last[:, None, None, None]) if causal and pooled else None

    def run() -> None:
        queries, keys, values = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
        if triton:
            out = attention(queries, keys, values, causal)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal and not pooled)
        torch.autograd.grad(out.transpose(1, 2).flatten(2), (q, k, v), gradient)

    return run


def tower_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per model, batch, extent of the compilation and tower."""
    for described, module, inputs in _towers(options):
        run = _forward_and_backward(module, inputs)
        first = _first_seconds(run)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both = _milliseconds(run)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        without_graph = torch.no_grad()(lambda module=module, inputs=inputs: module(inputs))
        first_without_graph = _first_seconds(without_graph)
        yield described | {
            "forward+backward ms": both,
            "forward ms": _milliseconds(without_graph),
            "peak MiB": peak,
            "first s": first,
            "first forward s": first_without_graph,
        }


def _towers(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any, Tensor]]:
    """Yield the description, the tower and its inputs of each row, one tower at a time."""
    for name, batch, mode, tower in itertools.product(options.model, options.batch, options.modes, ("image", "text")):
        torch.compiler.reset()
        model = _model(name)
        module: Any = model.visual if tower == "image" else model.text
        if mode == "blocks":
            for block in model.blocks_to_compile(module):
                block.__class__ = compiled_class(ResidualBlock)
        elif mode == "tower":
            module.__class__ = compiled_class(type(module))
        described = {"model": name, "tower": tower, "batch": batch, "mode": mode}
        yield described, module, _inputs(model, tower, batch, options.captions)
        del model, module
        torch.cuda.empty_cache()


def _model(name: str) -> ClipModel:
    torch.manual_seed(0)
    model = build_model(load_model_config(name, "own"))
    assert isinstance(model, ClipModel), "the parts that are timed are those of MegaCLIP's towers"
    return model.to("cuda", torch.bfloat16)


def _inputs(model: ClipModel, tower: str, batch: int, captions: int | None) -> Tensor:
    if tower == "image":
        size = model.config.vision_cfg.image_size
        return torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
    text = model.config.text_cfg
    return torch.randint(text.vocab_size, (batch, text.context_length), device="cuda")[:, :captions]


def _forward_and_backward(module: nn.Module, x: Tensor) -> Run:
    """Return a function that runs a tower and leaves the gradients of its parameters."""
    gradients: list[Tensor] = []

    def run() -> None:
        module.zero_grad(set_to_none=True)
        output = module(x)
        if not gradients:
            gradients.append(torch.randn_like(output))
        output.backward(gradients[0])

    return run


def _first_seconds(run: Run) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _graph_milliseconds(run: Run) -> float | None:
    """Return the milliseconds of `run` on the GPU, replayed as a CUDA graph; None if no kernel does it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            print(f"  not measured: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None
    return _milliseconds(graph.replay)


def _milliseconds(run: Run) -> float:
    """Return the median milliseconds of `run` over turns of at least TURN_SECONDS, after a warm-up."""
    run()
    count = max(1, int(TURN_SECONDS / max(1e-6, _first_seconds(run))))
    times = []
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
