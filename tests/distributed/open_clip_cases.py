"""Two training steps of open_clip's towers through the engine (`train`) and in one process (`oracle`).

The oracle is plain PyTorch in float64 on the whole batch: open_clip's modules, cross-entropy over all pairs, autograd
and AdamW. It follows the documented rules for random numbers and batch norms. A rank encodes a chunk with seeds that
depend on the tower and the chunk's number. Each chunk is normalised by its own statistics, and the running statistics
are averaged over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megaclip.checkpoint import store
from megaclip.config import parse_arguments
from megaclip.data import ImageTransform
from megaclip.engine.process_group import quiet_deepspeed
from megaclip.losses import LOSSES
from megaclip.models import DualEncoder, OpenClipConfig, build_model, compilation
from megaclip.open_clip_package import import_open_clip
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.gradient_cache import RandomState, accumulate_gradients, trained_towers
from megaclip.step.layout import kept_graphs
from megaclip.zero.build import build_engine
from megaclip.zero.logit_scale import LogitScale, MasterScalar
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed import engine_cases
from tests.distributed.engine_cases import (
    BATCH,
    BETAS,
    EPS,
    LEARNING_RATES,
    SEED,
    STEPS,
    WORLD_SIZE,
    Rates,
    hand_made_groups,
    largest_move,
    same_rates,
    training_config,
    whole_parameters,
)
from tests.distributed.memory_batch import MemoryBatch
from tests.open_clip_families import CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family

CHUNKS = 2
CUT_CONTEXT_LENGTH = 24
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
TRANSFORM = ImageTransform(IMAGE_SIZE, mean=MEAN, std=STD)


@dataclass(frozen=True)
class Case:
    """Settings of one training."""

    family: str
    stage: int = 0
    text_chunks: int = CHUNKS
    keep: int = 0
    """megaclip.keep_graphs."""
    checkpointing: str = ""
    bf16: bool = False
    offload: str = ""
    """As for `engine_cases.Case`."""
    resumes: bool = True
    """Repeat the last step in a new engine that loads the checkpoint of the step before."""
    compiled: bool = False
    """Run the towers through torch.compile, with the backend engine_cases.COMPILER."""
    cuts: bool = False
    """Captions of several lengths, which the engine cuts."""
    locked: bool = False
    """Lock both towers, except their last two groups."""
    section: tuple[tuple[str, float], ...] = ()
    """More settings of the section "megaclip"."""
    fault: str = ""
    """Mistake in the oracle: "dropout" (other random numbers), "statistics" (those of one rank only)."""


@dataclass
class Outcome:
    """Results of two steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole parameters after the last step."""
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    """Buffers of a checkpoint after the last step."""
    largest_move: float = 0.0
    resumed: dict[str, np.ndarray] = field(default_factory=dict)
    """Parameters and statistics after the last step, of an engine that loaded the checkpoint of the first one."""


def description(case: Case, folder: Path) -> OpenClipConfig:
    """Return the model of a case. folder: see `family`."""
    config = family(case.family, folder)
    return config.replace(text_cfg={"context_length": CUT_CONTEXT_LENGTH}) if case.cuts else config


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
    quiet_deepspeed()
    flags = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x", "--seed", str(SEED), *more]
    if case.locked:
        flags += ["--lock-image", "--lock-image-unlocked-groups", "2"]
        flags += ["--lock-text", "--lock-text-unlocked-layers", "2"]
    settings = engine_cases.Case(
        case.stage,
        CHUNKS,
        checkpointing=case.checkpointing,
        bf16=case.bf16,
        offload=case.offload,
        section=case.section,
    )
    compilation.BACKEND = engine_cases.COMPILER
    with smooth_activations():
        arguments, config = parse_arguments(flags), description(case, folder)
        return build_engine(training_config(settings), arguments, config, compiles=case.compiled)


def take_step(engine: DeepSpeedEngine, case: Case, step: int, outcome: Outcome) -> None:
    """Take one optimizer step on this rank, together with the other rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, tokens = (whole[rank::ranks] for whole in whole_batch(step, cuts=case.cuts))
    feed = DeviceFeed(torch.device("cpu"), torch.bfloat16 if case.bf16 else torch.float32, TRANSFORM.normalise)
    bias, model = engine.module.logit_bias, engine.module
    cut = model.config.text_cfg if case.cuts else None
    loss = accumulate_gradients(
        engine,
        LOSSES["clip" if bias is None else "siglip"](exchange="ring", reduction="feature"),
        MemoryBatch(images.chunk(CHUNKS), tokens, feed, text_chunks=case.text_chunks, cut=cut),
        LogitScale(engine, 100.0).read(),
        RandomState(SEED, step, rank),
        logit_bias=None if bias is None else MasterScalar(bias).read(),
        coalesce=False,
        kept=kept_graphs(case.keep, (CHUNKS, case.text_chunks), [tower in trained_towers(model) for tower in Tower]),
    )
    outcome.losses.append(loss.item())
    set_learning_rate(engine, LEARNING_RATES[step])
    outcome.norms.append(update(engine))


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
        store.load(resumed, checkpoints, "step_00000001")
        take_step(resumed, case, 1, Outcome())
        outcome.resumed = whole_parameters(resumed) | statistics_of(resumed.module)
    return outcome


def oracle(case: Case, folder: Path, rates: Rates = same_rates) -> Outcome:
    """Train in one process in float64 on the whole batch."""
    torch.manual_seed(SEED)
    with smooth_activations():
        model = build_model(description(case, folder)).double().train()
    if case.locked:
        model.lock_image_tower(2)
        model.lock_text_tower(2)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = hand_made_groups(named, rates)
    optimizer, outcome = torch.optim.AdamW(groups, betas=BETAS, eps=EPS), Outcome()
    for step in range(STEPS):
        x, y = _features(model, case, step)
        logits, labels = model.logit_scale.exp() * x @ y.T, torch.arange(BATCH)
        if model.logit_bias is None:
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        else:
            loss = -F.logsigmoid((2 * torch.eye(BATCH) - 1) * (logits + model.logit_bias)).sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.norms.append(torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item())
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step] * group["factor"]
        optimizer.step()
    outcome.parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    outcome.statistics = statistics_of(model)
    outcome.largest_move = largest_move(start, outcome.parameters)
    return outcome


def _features(model: DualEncoder, case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return the features (BATCH, D) of both towers, ordered by rank."""
    images, tokens = whole_batch(step, cuts=case.cuts)
    pixels = (images.double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(STD).double().view(
        3, 1, 1
    )
    buffers = model.statistics(model.visual)
    before = [buffer.clone() for buffer in buffers]
    after: list[list[Tensor]] = []
    x, y = [], []
    for rank in range(WORLD_SIZE):
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)
        state = RandomState(SEED, step + 1 if case.fault == "dropout" else step, rank)
        for index, chunk in enumerate(pixels[rank::WORLD_SIZE].chunk(CHUNKS)):
            state.reseed(Tower.IMAGE, index)
            x.append(model(chunk, None)[0])
        for index, chunk in enumerate(tokens[rank::WORLD_SIZE].chunk(case.text_chunks)):
            state.reseed(Tower.TEXT, index)
            y.append(model(None, chunk)[1])
        after.append([buffer.clone() for buffer in buffers])
    for buffer, *values in zip(buffers, *after, strict=True):
        if buffer.is_floating_point() and case.fault != "statistics":
            buffer.data.copy_(torch.stack(values).mean(dim=0))
    return torch.cat(x), torch.cat(y)
