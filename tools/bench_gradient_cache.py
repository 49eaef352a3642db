"""Compare GradientCache with other gradient caches on one GPU: samples per second, peak memory, and the loss.

    python tools/bench_gradient_cache.py --model bert --batch 4096 --chunk 128
    python tools/bench_gradient_cache.py --model clip --batch 4096 --chunk 64 --compile
    torchrun --nproc_per_node 2 tools/bench_gradient_cache.py --model bert --batch 2048 --engine zero2

Each implementation trains the same random model on the same random data, in bf16 autocast with float32 parameters and
fused AdamW. The loss is symmetric InfoNCE with a fixed scale. `--model bert` is a text bi-encoder of BERT-base size,
`clip` a CLIP ViT-B/16. With --mean-length texts differ in length, as real ones do, and GradientCache gets chunks of as
many tokens (`tokens=`) as the others get with padding. --batch is the batch of each GPU. Try several values of --chunk:
the best setting of each implementation counts. The others are measured if their packages are installed:
sentence-transformers 6 (cached loss), and grad_cache, built by `pip wheel git+https://github.com/luyug/GradCache`.
--tiny runs small models, which is a test of the script on a CPU.
"""

import argparse
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from megaclip import ClipLoss, Encoded, GradientCache
from megaclip.open_clip_package import import_torchvision

SCALE = 20.0
Features = dict[str, Tensor]
Step = Callable[[list[Features]], Tensor]


class Pooled(nn.Module):
    """The mean of a BERT model's states, (n, D) of unit length."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, **features: Tensor) -> Tensor:
        mask = features["attention_mask"][..., None]
        with torch.autocast(mask.device.type, dtype=torch.bfloat16):
            states = self.bert(**features).last_hidden_state
        return normalize((states * mask).sum(1).float() / mask.sum(1), dim=-1)


class Projected(nn.Module):
    """A tower of CLIP: its projection, (n, D) of unit length."""

    def __init__(self, tower: nn.Module, output: str) -> None:
        super().__init__()
        self.tower, self.output = tower, output

    def forward(self, **features: Tensor) -> Tensor:
        (values,) = features.values()
        with torch.autocast(values.device.type, dtype=torch.bfloat16):
            output = getattr(self.tower(**features), self.output)
        return normalize(output.float(), dim=-1)


class Routed(nn.Module):
    """Both encoders with the interface of a SentenceTransformer: features -> {"sentence_embedding": (n, D)}."""

    def __init__(self, encoders: list[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, features: Features) -> Features:
        encoder = self.encoders[0 if "pixel_values" in features else -1]
        return {"sentence_embedding": encoder(**features)}

    def __getitem__(self, index: int) -> nn.Module:
        return self.encoders[index]


def encoders_of(arguments: argparse.Namespace) -> list[nn.Module]:
    """Return the two encoders; the same module twice for the bi-encoder."""
    with suppress(ImportError):
        import_torchvision()  # transformers imports it if it is installed
    from transformers import BertConfig, BertModel, CLIPTextConfig, CLIPTextModelWithProjection, CLIPVisionConfig
    from transformers import CLIPVisionModelWithProjection as VisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    small: dict[str, Any] = sizes if arguments.tiny else {}
    if arguments.model == "bert":
        bert = BertModel(BertConfig(**small), add_pooling_layer=False)
        return [Pooled(bert)] * 2
    vision = VisionModel(CLIPVisionConfig(patch_size=16, image_size=32 if arguments.tiny else 224, **small))
    text = CLIPTextModelWithProjection(CLIPTextConfig(**small))
    return [Projected(vision, "image_embeds"), Projected(text, "text_embeds")]


def inputs_of(arguments: argparse.Namespace, device: torch.device) -> list[Features]:
    """Return the inputs of both encoders."""
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    size = (arguments.batch, arguments.length)
    tokens = [torch.randint(5, 20000, size, generator=generator) for _ in range(2)]
    if arguments.model == "clip":
        pixels = torch.randn(arguments.batch, 3, *[32 if arguments.tiny else 224] * 2, generator=generator)
        tokens[1][:, -1] = 49407
        return [{"pixel_values": pixels.to(device)}, {"input_ids": tokens[1].to(device)}]
    masks = [torch.ones_like(ids) for ids in tokens]
    if arguments.mean_length:
        for mask in masks:
            lengths = torch.empty(arguments.batch).log_normal_(0, 0.5, generator=generator)
            lengths = (lengths * arguments.mean_length / lengths.mean()).clamp(4, arguments.length)
            mask[torch.arange(arguments.length) >= lengths[:, None]] = 0
    sides = zip(tokens, masks, strict=True)
    return [{"input_ids": ids.to(device), "attention_mask": mask.to(device)} for ids, mask in sides]


def in_batch_loss(x: Tensor, y: Tensor) -> Tensor:
    if dist.is_initialized():  # as grad_cache's DistributedContrastiveLoss
        x, y = (torch.cat(all_gather(each)) for each in (x, y))
    logits, labels = SCALE * x @ y.T, torch.arange(len(x), device=x.device)
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def all_gather(features: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, features.contiguous())
    gathered[dist.get_rank()] = features
    return gathered


def ours(encoders: list[nn.Module], arguments: argparse.Namespace) -> Step:
    cache = GradientCache(ClipLoss(), encoders[0] if dist.is_initialized() else None, keep=arguments.keep)
    size = {"tokens": arguments.chunk * arguments.length} if arguments.mean_length else {"chunk": arguments.chunk}

    def step(inputs: list[Features]) -> Tensor:
        pairs = zip(encoders, inputs, strict=True)
        encoded = [Encoded(lambda part, e=encoder: e(**part), each, **size) for encoder, each in pairs]
        return cache.step(*encoded, logit_scale=SCALE)

    return step


def luyugs(encoders: list[nn.Module], arguments: argparse.Namespace) -> Step:
    from grad_cache import GradCache

    cache = GradCache(encoders, arguments.chunk, in_batch_loss)
    return lambda inputs: cache(*inputs, no_sync_except_last=dist.is_initialized())


def sentence_transformers(encoders: list[nn.Module], arguments: argparse.Namespace) -> Step:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    ddp = arguments.engine == "ddp"
    loss_function = CachedMultipleNegativesRankingLoss(
        encoders[0].module if ddp else Routed(encoders),
        scale=SCALE,
        mini_batch_size=arguments.chunk,
        gather_across_devices=dist.is_initialized(),
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    if ddp:  # it reduces once only if it recognizes DDP
        loss_function.model = encoders[0]

    def step(inputs: list[Features]) -> Tensor:
        loss: Tensor = loss_function(inputs, None)
        loss.backward()
        return loss.detach()

    return step


IMPLEMENTATIONS: dict[str, tuple[Any, str]] = {
    "GradientCache": (ours, "megaclip"),
    "GradCache": (luyugs, "grad_cache"),
    "sentence-transformers": (sentence_transformers, "sentence_transformers"),
}


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> str:
    """Train some steps and return a row of the table."""
    gpu = device.type == "cuda"
    encoders = [encoder.to(device) for encoder in encoders_of(arguments)]
    parameters = list({id(p): p for encoder in encoders for p in encoder.parameters()}.values())
    optimizer: Any = torch.optim.AdamW(parameters, lr=1e-5, fused=gpu)
    if arguments.compile:
        for encoder in dict.fromkeys(encoders):
            encoder.compile(dynamic=False)
    if arguments.engine == "ddp":
        whole = Routed(encoders) if name == "sentence-transformers" else encoders[0]
        encoders = [nn.parallel.DistributedDataParallel(whole)] * 2
    elif arguments.engine == "zero2":
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        }
        optimizer, *_ = deepspeed.initialize(model=encoders[0], optimizer=optimizer, config=config)
        encoders = [optimizer] * 2  # its step() and zero_grad() are those of the optimizer
    step, inputs = IMPLEMENTATIONS[name][0](encoders, arguments), inputs_of(arguments, device)
    losses, began = [], 0.0
    # Around a whole step of the others, autocast of PyTorch 2.8 would keep the copies of weights that the pass without
    # gradients made, and the weights would receive no gradient.
    around_step = torch.autocast(device.type, torch.bfloat16) if name == "GradientCache" else nullcontext()
    for number in range(arguments.warmup + arguments.steps):
        if number == arguments.warmup:
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        optimizer.zero_grad()
        with around_step:
            losses.append(step(inputs))
        optimizer.step()
    last = float(losses[-1])  # waits for the device
    seconds = (time.perf_counter() - began) / arguments.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    batch = arguments.batch * (dist.get_world_size() if dist.is_initialized() else 1)
    return f"| {name} | {batch / seconds:,.0f} | {peak:.1f} | {float(losses[0]):.4f} | {last:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bert", "clip"], default="bert")
    parser.add_argument("--engine", choices=["ddp", "zero2"], help="under torchrun, with --model bert")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--length", type=int, default=77, help="tokens per text, with padding")
    parser.add_argument("--mean-length", type=int, help="bert: texts of log-normal lengths with this mean, padded")
    parser.add_argument("--keep", default="auto", help='GradientCache: "auto", "all" or a number of kept graphs')
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4, help="GradientCache measures in the first two steps")
    parser.add_argument("--only", nargs="*", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.keep = int(arguments.keep) if arguments.keep.isdecimal() else arguments.keep
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.engine:
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        sys.stdout = sys.stdout if dist.get_rank() == 0 else open(os.devnull, "w")  # noqa: SIM115
    print("| implementation | samples/s | peak GiB | first loss | last loss |\n| --- | --- | --- | --- | --- |")
    for name in arguments.only:
        if importlib.util.find_spec(IMPLEMENTATIONS[name][1]) is None:
            print(f"| {name} | not installed | | | |")
            continue
        try:
            print(measure(name, arguments, device), flush=True)
        except torch.OutOfMemoryError:
            print(f"| {name} | out of memory | | | |", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
