"""Measure the bytes that each rank sends per step with DeepSpeed's comms logger, and print them beside the formulas.

usage: deepspeed --num_gpus 4 tools/bench_comm.py [--batch 64] [--embedding 128]

First table: the loss, forward and backward, for every exchange and reduction, with bfloat16 features and float32
accumulators. It includes the schemes of open_clip and DisCo-CLIP as baselines. Features, gradients and scalars are
separated by two more measurements: with twice the embedding dimension, and with float32 features. The rows of FastCLIP
(v3 with one temperature, v2 with two per sample) are whole steps of the loss. "state" is the traffic of the samples'
state, measured separately.

Second table: the model's own gradient reduction. It is one optimizer step of a linear model at every ZeRO stage, with
DeepSpeed's settings that reduce the traffic.

A row that cannot be measured on this machine prints the reason. All ranks measure; the first rank prints its own bytes.
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
from deepspeed.accelerator import get_accelerator
from peers import disco_clip_traffic, open_clip_traffic
from torch import Tensor
from volume import bytes_sent

from megaclip.comm.collectives import gather_rows, reduce_scatter_rows, sum_over_ranks
from megaclip.comm.groups import group_size
from megaclip.engine.process_group import start_process_group
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from megaclip.losses.costs import LOSS_COSTS, Sizes, Traffic

Step = Callable[[Tensor, Tensor], None]

SAMPLES = 2**20  # size of the dataset whose state FastCLIP keeps
WIDTH = 256  # width of the linear model in the second table


def main() -> None:
    options = parse_options()
    start_process_group()
    if group_size() == 1:
        sys.exit("error: 1 rank; this benchmark requires at least 2: start it with the deepspeed launcher")
    print_rank_0(f"{group_size()} ranks, b = {options.batch}, D = {options.embedding}; bytes sent per rank and step\n")
    print_rank_0(
        f"{'loss':<34}{'features':>12}{'gradients':>12}{'scalars':>12}{'state':>12}{'total':>12}{'formula':>12}"
    )
    for name, step, formula in schemes(options.batch, options.embedding):
        traffic = measure(step, options.batch, options.embedding)
        parts = (*vars(traffic).values(), traffic.total, formula.total)
        print_rank_0(f"{name:<34}" + "".join(f"{part:>12.0f}" for part in parts))
    print_rank_0(f"\n{'model, one step':<44}{'bytes':>12}  by operation")
    for name, settings in model_settings():
        print_rank_0(f"{name:<44}{model_row(settings)}")
    dist.destroy_process_group()


def schemes(batch: int, embedding: int) -> list[tuple[str, Step, Traffic]]:
    """Return (name, a function that runs one step on given features, the formula's traffic for bfloat16 features)."""
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
    """One step of a global contrastive loss. The ids of a batch are spread evenly over their owners."""

    def __init__(self, variant: str, exchange: str, reduction: str) -> None:
        self._loss = FastClipLoss(variant, samples=SAMPLES, exchange=exchange, reduction=reduction)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self._loss.to(x.device)
        self._loss(x.requires_grad_(), y.requires_grad_(), ids=self._ids(len(x)), epoch=0.5).backward()
        self._loss.step()

    def state_only(self, batch: int) -> None:
        """Send only the messages of the samples' state, without those of the loss."""
        state = self._loss.state
        ticket = state.fetch(self._ids(batch))
        state.commit(ticket, ticket.rows(), lambda held, received, inverse: held)

    def _ids(self, batch: int) -> Tensor:
        return dist.get_rank() * batch + torch.arange(batch)


def open_clip_step(x: Tensor, y: Tensor) -> None:
    """Send the messages of local_loss with gather_with_grad. Gradients have the features' dtype."""
    for features in (x, y):
        reduce_scatter_rows(gather_rows(features))


def disco_clip_step(x: Tensor, y: Tensor) -> None:
    """Send the messages of the decomposed loss: every rank sums the gradients of all features."""
    for features in (x, y):
        sum_over_ranks(gather_rows(features))


def measure(step: Step, batch: int, embedding: int) -> Traffic:
    """Return this rank's traffic with bfloat16 features, separated by its growth with embedding and features' dtype."""

    def sent(width: int, dtype: torch.dtype) -> dict[str, float]:
        device = get_accelerator().current_device_name()
        features = torch.randn(2, batch, width, device=device).to(dtype)
        return bytes_sent(lambda: step(features[0].clone(), features[1].clone()))

    by_operation = sent(embedding, torch.bfloat16)
    narrow, wide = sum(by_operation.values()), sum(sent(2 * embedding, torch.bfloat16).values())
    if step in (open_clip_step, disco_clip_step):  # their gradients have the features' dtype and are not gathered
        features = by_operation["all_gather_into_tensor"]
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
    """Return the bytes of one training step of a linear model as text, or the reason why there are none."""
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

    step()  # the first step allocates and traces
    try:
        sent = bytes_sent(step)
    except ValueError as error:
        return f"{'-':>12}  not measured: {error}"
    details = ", ".join(f"{name} {size:.0f}" for name, size in sent.items())
    return f"{sum(sent.values()):>12.0f}  {details} ({WIDTH * WIDTH} parameters)"


def print_rank_0(line: str) -> None:
    """Print `line` on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank b")
    parser.add_argument("--embedding", type=int, default=128, help="embedding dimension D")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # set by the deepspeed launcher
    return parser.parse_args()


if __name__ == "__main__":
    main()
