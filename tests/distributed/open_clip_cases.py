"""Two training steps of open_clip's towers through the engine (`train`) and in one process (`oracle`).

The oracle is plain PyTorch in float64 on the whole batch: open_clip's modules, cross-entropy over all pairs, autograd
and AdamW. It follows the documented rules for random numbers and batch norms. A rank encodes a chunk with seeds that
depend on the tower and the chunk's number. Each chunk is normalised by its own statistics, and the running statistics
are averaged over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megaclip.checkpoint import store
from megaclip.config.section import LoraSettings
from megaclip.data import ImageTransform
from megaclip.losses import LOSSES
from megaclip.models import DualEncoder, OpenClipConfig, build_model
from megaclip.models.lora import add_adapters
from megaclip.objectives import Caption
from megaclip.open_clip_package import import_open_clip
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.gradient_cache import RandomState
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.engine_cases import (
    BATCH,
    SEED,
    STEPS,
    UNLOCKED_GROUPS,
    OracleTraining,
    Outcome,
    Rates,
    same_rates,
    whole_parameters,
)
from tests.distributed.memory_batch import MemoryBatch
from tests.open_clip_families import CONTEXT_LENGTH, CUT_CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family

CHUNKS = 2
CAPTION_WEIGHT = 2.0
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
TRANSFORM = ImageTransform(IMAGE_SIZE, mean=MEAN, std=STD)


@dataclass(frozen=True)
class Case(engine_cases.Case):
    """Settings of one training. captions: "cut", "padded", or "" for captions that have the context length."""

    accumulation: int = CHUNKS
    family: str = ""
    resumes: bool = True
    """Repeat the last step in a new engine that loads the checkpoint of the step before."""
    fault: str = ""
    """Mistake in the oracle: "dropout" (other random numbers), "statistics" (those of one rank only)."""


def description(case: Case, folder: Path) -> OpenClipConfig:
    """Return the model of a case. folder: see `family`."""
    config = family(case.family, folder)
    return config.replace(text_cfg={"context_length": CUT_CONTEXT_LENGTH}) if case.captions == "cut" else config


def whole_batch(step: int, *, cuts: bool = False) -> tuple[Tensor, Tensor]:
    """Return pixels (BATCH, 3, H, W) uint8 and tokens (BATCH, L), the same in every process.

    cuts: captions have 2 to CUT_CONTEXT_LENGTH tokens.
    """
    generator = torch.Generator().manual_seed(200 + step)
    images = torch.randint(256, (BATCH, 3, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)
    if cuts:
        tokens = torch.randint(3, VOCAB_SIZE, (BATCH, CUT_CONTEXT_LENGTH), generator=generator)
        ends = torch.randint(1, CUT_CONTEXT_LENGTH, (BATCH, 1), generator=generator)
        places = torch.arange(CUT_CONTEXT_LENGTH)
        return images, tokens.where(places < ends, 0).where(places != ends, 2)
    words = torch.randint(3, VOCAB_SIZE, (BATCH, CONTEXT_LENGTH - 1), generator=generator)
    return images, torch.cat([words, torch.full((BATCH, 1), 2)], dim=1)


class SmoothReLU(nn.Softplus):
    """Smooth replacement for ReLU, whose gradient depends on rounding where an input is almost zero."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()


@contextmanager
def smooth_activations() -> Iterator[None]:
    """Replace ReLU by SmoothReLU in models that are built in the body of the `with` statement."""
    import_open_clip()  # must come first: it imports timm, which stores ReLU in tables
    from transformers import activations  # its table is created at its first import, with the ReLU of that moment

    with mock.patch("torch.nn.ReLU", SmoothReLU), mock.patch.dict(activations.ACT2CLS, relu=SmoothReLU):
        yield


def start_engine(case: Case, folder: Path, *more: str) -> DeepSpeedEngine:
    """Build the engine as a run does. more: further flags."""
    with smooth_activations():
        config = description(case, folder)
        objective = Caption(CAPTION_WEIGHT) if config.has_decoder else None
        return engine_cases.start_engine(case, None, *more, model=config, objective=objective)


def take_step(engine: DeepSpeedEngine, case: Case, step: int, outcome: Outcome) -> None:
    """Take one optimizer step on this rank, together with the other rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, tokens = (whole[rank::ranks] for whole in whole_batch(step, cuts=bool(case.captions)))
    feed = DeviceFeed(torch.device("cpu"), torch.bfloat16 if case.bf16 else torch.float32, TRANSFORM.normalise)
    model = engine.module
    cut = model.config.text_cfg if case.captions == "cut" else None
    loss = LOSSES["clip" if model.logit_bias is None else "siglip"](exchange="ring", reduction="feature")
    batch = MemoryBatch(
        images.chunk(case.accumulation), tokens, feed, text_chunks=case.text_chunks or case.accumulation, cut=cut
    )
    engine_cases.take_step(engine, case, step, outcome, loss, batch)


def statistics_of(model: DualEncoder) -> dict[str, np.ndarray]:
    """Return copies of the buffers that a checkpoint contains."""
    parameters = dict(model.named_parameters())
    return {name: w.numpy().copy() for name, w in model.named_weights().items() if name not in parameters}


def train(case: Case, folder: Path, checkpoints: Path) -> Outcome:
    """Train two steps. Save after the last step, and after the first one if the case resumes from it."""
    torch.compiler.reset()
    engine, outcome = start_engine(case, folder), Outcome()
    graphs = counters["stats"]["unique_graphs"]
    for step in range(STEPS):
        take_step(engine, case, step, outcome)
        if case.resumes or step == STEPS - 1:
            store.save(engine, store.Target(checkpoints, step + 1, {"step": step + 1}, STEPS))
    assert case.compiled == (counters["stats"]["unique_graphs"] > graphs)
    outcome.parameters, outcome.statistics = whole_parameters(engine), statistics_of(engine.module)
    if case.resumes:
        resumed = start_engine(case, folder)
        load_checkpoint(resumed, checkpoints / "step_00000001")
        take_step(resumed, case, 1, Outcome())
        outcome.resumed = whole_parameters(resumed) | statistics_of(resumed.module)
    return outcome


def oracle(case: Case, folder: Path, rates: Rates = same_rates) -> Outcome:
    """Train in one process in float64 on the whole batch."""
    torch.manual_seed(SEED)
    with smooth_activations():
        model = build_model(description(case, folder)).double().train()
    if case.locked:
        model.lock_tower("image", UNLOCKED_GROUPS[case.locked])
        model.lock_tower("text", UNLOCKED_GROUPS[case.locked])
    if lora := dict(case.section).get("lora"):
        torch.manual_seed(SEED)
        add_adapters(model, LoraSettings(**lora).model_dump())
    training = OracleTraining(case, rates=rates, model=model)
    outcome = training.train(
        lambda step: _features(model, case, step),
        lambda loss, _, __, step: loss + caption_loss(model, case, step),
    )
    outcome.statistics = statistics_of(model)
    return outcome


def caption_loss(model: DualEncoder, case: Case, step: int) -> Tensor | float:
    """Return the caption loss of open_clip's CoCa in one process, from the logits of all tokens."""
    if not model.config.has_decoder:
        return 0.0
    import_open_clip()
    from open_clip.transformer import MultimodalTransformer

    pixels, tokens = _inputs(case, step)
    decoder = SimpleNamespace(**model.text_decoder._modules, batch_first=True, grad_checkpointing=False)
    decoder.text_projection, decoder.attn_mask = model.text_decoder.text_projection, model.text_decoder.attn_mask
    logits = MultimodalTransformer.forward(decoder, model.visual(pixels)[1], model.text(tokens)[1][:, :-1])
    return CAPTION_WEIGHT * nn.functional.cross_entropy(logits.permute(0, 2, 1), tokens[:, 1:], ignore_index=0)


def _inputs(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return normalised pixels and tokens of the whole batch."""
    images, tokens = whole_batch(step, cuts=bool(case.captions))
    pixels = (images.double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(STD).double().view(
        3, 1, 1
    )
    return pixels, tokens


def _features(model: DualEncoder, case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return the features (BATCH, D) of both towers, ordered by rank."""
    pixels, tokens = _inputs(case, step)
    buffers = model.statistics(model.visual)
    before = [buffer.clone() for buffer in buffers]
    after: list[list[Tensor]] = []
    x, y = [], []
    for rank in range(case.ranks):
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)
        state = RandomState(SEED, step + 1 if case.fault == "dropout" else step, rank)
        for index, chunk in enumerate(pixels[rank :: case.ranks].chunk(case.accumulation)):
            state.reseed(Tower.IMAGE, index)
            x.append(model(chunk, None)[0])
        for index, chunk in enumerate(tokens[rank :: case.ranks].chunk(case.text_chunks or case.accumulation)):
            state.reseed(Tower.TEXT, index)
            y.append(model(None, chunk)[1])
        after.append([buffer.clone() for buffer in buffers])
    for buffer, *values in zip(buffers, *after, strict=True):
        if buffer.is_floating_point() and case.fault != "statistics":
            buffer.data.copy_(torch.stack(values).mean(dim=0))
    return torch.cat(x), torch.cat(y)
