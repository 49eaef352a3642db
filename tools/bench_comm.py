"""Bytes that each rank sends per step, measured with DeepSpeed's comms logger beside the formulas.

usage: deepspeed --num_gpus 4 tools/bench_comm.py [--batch 64] [--embedding 128]

First table: the loss, forward and backward, for every exchange and reduction, and for open_clip's and DisCo-CLIP's
schemes written as baselines, in bfloat16 features with float32 accumulators. What is features, gradients and scalars is
found by measuring three times: with twice the embedding, and with float32 features. FastCLIP's rows (v3 with one
temperature, v2 with two per sample) are whole steps of the loss; "state" is what the state of their samples sends,
measured by itself. Second table: the model's own gradient reduction, one optimizer step of a linear model at every ZeRO
stage, with what DeepSpeed offers to shrink it. A row that cannot run on this machine says why. All ranks measure; the
first prints its own bytes.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from bench_peers import disco_clip_traffic, open_clip_traffic
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_rows, sum_over_ranks
from megaclip.comm.groups import group_size
from megaclip.comm.volume import bytes_sent
from megaclip.engine.process_group import start_process_group
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from megaclip.losses.costs import LOSS_COSTS, Sizes, Traffic

Step = Callable[[Tensor, Tensor], None]

SAMPLES = 2**20  # of the data set whose state FastCLIP keeps
WIDTH = 256  # of the linear model in the second table


def main() -> None:
    options = parse_options()
    start_process_group()
    if group_size() == 1:
        sys.exit("error: start it with the deepspeed launcher: it measures what two ranks or more send each other")
    say(f"{group_size()} ranks, b = {options.batch}, D = {options.embedding}; bytes sent per rank and step\n")
    say(f"{'loss':<34}{'features':>12}{'gradients':>12}{'scalars':>12}{'state':>12}{'total':>12}{'formula':>12}")
    for name, step, formula in schemes(options.batch, options.embedding):
        traffic = measure(step, options.batch, options.embedding)
        parts = (*vars(traffic).values(), traffic.total, formula.total)
        say(f"{name:<34}" + "".join(f"{part:>12.0f}" for part in parts))
    say(f"\n{'model, one step':<44}{'bytes':>12}  by operation")
    for name, settings in model_settings():
        say(f"{name:<44}{model_row(settings)}")
    dist.destroy_process_group()


def schemes(batch: int, embedding: int) -> list[tuple[str, Step, Traffic]]:
    """(name, one step on given features, what the formula says for bfloat16 features)."""
    sizes = Sizes(world_size=group_size(), batch=batch, embedding=embedding, feature_bytes=2)
    return [
        *(
            (
                f"{name}{exchange} + {reduction}",
                make(exchange, reduction),
                LOSS_COSTS[loss].traffic(exchange, reduction, sizes),
            )
            for name, loss, make in (
                ("", "clip", loss_step),
                ("sigmoid, ", "siglip", sigmoid_step),
                ("fastclip_v3, ", "fastclip_v3", partial(FastClipStep, "fastclip_v3")),
                ("fastclip_v2, ", "fastclip_v2", partial(FastClipStep, "fastclip_v2")),
            )
            for exchange, reduction in itertools.product(("ring", "all_gather"), ("feature", "scalar"))
        ),
        ("open_clip's scheme", open_clip_step, open_clip_traffic(sizes)),
        ("DisCo-CLIP's scheme", disco_clip_step, disco_clip_traffic(sizes)),
    ]


def loss_step(exchange: str, reduction: str) -> Step:
    loss = ClipLoss(exchange=exchange, reduction=reduction)

    def step(x: Tensor, y: Tensor) -> None:
        loss(x.requires_grad_(), y.requires_grad_(), torch.tensor([10.0], device=x.device)).backward()

    return step


def sigmoid_step(exchange: str, reduction: str) -> Step:
    loss = SigLipLoss(exchange=exchange, reduction=reduction)

    def step(x: Tensor, y: Tensor) -> None:
        scale, bias = (torch.tensor([value], device=x.device) for value in (10.0, -10.0))
        loss(x.requires_grad_(), y.requires_grad_(), scale, bias).backward()

    return step


class FastClipStep:
    """One step of a global contrastive loss; the ids of a batch are spread evenly over their owners."""

    def __init__(self, variant: str, exchange: str, reduction: str) -> None:
        self._loss = FastClipLoss(variant, samples=SAMPLES, exchange=exchange, reduction=reduction)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self._loss.to(x.device)
        self._loss(x.requires_grad_(), y.requires_grad_(), ids=self._ids(len(x)), epoch=0.5).backward()
        self._loss.step()

    def state_only(self, batch: int) -> None:
        """The messages of the samples' state, without those of the loss."""
        state = self._loss.state
        ticket = state.fetch(self._ids(batch))
        state.commit(ticket, ticket.rows(), lambda held, received, inverse: held)

    def _ids(self, batch: int) -> Tensor:
        return dist.get_rank() * batch + torch.arange(batch)


def open_clip_step(x: Tensor, y: Tensor) -> None:
    """The messages of local_loss with gather_with_grad; gradients are in the features' dtype."""
    for features in (x, y):
        reduce_scatter_rows(gather_rows(features))


def disco_clip_step(x: Tensor, y: Tensor) -> None:
    """The messages of the decomposed loss: every rank adds up the gradients of all features."""
    for features in (x, y):
        sum_over_ranks(gather_rows(features))


def measure(step: Step, batch: int, embedding: int) -> Traffic:
    """This rank's traffic in bfloat16, told apart by what grows with the embedding and with the features' dtype."""

    def sent(width: int, dtype: torch.dtype) -> dict[str, float]:
        device = get_accelerator().current_device_name()
        features = torch.randn(2, batch, width, device=device).to(dtype)
        return bytes_sent(lambda: step(features[0].clone(), features[1].clone()))

    as_asked = sent(embedding, torch.bfloat16)
    narrow, wide = sum(as_asked.values()), sum(sent(2 * embedding, torch.bfloat16).values())
    if step in (open_clip_step, disco_clip_step):  # their gradients have the features' dtype, but are never gathered
        features = as_asked["all_gather_into_tensor"]
    else:
        features = sum(sent(embedding, torch.float32).values()) - narrow
    state = 0.0
    if isinstance(step, FastClipStep):
        state = sum(bytes_sent(lambda: step.state_only(batch)).values())
    return Traffic(features, wide - narrow - features, 2 * narrow - wide - state, state)


def model_settings() -> list[tuple[str, dict[str, Any]]]:
    rows: list[tuple[str, dict[str, Any]]] = [
        (f"ZeRO-{stage}, float32", {"zero_optimization": {"stage": stage}}) for stage in range(4)
    ]
    rows += [
        (
            f"ZeRO-{stage}, communication_data_type bf16",
            {"zero_optimization": {"stage": stage}, "communication_data_type": "bf16"},
        )
        for stage in range(4)
    ]
    quantised = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    rows.append(("ZeRO++: ZeRO-3, quantised both ways", {"zero_optimization": quantised, "bf16": {"enabled": True}}))
    return rows


def model_row(settings: dict[str, Any]) -> str:
    """The bytes of one forward, backward and update of a linear model, or why there are none."""
    if settings["zero_optimization"].get("zero_quantized_gradients") and get_accelerator().device_name() == "cpu":
        return f"{'-':>12}  not measured: DeepSpeed's quantiser is a CUDA kernel"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **settings,
    }
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        features = torch.randn(1, WIDTH, device=engine.device, dtype=engine.get_data_types()[0])
        engine.backward(engine(features).square().mean())
        engine.step()

    step()  # the first one allocates and traces
    try:
        sent = bytes_sent(step)
    except ValueError as error:
        return f"{'-':>12}  not measured: {error}"
    details = ", ".join(f"{name} {size:.0f}" for name, size in sent.items())
    return f"{sum(sent.values()):>12.0f}  {details} ({WIDTH * WIDTH} parameters)"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="local batch b")
    parser.add_argument("--embedding", type=int, default=128, help="embedding dimension D")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # from the deepspeed launcher
    return parser.parse_args()


if __name__ == "__main__":
    main()
