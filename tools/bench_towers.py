"""Measure the towers on one GPU in bfloat16: attention backends, the parts of a block, and torch.compile.

    python tools/bench_towers.py attention
    python tools/bench_towers.py blocks --model ViT-B-16 --batch 512
    python tools/bench_towers.py towers --model ViT-B-16 --batch 512 --json towers.json
    python tools/bench_towers.py kernels --model ViT-B-16 --batch 512 --modes tower

attention: forward and backward of `scaled_dot_product_attention`, ms, for every backend, length, mask and number of
heads. "default" is PyTorch's own choice, "best" the fastest backend. The inputs have the layout of a block: the tokens
of a sample side by side, all heads of a token side by side. In the rows "pooled", one query per sample attends to all
tokens, as in the last block; causal ones have a mask. The calls are replayed as a CUDA graph, so the host's time for
launches is left out.

blocks: forward and backward of one block of each tower, ms: plain, compiled, and with one product instead of three for
queries, keys and values (its weight is joined in every call). Below, each part of a block alone, with its share of the
parts' sum, and TFLOP/s of its products or GB/s of the tensors that it must read and write.

towers: forward and backward of each tower, ms, and its forward pass without a graph; peak memory of the activations;
and seconds of the first call, which compiles. "plain" is PyTorch, "blocks" has all blocks except the last one compiled,
"tower" is the whole tower as one graph, and "tuned" is that graph with torch.compile's mode
"max-autotune-no-cudagraphs", which takes minutes to compile.

kernels: the kernels of one forward and backward pass of each tower that take the most time: ms, calls, and their share.
"""

import argparse
import functools
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
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaclip.models import ClipModel, build_model, compilation, load_model_config
from megaclip.models.attention import attend
from megaclip.models.blocks import Attention, Position, ResidualBlock
from megaclip.models.compilation import compiled_class
from megaclip.models.packing import Pieces

BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MODES = ("plain", "blocks", "tower", "tuned")
MOST_KERNELS = 24
TURN_SECONDS = 0.03
TURNS = 3

Run = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "blocks", "towers", "kernels"], help="table to print")
    parser.add_argument("--model", nargs="+", default=["ViT-B-16"], help="presets, for blocks and towers")
    parser.add_argument("--batch", type=int, nargs="+", default=[512], help="samples in a tower at a time")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 24, 32, 40, 50, 64, 77, 197, 257], help="lengths")
    parser.add_argument("--heads", nargs="+", default=["8x64", "12x64", "16x88"], help="heads x channels of a head")
    parser.add_argument("--captions", type=int, help="tokens of a caption, for blocks and towers (default: all)")
    parser.add_argument(
        "--modes", nargs="+", default=["plain", "blocks", "tower"], choices=list(MODES), help="for towers and kernels"
    )
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device found; this benchmark requires a GPU")
    warnings.simplefilter("ignore")  # PyTorch warns of every backend that lacks a kernel
    tables = {"attention": attention_rows, "blocks": block_rows, "towers": tower_rows, "kernels": kernel_rows}
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
            row |= {name: "-" if value is None else value for name, value in times.items()}
            measured = {name: value for name, value in times.items() if value is not None and name != "default"}
            yield row | {"best": min(measured, key=lambda name: measured[name], default="-")}


def _attention_call(batch: int, heads: int, width: int, tokens: int, causal: bool, pooled: bool) -> Run:
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
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal and not pooled)
        torch.autograd.grad(out.transpose(1, 2).flatten(2), (q, k, v), gradient)

    return run


class OneProduct(Attention):
    """Attention with one product for queries, keys and values, of weights that are joined in every call."""

    def forward(
        self, x_bLC: Tensor, position: Position | None = None, pieces: Pieces | None = None, **options: Any
    ) -> Tensor:
        assert position is None and pieces is None and not options, "only whole blocks of equal lengths are measured"
        layers: Any = (self.q_proj, self.k_proj, self.v_proj)
        weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
        q_bHLK, k_bHLK, v_bHLK = (self._split_heads(part) for part in F.linear(x_bLC, weight, bias).chunk(3, dim=-1))
        out_bHLK = attend(q_bHLK, k_bHLK, v_bHLK, causal=self.causal)
        return self.out_proj(out_bHLK.transpose(1, 2).flatten(2))


def block_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per variant of a block, and a row per part of it."""
    for name, batch in itertools.product(options.model, options.batch):
        model = _model(name)
        towers: tuple[tuple[str, Any], ...] = (("image", model.visual), ("text", model.text))
        for tower, module in towers:
            inputs = _inputs(model, tower, batch, options.captions)
            tokens = inputs.shape[1] if tower == "text" else model.visual.config.tokens
            block = module.transformer.resblocks[0]
            described = {"model": name, "tower": tower, "batch": batch, "L": tokens}
            x = torch.randn(batch, tokens, module.config.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for products, compiled in itertools.product((3, 1), (False, True)):
                block.attn.__class__ = Attention if products == 3 else OneProduct
                torch.compiler.reset()
                block.__class__ = compiled_class(ResidualBlock) if compiled else ResidualBlock
                measured = _milliseconds(_forward_and_backward(block, x, block))
                yield described | {"block": "compiled" if compiled else "plain", "products": products, "ms": measured}
            block.attn.__class__ = Attention
            block.__class__ = ResidualBlock
            yield from _part_rows(described, block, x)


def _part_rows(described: dict[str, Any], block: ResidualBlock, x: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row per part of a block, forward and backward, all of them plain."""
    attention: Any = block.attn
    mlp: Any = block.mlp
    batch, tokens, width = x.shape
    hidden = torch.randn(batch, tokens, mlp.c_fc.out_features, device="cuda", dtype=x.dtype, requires_grad=True)
    heads, head_width = width // attention.head_width, attention.head_width
    size, hidden_size = x.numel() * x.element_size(), hidden.numel() * x.element_size()
    # name -> call, operations forward and backward, bytes forward and backward
    parts: dict[str, tuple[Run, float, float]] = {
        "q, k, v": (
            _forward_and_backward(lambda x: [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], x, block),
            3 * 6 * x.numel() * width,
            0,
        ),
        "attention": (
            _attention_call(batch, heads, head_width, tokens, attention.causal, False),
            12 * x.numel() * tokens,
            0,
        ),
        "out": (_forward_and_backward(attention.out_proj, x, block), 6 * x.numel() * width, 0),
        "c_fc": (_forward_and_backward(mlp.c_fc, x, block), 6 * x.numel() * hidden.shape[2], 0),
        "gelu": (_forward_and_backward(mlp.gelu, hidden, block), 0, 5 * hidden_size),
        "c_proj": (_forward_and_backward(mlp.c_proj, hidden, block), 6 * x.numel() * hidden.shape[2], 0),
        "2 norms": (_forward_and_backward(lambda x: block.ln_2(block.ln_1(x)), x, block), 0, 2 * 5 * size),
        "2 sums": (_forward_and_backward(lambda x: x + x.detach() + x.detach(), x, block), 0, 2 * 3 * size),
    }
    times = {name: _milliseconds(run) for name, (run, *_) in parts.items()}
    for name, (_, operations, nbytes) in parts.items():
        share, seconds = times[name] / sum(times.values()), times[name] / 1e3
        rate = {"TFLOP/s": operations / seconds / 1e12} if operations else {"GB/s": nbytes / seconds / 1e9}
        yield described | {"part": name, "ms": times[name], "share": share, **rate}


def tower_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per model, batch, extent of the compilation and tower."""
    for described, module, inputs in _towers(options):
        run = _forward_and_backward(module, inputs, module)
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


def kernel_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per kernel of one forward and backward pass of a tower, longest time first."""
    for described, module, inputs in _towers(options):
        run = _forward_and_backward(module, inputs, module)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in events)
        for event in events[:MOST_KERNELS]:
            spent = event.self_device_time_total
            row = {"ms": spent / 1e3, "share": spent / total, "calls": event.count, "kernel": event.key[:100]}
            yield described | row


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
        elif mode == "tuned":
            tuned = functools.partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs")
            with mock.patch.object(compilation, "compiled_function", tuned):
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


def _forward_and_backward(forward: Callable[[Tensor], Tensor | list[Tensor]], x: Tensor, module: nn.Module) -> Run:
    """Return a function that runs `forward` and leaves the gradients of x and of the module's parameters."""
    gradients: list[Tensor] = []

    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        out = forward(x)
        outputs = out if isinstance(out, list) else [out]
        if not gradients:
            gradients.extend(torch.randn_like(output) for output in outputs)
        torch.autograd.backward(outputs, gradients)

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
