"""Measure time and memory of the contrastive losses, beside open_clip, DisCo-CLIP's scheme, Inf-CL and siglip-kernel.

    python tools/bench_loss.py --batch 32768 --embedding 512 1024
    torchrun --nproc_per_node 4 tools/bench_loss.py --batch 131072 --embedding 512

A method whose package is not installed, or that does not fit in memory, gets a line with the error. Columns of the
table, one line per method:

    ms             forward + backward, median of calls without a pause between them, slowest rank
    alone          ms of a call that begins when the GPU has nothing to do and ends when it has finished, median
    extra MiB      peak allocation of a call, without features and their gradients
    grad error     relative error of the image features' gradient against float32, up to 262,144 samples
    TFLOP/s        8*b*B*D operations for InfoNCE, 6*b*B*D for the sigmoid loss, whatever the method computes
    8192^3         TFLOP/s of an 8192^3 bfloat16 product on the same GPU
    share          ratio of the two

A GPU at its power limit is slower than an idle one, and its speed drifts. Each method is therefore measured alternately
with the product, and the share is calculated from the medians of both.

The methods "megaclip ids" and "megaclip 1000 ids" run with ids="mask": without equal ids, which gives the same loss as
without ids, and with ids of 1000 values in random order, where every tile has equal ones. The gradient error of the
second is that of another loss. Compare the kernels with and without ids in one call:

    python tools/bench_loss.py --batch 32768 --embedding 512 1024 --methods megaclip "megaclip ids" "megaclip 1000 ids"

Calls of more than half a second are measured twice, and calls of more than ten seconds once. --seconds leaves out
methods, except the first, whose calls would take longer, as estimated from a smaller batch of the same command.

--batch is the global batch B. Each rank has b = B / ranks samples. --json writes each result when it is measured.
"""

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import gather_objects, gather_rows, sum_over_ranks, wait_for_all_ranks
from megaclip.engine.process_group import start_process_group
from megaclip.errors import first_line

ROUNDS = 6  # turns of a method and of the matrix product; the first turn is a warm-up
TURN_SECONDS = 0.1
LEAST_PER_TURN = 2
MOST_PER_TURN = 100
ALONE_REPEATS = 30
ALONE_SECONDS = 1.0
LONG_S = 0.5
"""Calls of more seconds are measured twice, and calls alone are not measured apart."""
SINGLE_S = 10.0
"""Calls of more seconds are measured once, without a warm-up if the method ran at a smaller batch before."""
MOST_CHECKED = 2**18
"""Largest batch whose gradient is compared: the comparison takes B^2 D operations in float32 on every rank."""

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # image, text, logit_scale, logit_bias -> loss


@dataclass
class Result:
    """One line of the table."""

    method: str
    batch: int
    embedding: int
    ranks: int
    milliseconds: float
    alone_milliseconds: float
    extra_peak_mib: float
    gradient_error: float | None
    tflops: float
    matmul_tflops: float
    share_of_matmul: float


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    return max(gather_objects(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8192, 32768], help="global batch sizes B")
    parser.add_argument("--embedding", type=int, nargs="+", default=[512, 1024], help="embedding dimensions D")
    parser.add_argument("--logit-scale", type=float, default=1 / 0.07, help="exponentiated logit scale")
    parser.add_argument("--loss", choices=["clip", "siglip"], default="clip", help="loss to measure")
    parser.add_argument(
        "--methods", nargs="+", help=("measure only these methods, or those whose names start with these words")
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out slower methods, except the first")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device found; this benchmark requires a GPU")
    start_process_group()
    methods = clip_methods() if options.loss == "clip" else siglip_methods()
    if options.methods:
        methods = selected(methods, options.methods)
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(options)}
    bench = Bench(methods, options, record)
    for batch in options.batch:
        for embedding in options.embedding:
            bench.measure_all(batch, embedding)
    dist.destroy_process_group()


def selected(methods: dict[str, Callable[[], Loss]], wanted: list[str]) -> dict[str, Callable[[], Loss]]:
    """Return the methods of these names. A name that is not a method selects all methods that start with it."""
    names = {
        name
        for start in wanted
        for name in methods
        if name == start or (start not in methods and name.startswith(start))
    }
    return {name: make for name, make in methods.items() if name in names}


class Bench:
    """Measures all methods at one size after the other, prints a table, and writes each result to the record."""

    def __init__(
        self,
        methods: dict[str, Callable[[], Loss]],
        options: argparse.Namespace,
        record: dict[str, Any],
    ) -> None:
        self.methods, self.options = methods, options
        self.record = record | {"results": [], "failed": []}
        self.last: dict[tuple[str, int], Result] = {}

    def measure_all(self, batch: int, embedding: int) -> None:
        """Measure all methods at one size."""
        scale, loss = self.options.logit_scale, self.options.loss
        local = batch // dist.get_world_size()
        x_all, y_all = (unit_features(batch, embedding, seed) for seed in (1, 2))
        mine = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
        reference = None
        if batch <= MOST_CHECKED:
            reference = {"clip": clip_gradient, "siglip": siglip_gradient}[loss](x_all, y_all, scale, mine)
        x, y = x_all[mine].clone(), y_all[mine].clone()
        del x_all, y_all
        torch.cuda.empty_cache()
        flops = (8 if loss == "clip" else 6) * local * batch * embedding
        print_rank_0(f"\nB = {batch}, D = {embedding}, {dist.get_world_size()} rank(s), {loss}")
        columns = f"{'ms':>9}{'alone':>9}{'extra MiB':>11}{'grad error':>12}{'TFLOP/s':>9}{'8192^3':>8}{'share':>7}"
        print_rank_0(f"{'method':34}{columns}")
        for number, (name, make) in enumerate(self.methods.items()):
            last = self.last.get((name, embedding))
            expected = last.milliseconds / 1000 * (batch / last.batch) ** 2 if last else 0.0
            if number and expected > self.options.seconds:
                self._fail(name, batch, embedding, f"left out: a call is expected to take {expected:.0f} s")
                continue
            try:
                run = make()
                figures = measure(run, x, y, scale, reference, warm_up=expected < SINGLE_S)
            except (ImportError, AttributeError, torch.OutOfMemoryError) as problem:
                self._fail(name, batch, embedding, f"{type(problem).__name__}: {first_line(problem)[:70]}")
                torch.cuda.empty_cache()
                continue
            milliseconds, alone, machine, peak, error = figures
            tflops = flops / milliseconds / 1e9
            result = Result(
                *(name, batch, embedding, dist.get_world_size(), milliseconds, alone, peak, error),
                *(tflops, machine, tflops / machine),
            )
            self.last[name, embedding] = result
            checked = f"{'-':>12}" if error is None else f"{error:12.1e}"
            line = f"{milliseconds:9.2f}{alone:9.2f}{peak:11.0f}{checked}"
            print_rank_0(f"{name:34}{line}{tflops:9.0f}{machine:8.0f}{tflops / machine:7.2f}")
            self.record["results"].append(asdict(result))
            self._write()

    def _fail(self, name: str, batch: int, embedding: int, reason: str) -> None:
        print_rank_0(f"{name:34} {reason}")
        size = {"method": name, "batch": batch, "embedding": embedding, "ranks": dist.get_world_size()}
        self.record["failed"].append(size | {"status": reason})
        self._write()

    def _write(self) -> None:
        if self.options.json and dist.get_rank() == 0:
            self.options.json.write_text(json.dumps(self.record, indent=1, default=str))


def print_rank_0(line: str) -> None:
    """Print `line` on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def measure(
    run: Loss,
    x: Tensor,
    y: Tensor,
    scale: float,
    reference: Tensor | None,
    *,
    warm_up: bool,
) -> tuple[float, float, float, float, float | None]:
    """Return both times in milliseconds, TFLOP/s of the product, extra peak MiB and the gradient error of `x`."""
    x, y = x.requires_grad_(), y.requires_grad_()
    logit_scale = torch.tensor(scale, device=x.device, requires_grad=True)
    logit_bias = torch.tensor(-10.0, device=x.device, requires_grad=True)

    def step() -> None:
        x.grad = y.grad = logit_scale.grad = logit_bias.grad = None
        run(x, y, logit_scale, logit_bias).backward()

    if warm_up:
        step()
    x.grad = y.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wait_for_all_ranks()
    once = seconds_of(step)
    peak = largest((torch.cuda.max_memory_allocated() - before) / 2**20)
    assert x.grad is not None
    error = None
    if reference is not None:
        # Gradients of other projects differ by a constant factor (the number of ranks), so compare up to a factor.
        gradient = x.grad.double()
        factor = (gradient * reference).sum() / (gradient * gradient).sum()
        error = largest(((gradient * factor - reference).norm() / reference.norm()).item())
    milliseconds, machine = timed(step, once)
    alone = milliseconds if once > LONG_S else timed_alone(step, once)
    x.grad = y.grad = None
    return milliseconds, alone, machine, peak, error


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds of one call, slowest rank."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return largest(time.perf_counter() - start)


def timed_alone(step: Callable[[], Any], once: float) -> float:
    """Return the median milliseconds of steps between which the GPU is idle, slowest rank. once: seconds of a step."""
    seconds = []
    for _ in range(min(ALONE_REPEATS, max(3, math.ceil(ALONE_SECONDS / once)))):
        wait_for_all_ranks()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1000 * largest(statistics.median(seconds))


def timed(step: Callable[[], Any], once: float) -> tuple[float, float]:
    """Return the median milliseconds of a step (slowest rank) and TFLOP/s of the product that runs in turns with it.

    once: seconds of one step.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def product() -> Tensor:
        return a @ b

    product()
    runs, seconds = (step, product), (once, seconds_of(product))
    turns = [min(MOST_PER_TURN, max(LEAST_PER_TURN, math.ceil(TURN_SECONDS / each))) for each in seconds]
    rounds = ROUNDS
    if once > LONG_S:
        turns[0], rounds = 1, 0 if once > SINGLE_S else 2
    samples: tuple[list[Any], list[Any]] = ([], [])
    for turn in range(rounds):
        for run, repeats, kept in zip(runs, turns, samples, strict=True):
            wait_for_all_ranks()
            for _ in range(repeats):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                if turn or once > LONG_S:
                    kept.append((begin, end))
    torch.cuda.synchronize()
    times = [[begin.elapsed_time(end) for begin, end in kept] for kept in samples]
    milliseconds, product_ms = (
        largest(statistics.median(kept or [1000 * each])) for kept, each in zip(times, seconds, strict=True)
    )
    return milliseconds, 2 * 8192**3 / product_ms / 1e9


def unit_features(count: int, embedding: int, seed: int) -> Tensor:
    """Return (count, embedding) bfloat16 features of unit length, equal on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    features = torch.randn(count, embedding, generator=generator, device="cuda")
    return F.normalize(features, dim=1).bfloat16()


def clip_gradient(x: Tensor, y: Tensor, scale: float, rows: slice) -> Tensor:
    """Return dL/dx of some rows of InfoNCE as float64, from float32 products, strip by strip, positives included."""
    x, y = x.float(), y.float()
    count = len(x)
    col_lse = torch.full((count,), -torch.inf, device=x.device)
    for strip in x.split(2048):
        col_lse = torch.logaddexp(col_lse, (scale * strip @ y.T).logsumexp(0))
    gradients = []
    for start in range(rows.start, rows.stop, 2048):
        strip = slice(start, min(start + 2048, rows.stop))
        logits = scale * x[strip] @ y.T
        weights = (logits - logits.logsumexp(1)[:, None]).exp() + (logits - col_lse).exp()
        weights.diagonal(start).sub_(2)
        gradients.append(weights @ y)
    return torch.cat(gradients).double() * (scale / (2 * count))


def siglip_gradient(x: Tensor, y: Tensor, scale: float, rows: slice) -> Tensor:
    """Return dL/dx of some rows of the sigmoid loss with bias -10 as float64, from float32 products, strip by strip."""
    x, y = x.float(), y.float()
    gradients = []
    for start in range(rows.start, rows.stop, 2048):
        strip = slice(start, min(start + 2048, rows.stop))
        weights = torch.sigmoid(scale * x[strip] @ y.T - 10.0)
        weights.diagonal(start).sub_(1)
        gradients.append(weights @ y)
    return torch.cat(gradients).double() * (scale / len(x))


def clip_methods() -> dict[str, Callable[[], Loss]]:
    """Return makers of the InfoNCE methods by name. A maker raises ImportError if its package is missing."""

    def ours(**settings: Any) -> Callable[[], Loss]:
        def make() -> Loss:
            from megaclip.losses import ClipLoss

            loss = ClipLoss(**settings)
            return lambda x, y, scale, bias: loss(x, y, scale)

        return make

    def compiled(make: Callable[[], Loss]) -> Callable[[], Loss]:
        def make_compiled() -> Loss:
            torch._dynamo.reset()
            return torch.compile(make())

        return make_compiled

    def global_contrastive(variant: str) -> Callable[[], Loss]:
        def make() -> Loss:
            return GlobalContrastive(variant)

        return make

    def open_clip() -> Loss:
        module = importlib.import_module("open_clip.loss")
        loss = module.ClipLoss(
            local_loss=True,
            gather_with_grad=True,
            cache_labels=True,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        return lambda x, y, scale, bias: loss(x, y, scale)

    def disco_clip() -> Loss:
        def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            x_all, y_all = _DiscoGather.apply(x), _DiscoGather.apply(y)
            mine = slice(dist.get_rank() * len(x), (dist.get_rank() + 1) * len(x))
            labels = torch.arange(mine.start, mine.stop, device=x.device)
            logits = scale * x_all[mine] @ y_all.T, scale * y_all[mine] @ x_all.T
            return sum(F.cross_entropy(each, labels) for each in logits) / 2  # type: ignore[return-value]

        return run

    def inf_cl() -> Loss:
        module = importlib.import_module("inf_cl")
        run = module.cal_inf_loss if dist.get_world_size() > 1 else module.cal_flash_loss
        return lambda x, y, scale, bias: (run(x, y, scale=scale).mean() + run(y, x, scale=scale).mean()) / 2

    methods = {name: ours(**settings) for name, settings in our_exchanges().items()}
    variants = {f"megaclip {variant}": global_contrastive(variant) for variant in ("fastclip_v3", "fastclip_v2")}
    methods |= methods_with_ids("ClipLoss")
    for name, setting in (("graphs", True), ("no graphs", False)):
        methods[f"megaclip {name}"] = ours(cuda_graphs=setting)
        methods[f"megaclip {name} compiled"] = compiled(ours(cuda_graphs=setting))
    return {
        **methods,
        **variants,
        "open_clip": open_clip,
        "open_clip compiled": compiled(open_clip),
        "DisCo-CLIP": disco_clip,
        "Inf-CL": inf_cl,
    }


class _DiscoGather(torch.autograd.Function):
    """DisCo-CLIP's exchange (arXiv:2304.08480, section 3): features of all ranks, whose gradients are summed over them.

    Both gradients have the features' dtype.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.rows = len(features)
        return gather_rows(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = dist.get_rank() * ctx.rows
        return sum_over_ranks(gradients[0])[first : first + ctx.rows]


def our_exchanges() -> dict[str, dict[str, str]]:
    """Return the settings of this project's exchanges and reductions by name. One GPU has nothing to exchange."""
    if dist.get_world_size() == 1:
        return {"megaclip": {}}
    exchanges: dict[str, dict[str, str]] = {
        f"megaclip {exchange} {reduction}": {"exchange": exchange, "reduction": reduction}
        for exchange in ("ring", "all_gather")
        for reduction in ("feature", "scalar")
    }
    bf16 = {"reduction": "feature", "payload": "bf16"}
    return exchanges | {
        f"megaclip {exchange} feature bf16": {"exchange": exchange, **bf16} for exchange in ("ring", "all_gather")
    }


def methods_with_ids(name: str) -> dict[str, Callable[[], Loss]]:
    """Return makers of the loss of this name with ids="mask": all different, and of 1000 values."""

    def maker(values: int | None) -> Callable[[], Loss]:
        def make() -> Loss:
            loss = getattr(importlib.import_module("megaclip.losses"), name)(ids="mask")
            ids: dict[int, Tensor] = {}

            def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
                if len(x) not in ids:
                    generator = torch.Generator().manual_seed(dist.get_rank())
                    drawn = torch.randint(2**62 if values is None else values, (len(x),), generator=generator)
                    ids[len(x)] = drawn.to(x.device)
                return loss(x, y, scale, bias, ids=ids[len(x)])

            return run

        return make

    return {"megaclip ids": maker(None), "megaclip 1000 ids": maker(1000)}


class GlobalContrastive:
    """A FastCLIP loss with the interface of `Loss`. A call includes fetching the state and the last call's `step()`.

    Its objective differs from InfoNCE, so its gradient error against InfoNCE's gradient has no meaning.
    """

    def __init__(self, variant: str) -> None:
        from megaclip.losses import FastClipLoss

        self._make = lambda samples: FastClipLoss(variant, samples=samples, state_device="accelerator").to("cuda")
        self._loss: Any = None

    def __call__(self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if self._loss is None:
            self._loss = self._make(len(x) * dist.get_world_size())
            self._ids = torch.arange(len(x)) * dist.get_world_size() + dist.get_rank()
        else:
            self._loss.step()
        return self._loss(x, y, ids=self._ids, epoch=2.5)


def siglip_methods() -> dict[str, Callable[[], Loss]]:
    """Return makers of the sigmoid-loss methods by name."""

    def ours(**settings: Any) -> Callable[[], Loss]:
        return lambda: importlib.import_module("megaclip.losses").SigLipLoss(**settings)

    def open_clip() -> Loss:
        return importlib.import_module("open_clip.loss").SigLipLoss(
            rank=dist.get_rank(), world_size=dist.get_world_size()
        )

    def siglip_kernel() -> Loss:
        if dist.get_world_size() == 1:
            run = importlib.import_module("siglip_kernel").fused_siglip_loss
            return lambda x, y, scale, bias: run(x, y, scale.log(), bias)
        module = importlib.import_module("siglip_kernel.distributed")
        return module.DistributedSigLIPLoss(strategy="ring", rank=dist.get_rank(), world_size=dist.get_world_size())

    methods = {name: ours(**settings) for name, settings in our_exchanges().items()}
    methods |= methods_with_ids("SigLipLoss")
    return {**methods, "open_clip": open_clip, "siglip-kernel": siglip_kernel}


if __name__ == "__main__":
    main()
