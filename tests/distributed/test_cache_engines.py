"""`GradientCache` with every engine equals one process that differentiates the loss of the whole batch.

The rows of a covering array have every pair of: an engine, a number of ranks, a set of encoders, chunks that differ in
number between ranks or not, dropout, activation checkpointing, kept graphs, masks of equal ids, and hard negatives that
differ in number between rows and ranks. The oracle is autograd on the matrix of
all similarities, without tiles, chunks of gradients or engines. It draws the same dropout masks, because it encodes the
chunks of every rank in the same order. PyTorch's engines run in float64, DeepSpeed's in float32.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from megaclip import ClipLoss, Encoded, GradientCache, SigLipLoss
from megaclip.engine.process_group import quiet_deepspeed
from megaclip.models.lora import import_peft
from tests.distributed.checks import covering_rows
from tests.distributed.harness import or_traceback, run_ranks
from tests.tolerances import ENGINE, assert_close

ROWS_OF_A_RANK = 6
INPUTS, FEATURES = 5, 4
SEED = 11
CHUNKS = {"even": (2, 2, 2), "uneven": (1, 4, 2)}
"""Samples per chunk on each rank: 3 chunks each, or 6, 2 and 3."""
ROLES = {"two": "ab", "tied": "aa", "frozen": "ab", "three": "abc", "adapters": "ab"}
"""Module of each input of the loss. "adapters": low-rank terms of frozen layers are trained, the oracle of peft's."""
ENGINES = ("plain", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
BOTH = (False, True)
NEGATIVES = ([0, 0, 3], [], [5])
"""The row of each hard negative, on each rank."""


@dataclass(frozen=True)
class Row:
    """One case."""

    engine: str
    ranks: int
    encoders: str
    chunks: str = "uneven"
    drops: bool = False
    checkpoints: bool = False
    keep: int | str = 0
    ids: bool = False
    negatives: str = ""
    """"shared" by all rows, or each "private" to its row."""


ROWS = [
    Row(**row)
    for row in covering_rows(
        engine=ENGINES,
        ranks=(1, 2, 3),
        encoders=tuple(ROLES)[:4],
        chunks=tuple(CHUNKS),
        drops=BOTH,
        checkpoints=BOTH,
        keep=(0, 1, "all"),
        ids=BOTH,
        negatives=("", "private", "shared"),
    )
]


class Encoder(nn.Module):
    """Two layers, (n, INPUTS) -> (n, FEATURES) of unit length."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.first, self.last, self.adapter = nn.Linear(INPUTS, 8), nn.Linear(8, FEATURES), None
        if row.encoders == "adapters":
            self.requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(INPUTS, 2, bias=False), nn.Linear(2, 8, bias=False))
        self.dropout, self.checkpoints = nn.Dropout(0.3 if row.drops else 0.0), row.checkpoints
        self.register_buffer("positions", torch.arange(4))

    def hidden(self, x: Tensor) -> Tensor:
        adapted = self.first(x) if self.adapter is None else self.first(x) + self.adapter(x)
        return self.dropout(torch.tanh(adapted).view(len(x), -1, 2).flatten(1))  # as attention: fails without rows

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpoints else self.hidden(x)
        return F.normalize(self.last(hidden), dim=-1)


class Model(nn.Module):
    """The encoders of a case and the logarithm of the scale."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.encoders = nn.ModuleDict({name: Encoder(row) for name in sorted(set(ROLES[row.encoders]))})
        self.log_scale = nn.Parameter(torch.tensor([0.7]))
        if row.encoders == "frozen":
            self.encoders["b"].requires_grad_(False)

    def forward(self, name: str, x: Tensor | None = None) -> Tensor:
        return self.log_scale.exp() if x is None else self.encoders[name](x)


def inputs_of(row: Row, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the samples of a rank for each input of the loss."""
    generator = torch.Generator().manual_seed(rank)
    size = (ROWS_OF_A_RANK, INPUTS)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in ROLES[row.encoders]]


def negatives_of(row: Row, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    size = (len(NEGATIVES[rank]), INPUTS)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def ids_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return the ids of a rank's pairs, some of which are equal, and of its negatives, of which one is its row's."""
    ids = (torch.arange(ROWS_OF_A_RANK) * 2 + 5 * rank) % 7
    return ids, torch.tensor([int(ids[0]), 90, 91][: len(NEGATIVES[rank])], dtype=torch.int64)


def loss_of(row: Row) -> Callable[..., Tensor]:
    """Return the project's losses: one pair, or two pairs with two losses."""
    clip, siglip = ClipLoss(ids="mask" if row.ids else "ignore"), SigLipLoss()
    if row.encoders != "three":
        return clip
    return lambda a, b, c, scale, **named: clip(a, b, scale, **named) + 0.5 * siglip(a, c, scale, -1.0)


def oracle(row: Row) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the whole batch and its gradients, in one process."""
    model = Model(row).double()
    features: list[list[Tensor]] = [[] for _ in ROLES[row.encoders]]
    negatives: list[Tensor] = []
    sizes = CHUNKS[row.chunks][: row.ranks]
    count = -(-ROWS_OF_A_RANK // min(sizes))
    for rank, size in enumerate(sizes):
        torch.manual_seed(100 + rank)
        for role, (name, inputs) in enumerate(
            zip(ROLES[row.encoders], inputs_of(row, rank, torch.float64), strict=True)
        ):
            chunks = list(inputs.split(size))
            for chunk in range(count):  # blank chunks draw random numbers too
                encoded = model(name, chunks[min(chunk, len(chunks) - 1)])
                features[role] += [encoded] * (chunk < len(chunks))
        if row.negatives:
            chunks = negatives_of(row, rank, torch.float64).split(2)
            negatives += [model(ROLES[row.encoders][1], chunk) for chunk in chunks if len(chunk)]
    x, y, *others = (torch.cat(each) for each in features)
    scale, labels = model.log_scale.exp(), torch.arange(len(x))
    logits = scale * x @ y.T
    ids, negative_ids = (torch.cat(each) for each in zip(*map(ids_of, range(row.ranks)), strict=True))
    if row.ids:
        equal = (ids[:, None] == ids) & ~torch.eye(len(x), dtype=torch.bool)
        logits = logits.masked_fill(equal, -torch.inf)
    row_logits = logits
    if row.negatives:
        places = torch.tensor([r + ROWS_OF_A_RANK * rank for rank in range(row.ranks) for r in NEGATIVES[rank]])
        left_out = (row.negatives == "private") & (places != labels[:, None])
        left_out |= row.ids & (negative_ids == ids[:, None])
        more = scale * x @ torch.cat(negatives).T
        row_logits = torch.cat((logits, more.masked_fill(left_out, -torch.inf)), dim=1)
    loss = (F.cross_entropy(row_logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    for z in others:
        loss = loss - 0.5 * F.logsigmoid((2 * torch.eye(len(x)) - 1) * (scale * x @ z.T - 1.0)).sum() / len(x)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def wrapped(row: Row, model: Model) -> Any:
    """Return the model in its engine."""
    if row.engine == "plain":
        return model
    if row.engine == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=1e-4)
    if row.engine == "fsdp":
        for encoder in model.encoders.values():
            fully_shard(encoder)
        return fully_shard(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": int(row.engine[-1]), "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def gradients_of(row: Row, engine: Any, model: Model) -> dict[str, Tensor]:
    """Return the whole gradients that the engine would use in its update."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if row.engine.startswith("zero"):
            gradients[name] = safe_get_full_grad(parameter).clone()
        elif row.engine == "fsdp":
            gradients[name] = parameter.grad.full_tensor()
        else:
            gradients[name] = parameter.grad.clone()
            if row.engine == "plain":
                dist.all_reduce(gradients[name])
                gradients[name] /= row.ranks
    return gradients


def built(row: Row) -> tuple[Any, Model, torch.dtype]:
    """Return the engine, its model, and their dtype."""
    dtype = torch.float32 if row.engine.startswith("zero") else torch.float64
    model = Model(row).to(dtype)
    return wrapped(row, model), model, dtype


def taken(row: Row) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the loss and the gradients of two steps of this rank."""
    engine, model, dtype = built(row)
    cache = GradientCache(loss_of(row), None if row.engine == "plain" else engine, keep=row.keep)
    results = []
    for _ in range(2):
        torch.manual_seed(100 + dist.get_rank())
        encoded = [
            Encoded(functools.partial(engine, name), inputs, chunk=CHUNKS[row.chunks][dist.get_rank()])
            for name, inputs in zip(ROLES[row.encoders], inputs_of(row, dist.get_rank(), dtype), strict=True)
        ]
        rank, named = dist.get_rank(), {}
        if row.ids:
            named["ids"] = ids_of(rank)[0]
        if row.negatives:
            encode = functools.partial(engine, ROLES[row.encoders][1])
            named["negatives"] = Encoded(encode, negatives_of(row, rank, dtype), chunk=2)
            if row.negatives == "private":
                named["negative_rows"] = torch.tensor(NEGATIVES[rank], dtype=torch.int64)
            named |= {"negative_ids": ids_of(rank)[1]} if row.ids else {}
        loss = cache.step(*encoded, Encoded(functools.partial(engine, "scale")), **named)
        results.append((loss.item(), gradients_of(row, engine, model)))
        if row.engine.startswith("zero"):
            engine.step()
        else:
            model.zero_grad()
    return results


def take_all(rows: list[Row]) -> list[Any]:
    quiet_deepspeed()
    return [or_traceback(taken, row) for row in rows]


@functools.cache
def outcomes(ranks: int) -> dict[Row, list[Any]]:
    """Run the rows of this number of ranks; return the results of all ranks by row."""
    rows = [row for row in ROWS if row.ranks == ranks]
    return dict(zip(rows, zip(*run_ranks(take_all, ranks, rows, time_limit_s=240), strict=True), strict=True))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_gradients_of_a_step_are_those_of_one_process(row: Row) -> None:
    loss, gradients = oracle(row)
    for results in outcomes(row.ranks)[row]:
        assert not isinstance(results, str), results
        for step_loss, step_gradients in results:
            assert step_gradients.keys() == gradients.keys()
            if row.engine.startswith("zero"):
                assert_close(step_loss, loss, ENGINE["loss"])
                for name, gradient in gradients.items():
                    torch.testing.assert_close(step_gradients[name].double(), gradient, rtol=1e-4, atol=1e-6)
            else:
                assert step_loss == pytest.approx(loss, abs=1e-9)
                assert max(float((step_gradients[n] - g).abs().max()) for n, g in gradients.items()) < 1e-9


@contextmanager
def reductions() -> Iterator[list[int]]:
    """Count the collectives with a reduction in the body of the `with` statement; append their number at its end."""
    counts: list[int] = []
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        yield counts
    counts.append(sum("gloo:" in event.name and "reduce" in event.name for event in recorded.events()))


def own_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return a loss without communication."""
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


def counted(engine_name: str) -> tuple[int, int]:
    """Return the numbers of reductions of a step with the engine alone, and of one of six chunks per encoder."""
    quiet_deepspeed()
    numbers = []
    for chunk in (ROWS_OF_A_RANK, 1):
        row = Row(engine_name, 2, "two")
        engine, _, dtype = built(row)
        x, y = inputs_of(row, dist.get_rank(), dtype)
        with reductions() as counts:
            if chunk > 1:
                loss = own_loss(engine("a", x), engine("b", y), engine("scale"))
                engine.backward(loss) if engine_name.startswith("zero") else loss.backward()
            else:
                encoded = (
                    Encoded(functools.partial(engine, name), z, chunk=1) for name, z in zip("ab", (x, y), strict=True)
                )
                GradientCache(own_loss, engine).step(*encoded, Encoded(functools.partial(engine, "scale")))
        numbers += counts
    return numbers[0], numbers[1]


def count_all(names: list[str]) -> list[Any]:
    return [or_traceback(counted, name) for name in names]


def test_a_step_of_many_chunks_reduces_each_gradient_once() -> None:
    names = ["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
    for name, numbers in zip(names, run_ranks(count_all, 2, names)[0], strict=True):
        assert not isinstance(numbers, str), numbers
        plain, chunked = numbers
        assert plain > 0 and chunked == plain, (name, plain, chunked)


BASE = Row("", 2, "two")


def ddp(**options: Any) -> tuple[Any, Model]:
    model = Model(BASE).double()
    return DistributedDataParallel(model, **options), model


def zero(
    stage: int, *, dtype: str = "fp32", power: int = 10, offload: str = "", settings: Any = None, **further: Any
) -> tuple[Any, Model]:
    """settings: of the section zero_optimization. The optimizer is SGD with them, unless it is offloaded."""
    model = Model(BASE)
    section: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, **(settings or {})}
    if offload:
        section[offload] = {"device": "cpu"}
    own = offload == "offload_optimizer"  # else FusedAdam, which takes minutes to compile
    adam = {"type": "AdamW", "params": {"lr": 0.0} if own else {"lr": 0.0, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        **further,
        "zero_optimization": section,
        "optimizer": adam if offload or not settings else {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": power},
    }
    with pytest.MonkeyPatch.context() as patch:  # DeepSpeed's steps in float16 run on CPUs, but it refuses them
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0], model


def with_peft(engine: str) -> tuple[Any, Model]:
    """Let peft add the adapters of the oracle to its frozen layers."""
    row, peft = Row(engine, 2, "adapters", checkpoints=True), import_peft()
    model, config = Model(row), peft.LoraConfig(r=2, lora_alpha=2, target_modules=["first"])
    for encoder in model.encoders.values():
        own, encoder.adapter = encoder.adapter, None
        peft.inject_adapter_in_model(config, encoder)
        added = encoder.first.lora_A.default, encoder.first.lora_B.default
        for layer, values in zip(added, own, strict=True):
            layer.load_state_dict(values.state_dict())
    model.to(torch.float32 if engine.startswith("zero") else torch.float64)
    return wrapped(row, model), model


def each_encoder(wrap: Callable[[nn.Module], Any]) -> tuple[Any, Model]:
    """Wrap each encoder. The scale belongs to no engine."""
    model = Model(BASE).double()
    engines = [wrap(encoder) for encoder in model.encoders.values()]
    model.forward = lambda name, x: engines["ab".index(name)](x)
    return engines, model


VARIANTS: dict[str, tuple[Callable[[], tuple[Any, Model]], str, float]] = {
    "DDP, gradients in buckets": (lambda: ddp(gradient_as_bucket_view=True), "engine", 1e-9),
    "DDP, unused parameters": (lambda: ddp(find_unused_parameters=True), "engine", 1e-9),
    "DDP, methods of its module": (ddp, "module", 1e-9),
    "DDP, its parameter in the loss": (ddp, "loss", 1e-9),
    "ZeRO-0, its parameter in the loss": (lambda: zero(0), "loss", 1e-5),
    "ZeRO-1, its parameter in the loss": (lambda: zero(1), "loss", 1e-5),
    "ZeRO-2, its parameter in the loss": (lambda: zero(2), "loss", 1e-5),
    "two DDP modules": (lambda: each_encoder(DistributedDataParallel), "module", 1e-9),
    "two FSDP2 modules": (lambda: each_encoder(fully_shard), "module", 1e-9),
    "FSDP2, whole inputs on one rank": (lambda: built(Row("fsdp", 2, "two"))[:2], "scale from the engine, whole", 1e-9),
    "ZeRO-0, bf16": (lambda: zero(0, dtype="bf16"), "engine", 3e-2),
    "ZeRO-1, bf16": (lambda: zero(1, dtype="bf16"), "engine", 3e-2),
    "ZeRO-1, fp16, its parameter in the loss": (lambda: zero(1, dtype="fp16"), "loss", 3e-3),
    "ZeRO-3, fp16": (lambda: zero(3, dtype="fp16"), "scale from the engine", 3e-3),
    "ZeRO-2, offload": (lambda: zero(2, offload="offload_optimizer"), "engine", 1e-5),
    "ZeRO-3, offload, bf16": (lambda: zero(3, dtype="bf16", offload="offload_param"), "scale from the engine", 3e-2),
}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "small buckets, overlapped": (1, {"overlap_comm": True, "reduce_bucket_size": 10, "round_robin_gradients": True}),
    "gradients apart": (1, {"contiguous_gradients": False, "reduce_scatter": False}),
    "small buckets, round robin": (
        2,
        {"overlap_comm": True, "reduce_bucket_size": 10, "round_robin_gradients": True, "allgather_bucket_size": 10},
    ),
    "other collectives": (
        2,
        {
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "allgather_partitions": False,
            "use_multi_rank_bucket_allreduce": False,
        },
    ),
    "small buckets, nothing fetched early": (
        3,
        {
            "overlap_comm": False,
            "reduce_bucket_size": 10,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
        },
    ),
    "small groups, second partitions": (
        3,
        {"sub_group_size": 10, "zero_hpz_partition_size": 2, "contiguous_gradients": False, "reduce_scatter": False},
    ),
}
"""Settings of zero_optimization at a stage. The updates are compared, because `safe_get_full_grad` fails on some ranks
with round_robin_gradients, and leaves the others waiting."""
VARIANTS |= {
    f"ZeRO-{stage}, {name}": (
        functools.partial(zero, stage, settings=settings),
        "updates" if stage < 3 else "updates, scale from the engine",
        1e-5,
    )
    for name, (stage, settings) in SETTINGS.items()
}
PEFT = {
    f"peft, {engine}": (functools.partial(with_peft, engine), "scale from the engine", limit)
    for engine, limit in (("ddp", 1e-9), ("fsdp", 1e-9), ("zero2", 1e-5), ("zero3", 1e-5))
}
VARIANTS |= PEFT
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Model]], str, str]] = {
    "static graph": (lambda: ddp(static_graph=True), "engine", "static_graph=True"),
    "methods of DeepSpeed's module": (lambda: zero(2), "module", "did not call the DeepSpeed engine"),
    "DeepSpeed's engine is not passed": (lambda: zero(2), "unknown", "a DeepSpeedEngine that GradientCache does not"),
    "DDP's module is not passed": (ddp, "unknown", "a DistributedDataParallel that GradientCache"),
    "partitioned scale": (lambda: zero(3), "engine", r"'logit_scale' was computed from a partitioned parameter"),
    "accumulation steps": (
        lambda: zero(1, gradient_accumulation_steps=2),
        "engine",
        "gradient_accumulation_steps is 2",
    ),
    "accumulation that is not managed": (
        lambda: zero(2, managed_gradient_accumulation=False),
        "engine",
        "leave it out",
    ),
    "ZenFlow": (
        lambda: zero(2, offload="offload_optimizer", settings={"zenflow": {"update_interval": 1}}),
        "engine",
        "zenflow updates weights from the gradients of single",
    ),
    "two steps of ZeRO-1 at once": (lambda: zero(1), "twice", "was called twice without engine.step"),
    "samples of one rank": (ddp, "broken", "bad sample|rank 1 could not divide its inputs"),
    "encoder of one rank": (lambda: zero(2), "full", "OutOfMemoryError: no memory"),
    "inputs of one rank": (ddp, "missing", "rank 0 passes 2 Encoded arguments and rank 1 3"),
    "many inputs of one rank": (ddp, "many are missing", "rank 0 passes 2 Encoded arguments and rank 1 18"),
}


def no_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("OutOfMemoryError: no memory")


def whole_parameters(model: Model) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def vary(build: Callable[[], tuple[Any, Model]], calls: str, keep: int) -> dict[str, Tensor]:
    """Take two steps with a scale that is computed outside the encoders; return the gradients of the last one."""
    engine, model = build()
    called = model if calls == "module" else engine
    dtype = next(model.parameters()).dtype
    clip, weight = ClipLoss(), nn.Parameter(torch.ones(()))
    loss = (lambda x, y: weight * clip(x, y, model.log_scale.exp())) if calls == "loss" else clip
    cache = GradientCache(loss, None if calls == "unknown" else engine, keep=keep)

    def split(x: Tensor) -> list[Tensor]:
        if calls == "broken" and dist.get_rank() == 1:
            raise ValueError("bad sample")
        return list(x.split(1 + dist.get_rank()))

    gradients: dict[str, Tensor] = {}
    for step in range(2):
        model.zero_grad()
        inputs = zip("ab", inputs_of(BASE, dist.get_rank(), dtype), strict=True)
        division = None if "whole" in calls and dist.get_rank() == 0 else split
        encoded = [Encoded(functools.partial(called, name), x, split=division) for name, x in inputs]
        if calls == "full" and dist.get_rank() == 1:
            encoded[1] = Encoded(no_memory, encoded[1].inputs, chunk=2)
        if "missing" in calls and dist.get_rank() == 1:
            encoded += encoded[1:] * (16 if "many" in calls else 1)
        if calls == "loss":
            weight.grad = None
            value = cache.step(*encoded)
            dist.all_reduce(value)
            # The derivative with respect to a factor of 1 is the loss.
            torch.testing.assert_close(weight.grad, value.to(weight.dtype) / dist.get_world_size(), rtol=1e-3, atol=0.0)
        elif "scale from the engine" in calls:
            cache.step(*encoded, logit_scale=Encoded(functools.partial(engine, "scale")))
        else:
            cache.step(*encoded, logit_scale=model.log_scale.exp())
        if "updates" in calls:
            for group in engine.optimizer.param_groups:
                group["lr"] = float(step)
            before = whole_parameters(model)
            engine.step()
            gradients = {name: before[name] - after for name, after in whole_parameters(model).items()}
        elif isinstance(engine, deepspeed.DeepSpeedEngine):
            scale = engine.optimizer.loss_scale if engine.fp16_enabled() else 1.0
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = {name: safe_get_full_grad(p) / scale for name, p in trained.items()}
            if calls != "twice":
                engine.step()
        else:
            whole = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
            gradients = {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in whole}
    return gradients


def overflow() -> None:
    """Check that all ranks skip a step whose float16 gradients overflow, and take later ones."""
    engine, model = zero(2, dtype="fp16", power=22)
    cache, numbers = GradientCache(ClipLoss(), engine), []
    x, y = inputs_of(BASE, dist.get_rank(), torch.float16)
    for _ in range(12):
        before = [parameter.clone() for parameter in model.parameters()]
        encoded = (Encoded(functools.partial(engine, name), z, chunk=4) for name, z in (("a", x), ("b", y)))
        cache.step(*encoded, model.log_scale.exp())
        engine.step()
        numbers.append(engine.skipped_steps)
        assert all(map(torch.equal, before, model.parameters())) or engine.skipped_steps < len(numbers)
    assert 2 < numbers[-1] < 12 and numbers[-1] == numbers[-2], numbers
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def loss_parameters() -> None:
    """Check that parameters which a function names as its loss have gradients of all ranks, also those of one rank."""
    engine, _ = ddp()
    weights, extra, clip = nn.Linear(FEATURES, 1).double(), nn.Parameter(torch.zeros(2)), ClipLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return clip(x, y, 2.0) + weights(x * y).mean() + (extra.sum() if dist.get_rank() == 1 else 0.0)

    inputs = inputs_of(BASE, dist.get_rank(), torch.float64)
    encoded = [Encoded(functools.partial(engine, name), z, chunk=4) for name, z in zip("ab", inputs, strict=True)]
    GradientCache(loss, engine).step(*encoded)
    x, y = (engine.module(name, z).detach() for name, z in zip("ab", inputs, strict=True))
    expected = (x * y).mean(0, keepdim=True)
    dist.all_reduce(expected)
    torch.testing.assert_close(weights.weight.grad, expected / 2, rtol=0, atol=1e-12)
    assert extra.grad is not None and extra.grad.tolist() == [0.5, 0.5]


CHECKS = {"overflow": overflow, "parameters of a function": loss_parameters}


def vary_all() -> dict[str, Any]:
    quiet_deepspeed()
    checked = {name: or_traceback(check) for name, check in CHECKS.items()}
    outcomes = {name: or_traceback(vary, build, calls, 1) for name, (build, calls, _) in VARIANTS.items()}
    refused = {name: or_traceback(vary, build, calls, 0) for name, (build, calls, _) in REFUSED.items()}
    return outcomes | refused | checked


@functools.cache
def variants() -> list[dict[str, Any]]:
    return run_ranks(vary_all, 2, time_limit_s=240)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_engines_have_the_gradients_of_one_process(name: str) -> None:
    _, expected = oracle(Row("", 2, "adapters") if name in PEFT else BASE)
    if name in PEFT:
        theirs = {"adapter.0": "first.lora_A.default", "adapter.1": "first.lora_B.default"}
        expected = {re.sub(r"adapter\.\d", lambda match: theirs[match[0]], n): g for n, g in expected.items()}
    for by_name in variants():
        got = by_name[name]
        assert not isinstance(got, str), got
        assert got.keys() == expected.keys()
        assert max(float((got[n].double() - g).abs().max()) for n, g in expected.items()) < VARIANTS[name][2]


@pytest.mark.parametrize("name", CHECKS)
def test_all_ranks_agree(name: str) -> None:
    assert [by_name[name] for by_name in variants()] == [None, None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_cannot_do_is_refused_on_every_rank(name: str) -> None:
    for by_name in variants():
        assert isinstance(by_name[name], str) and re.search(REFUSED[name][2], by_name[name]), by_name[name]
