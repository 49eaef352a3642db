"""Two training steps through the engine (`train`), and the same two steps in one process in float64 (`oracle`).

`train` builds everything as a run does: ds_config.json from a file, `build_engine`, `accumulate_gradients`, `update`.
The oracle uses whole-batch cross-entropy, autograd, and torch's AdamW with the weight-decay rule of open_clip.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor

from megaclip.comm.collectives import gather_rows
from megaclip.comm.groups import RankGroup
from megaclip.config import TrainingConfig, load_training_config, parse_arguments
from megaclip.data import ImageTransform
from megaclip.engine.process_group import quiet_deepspeed
from megaclip.losses import LOSSES
from megaclip.models import ClipModel, DualEncoder, ModelConfig, ModelDescription, build_model, compilation
from megaclip.models.layers import split_dim
from megaclip.objectives import Objective
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.gradient_cache import RandomState, accumulate_gradients, trained_towers
from megaclip.step.layout import KeptGraphs, kept_graphs
from megaclip.zero.build import build_engine
from megaclip.zero.logit_scale import LogitScale, MasterScalar
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed.memory_batch import MemoryBatch
from tests.open_clip_families import own_description

WORLD_SIZE = 2
COMPILER: Any = "aot_eager"
"""Backend of torch.compile that traces forward and backward pass and compiles nothing."""
BATCH = 12
STEPS = 2
SEED = 5
# The two steps differ in their rate, so a rate that misses a group or a step is detected. eps is as large as typical
# gradients. Otherwise Adam magnifies the rounding of gradients that are zero in theory (the biases of the keys).
LEARNING_RATES = (5e-3, 1e-2)
EPS = 5e-2
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1
MODEL = ModelConfig.from_dict(
    {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 8, "layers": 2, "width": 32, "head_width": 8, "patch_size": 2},
        "text_cfg": {
            "context_length": 6,
            "vocab_size": 32,
            "width": 32,
            "heads": 4,
            "layers": 1,
            "eos_id": 2,
            "pool_type": "eos",
        },
    }
)

# Most captions are shorter than the context length. Rank r of two ranks has every second row, starting at r.
CAPTION_MODEL = MODEL.replace(text_cfg={"context_length": 32, "layers": 2})
CAPTION_LENGTHS = (12, 16, 9, 5, 17, 8, 2, 7, 9, 3, 1, 8)
"""Number of tokens of each caption of the batch, including the end of text. 1: the caption has no end of text.

On one rank, the longest captions of the sorted chunks have 17 and 9 tokens. One token less would be cut at 16 and 8.
"""

MEAN = torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor([0.2, 0.3, 0.25], dtype=torch.float64).view(3, 1, 1)
TRANSFORM = ImageTransform(8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))


@dataclass(frozen=True)
class Case:
    """Settings of one training; the defaults turn every feature off."""

    stage: int = 0
    accumulation: int = 1
    """Number of image chunks per rank."""
    text_chunks: int = 0
    """Number of text chunks per rank; 0: as many as image chunks."""
    embeddings_on_cpu: bool = False
    bf16: bool = False
    grad_accum_dtype: str | None = None
    checkpointing: str = ""
    """"", "plain" or "cpu"."""
    offload: str = ""
    """"", "optimizer" or "all" (parameters too)."""
    coalesce: bool = False
    keep: int = 0
    """megaclip.keep_graphs."""
    overlap: bool = False
    """zero_optimization.overlap_comm: reduce gradients during the backward pass."""
    patch_dropout: float = 0.0
    clipping: float = 0.0
    locked: str = ""
    """Locked parameters: "" none; "image", "text" or "both" whole towers; "most" both towers except their projections;
    "below" both towers except their projections and last blocks."""
    persistence_threshold: int = 0
    compiled: bool = False
    """Run the towers through torch.compile, with the backend COMPILER."""
    loss: str = "clip"
    """"clip", "siglip" with a logit bias in the model, or in test_engine_fastclip.py one of FastCLIP's."""
    exchange: str = "ring"
    reduction: str = "feature"
    optimizer: str = "AdamW"
    tensor_parallel: int = 1
    """Ranks that form one replica of the model."""
    ranks: int = WORLD_SIZE
    """Ranks that share the batch."""
    family: str = ""
    """Model of tests.open_clip_families.OWN_TIMM instead of MODEL."""
    captions: str = ""
    """Captions of CAPTION_LENGTHS: "cut", or "padded" to the context length. "": all have the context length."""
    section: tuple[tuple[str, Any], ...] = ()
    """More settings of the section "megaclip"."""
    feature_fault: float = 1.0
    """Factor of the feature gradients. A value other than 1 is a planted fault."""
    scale_fault: float = 1.0
    """Factor of logit_scale's gradient. A value other than 1 is a planted fault."""


def model_of(case: Case) -> ModelConfig:
    """Return the model. SigLIP's initial values would give gradients of norm 100, too large for the bounds."""
    model = CAPTION_MODEL if case.captions else MODEL
    if case.family:
        model = ModelConfig.from_dict(own_description(case.family))
        if case.family.startswith("eva02"):  # its projection starts so near zero that rounding decides Adam's steps
            model = model.replace(vision_cfg={"timm_proj": "none"})
    model = model.replace(vision_cfg={"patch_dropout": case.patch_dropout})
    return model.replace(init_logit_scale=-1.0, init_logit_bias=-3.0) if case.loss == "siglip" else model


@dataclass
class Outcome:
    """Results of two steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scale_gradients: list[float] = field(default_factory=list)
    """Gradients of logit_scale and, if the model has one, logit_bias, step by step."""
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole parameters after the last step."""
    largest_move: float = 0.0
    """Largest move of a parameter in the oracle. Differences of parameters are relative to this value."""
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    """Buffers of a checkpoint after the last step, of models that have any."""
    resumed: dict[str, np.ndarray] = field(default_factory=dict)
    """Parameters and statistics after the last step, of an engine that loaded the checkpoint of the first one."""


def whole_batch(step: int, *, captions: bool = False, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return pixels (BATCH, 3, 8, 8) uint8 and tokens (BATCH, L) of a step, the same in every process.

    captions: use the lengths of CAPTION_LENGTHS. Default: the context length of MODEL.
    """
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randint(256, (BATCH, 3, size, size), generator=generator, dtype=torch.uint8)
    if captions:
        return images, padded_captions(generator)
    words = torch.randint(3, 32, (BATCH, 5), generator=generator)
    return images, torch.cat([words, torch.full((BATCH, 1), 2)], dim=1)


def padded_captions(generator: torch.Generator) -> Tensor:
    """Return tokens (BATCH, L).

    Random tokens instead of padding follow the end of text, so they change the results if they are read.
    """
    text = CAPTION_MODEL.text_cfg
    tokens = torch.randint(3, 32, (BATCH, text.context_length), generator=generator)
    for row, length in zip(tokens, CAPTION_LENGTHS, strict=True):
        if length > 1:
            row[length - 1] = text.eos_id
            row[-1] = text.eos_id  # a second end of text
    return tokens


def share_of(
    step: int, rank: int, ranks: int = WORLD_SIZE, captions: bool = False, size: int = 8
) -> tuple[Tensor, Tensor]:
    """Return the pixels and tokens of one rank: every `ranks`-th sample."""
    images, tokens = (whole[rank::ranks] for whole in whole_batch(step, captions=captions, size=size))
    return images, tokens


def batch_of(case: Case, step: int, normalise: Callable[..., Tensor] = TRANSFORM.normalise) -> MemoryBatch:
    """Return this rank's share of the batch."""
    model = model_of(case)
    size = model.vision_cfg.image_size
    images, tokens = share_of(step, dist.get_rank(), dist.get_world_size(), bool(case.captions), size)
    device = torch.device(get_accelerator().current_device_name())
    feed = DeviceFeed(device, torch.bfloat16 if case.bf16 else torch.float32, normalise)
    return MemoryBatch(
        images.chunk(case.accumulation),
        tokens,
        feed,
        text_chunks=case.text_chunks or case.accumulation,
        cut=model.text_cfg if case.captions == "cut" else None,
        tensor_ranks=case.tensor_parallel,
    )


def poisoned_batch_of(case: Case, step: int) -> MemoryBatch:
    """Return `batch_of` with NaN in one normalised image of the last rank."""

    def normalise(pixels: Tensor, dtype: torch.dtype) -> Tensor:
        inputs = TRANSFORM.normalise(pixels, dtype)
        if dist.get_rank() == dist.get_world_size() - 1:
            inputs[-1] = math.nan
        return inputs

    return batch_of(case, step, normalise)


def open_clip_decays(name: str, parameter: Tensor) -> bool:
    """Return whether open_clip decays the parameter: a matrix that is not part of a norm, a bias or the logit scale."""
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def scalars_of(model: ClipModel) -> list[torch.nn.Parameter]:
    """Return the scalar parameters that the loss uses."""
    return [model.logit_scale] if model.logit_bias is None else [model.logit_scale, model.logit_bias]


UNLOCKED_GROUPS = {"most": 1, "below": 2}


def trains(name: str, case: Case) -> bool:
    """Return whether the parameter is trained under --lock-image and --lock-text, as `Case.locked` sets them."""
    locked = case.locked
    if name in ("logit_scale", "logit_bias") or not locked:
        return True
    if locked in UNLOCKED_GROUPS:
        blocks = {"visual": model_of(case).vision_cfg.layers, "text": model_of(case).text_cfg.layers}
        last = [f"{tower}.transformer.resblocks.{layers - 1}." for tower, layers in blocks.items()]
        last += ["visual.ln_post.", "text.ln_final."]
        heads = ("visual.attn_pool.", "visual.proj", "text.text_projection")
        return name.startswith(heads) or (locked == "below" and name.startswith(tuple(last)))
    return locked != "both" and name.startswith("text." if locked == "image" else "visual.")


PARAMS: dict[str, dict] = {
    "AdamW": {"betas": BETAS, "eps": EPS},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adafactor": {"d": 2.0},
    "Lion": {"betas": BETAS},
    "Lamb": {"betas": BETAS, "eps": EPS},
}


class _Published(torch.optim.Optimizer):
    """An optimizer as published. `update` returns the step of a tensor before it is scaled by the learning rate."""

    def __init__(self, groups: list[dict], update: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]):
        super().__init__(groups, {"lr": 1.0, "weight_decay": 0.0})
        self._update = update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state.setdefault(x, {"m": torch.zeros_like(x), "v": torch.zeros_like(x), "t": 0})
                state["t"] += 1
                decay = group["weight_decay"]
                x -= group["lr"] * self._update(x, x.grad, state["m"], state["v"], state["t"], decay)


def published_lion(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, decay: float) -> Tensor:
    """arXiv:2302.06675, program 1. The sign of zero is zero."""
    c = BETAS[0] * m + (1 - BETAS[0]) * g
    m.copy_(BETAS[1] * m + (1 - BETAS[1]) * g)
    return c.sign() + decay * x


def published_lamb(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, decay: float) -> Tensor:
    """arXiv:1904.00962, algorithm 2, with the identity as phi. Without weight decay there is no trust ratio."""
    m.copy_(BETAS[0] * m + (1 - BETAS[0]) * g)
    v.copy_(BETAS[1] * v + (1 - BETAS[1]) * g * g)
    r = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
    if not decay:
        return r
    update = r + decay * x
    return update * (x.norm() / update.norm())


ORACLES: dict[str, Callable[[list[dict]], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=BETAS, eps=EPS),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, d=2.0),
    "Lion": lambda groups: _Published(groups, published_lion),
    "Lamb": lambda groups: _Published(groups, published_lamb),
}


Rates = Callable[[str], tuple[float, float]]
"""Function: name of a parameter -> factor of its learning rate, and its weight decay if it is decayed."""


def same_rates(name: str) -> tuple[float, float]:
    """Return the settings of a run without learning rates for towers and layers."""
    return 1.0, WEIGHT_DECAY


def hand_made_groups(
    trained: dict[str, torch.nn.Parameter], rates: Rates, decays: Callable[[str, Tensor], bool] = open_clip_decays
) -> list[dict]:
    """Return one group per pair of a learning rate factor ("factor") and a weight decay."""
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in trained.items():
        factor, decay = rates(name)
        groups.setdefault((factor, decay if decays(name, parameter) else 0.0), []).append(parameter)
    return [{"params": p, "weight_decay": decay, "factor": factor} for (factor, decay), p in groups.items()]


def oracle(case: Case, decays: Callable[[str, Tensor], bool] = open_clip_decays, rates: Rates = same_rates) -> Outcome:
    """Train in one process in float64 on the whole batch, without the engine and its gradient cache."""
    training = OracleTraining(case, decays, rates)
    return training.train(training.features)


class OracleTraining:
    """The model and optimizer of a case in one process in float64. The caller computes the gradients of the loss.

    model: the model, whose parameters are locked already. None: that of the case.
    """

    def __init__(
        self,
        case: Case,
        decays: Callable[[str, Tensor], bool] = open_clip_decays,
        rates: Rates = same_rates,
        model: DualEncoder | None = None,
    ) -> None:
        self.case = case
        if model is None:
            torch.manual_seed(SEED)
            self.model = build_model(model_of(case)).double()
            self._trained = {name: p for name, p in self.model.named_parameters() if trains(name, case)}
        else:
            self.model = model
            self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = hand_made_groups(self._trained, rates, decays)
        self.optimizer = ORACLES[case.optimizer](groups)
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(
        self, features: Callable[[int], tuple[Tensor, Tensor]], objective: Callable[..., Tensor] | None = None
    ) -> Outcome:
        """Take all steps. features: step -> features (BATCH, D) of both towers.

        objective: returns the loss of (contrastive loss, features of both towers, step). Default: the contrastive loss.
        """
        model, outcome = self.model, Outcome()
        for step in range(STEPS):
            x, y = features(step)
            logits, labels = model.logit_scale.exp() * x @ y.T, torch.arange(BATCH)
            if model.logit_bias is None:
                loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            else:
                loss = -F.logsigmoid((2 * torch.eye(BATCH) - 1) * (logits + model.logit_bias)).sum() / BATCH
            loss = loss if objective is None else objective(loss, x, y, step)
            self.optimizer.zero_grad()
            loss.backward()
            outcome.losses.append(loss.item())
            outcome.scale_gradients += [scalar.grad.item() for scalar in scalars_of(model)]
            outcome.norms.append(self.update(step))
        outcome.parameters, outcome.largest_move = self.parameters()
        return outcome

    def features(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the features (BATCH, D) of both towers, ordered by rank."""
        case, model = self.case, self.model
        features: dict[Tower, list[Tensor]] = {tower: [] for tower in Tower}
        for replica in range(case.ranks // case.tensor_parallel):
            first = replica * case.tensor_parallel
            members = range(first, first + case.tensor_parallel)
            size = model.config.vision_cfg.image_size
            shares = [share_of(step, member, case.ranks, bool(case.captions), size) for member in members]
            for tower, count in zip(Tower, (case.accumulation, case.text_chunks or case.accumulation), strict=True):
                parts = []
                # The ranks of a replica encode their chunks together.
                for index, chunks in enumerate(zip(*(share[tower].chunk(count) for share in shares), strict=True)):
                    RandomState(SEED, step, replica).reseed(tower, index)
                    rows = torch.cat(chunks)
                    inputs = ((rows.double() / 255 - MEAN) / STD, None) if tower is Tower.IMAGE else (None, rows)
                    parts.append(model(*inputs)[tower].unflatten(0, (case.tensor_parallel, -1)))
                features[tower].append(torch.cat(parts, dim=1).flatten(0, 1))
        return torch.cat(features[Tower.IMAGE]), torch.cat(features[Tower.TEXT])

    def update(self, step: int) -> float:
        """Clip the gradients and update the parameters; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self.case.clipping or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step] * group["factor"]
        self.optimizer.step()
        return norm.item()

    def parameters(self) -> tuple[dict[str, np.ndarray], float]:
        """Return all parameters, and the largest distance of a parameter from its initial value."""
        parameters = {name: p.detach().numpy() for name, p in self.model.named_parameters()}
        return parameters, largest_move(self._start, parameters)


def largest_move(start: dict[str, Tensor], end: dict[str, np.ndarray]) -> float:
    """Return the largest distance of a parameter from its initial value."""
    return max(float(abs(end[name] - value.numpy()).max()) for name, value in start.items())


def training_config(case: Case) -> TrainingConfig:
    """Return the configuration of a case, read from a file with all checks that the command line makes."""
    zero: dict = {"stage": case.stage}
    if case.stage == 3:
        zero["stage3_param_persistence_threshold"] = case.persistence_threshold
    if case.overlap:
        zero["overlap_comm"] = True
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if case.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config: dict = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "optimizer": {
            "type": case.optimizer,
            "params": {"lr": 1.0, "weight_decay": WEIGHT_DECAY, **PARAMS[case.optimizer]},
        },
        "zero_optimization": zero,
        "bf16": {"enabled": case.bf16},
        "megaclip": {
            "coalesce_gradient_reduction": case.coalesce,
            "keep_graphs": case.keep,
            "tensor_parallel_size": case.tensor_parallel,
            **dict(case.section),
        },
    }
    if case.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": case.grad_accum_dtype}
    if case.checkpointing:
        config["activation_checkpointing"] = {"cpu_checkpointing": case.checkpointing == "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(config))
        return load_training_config(path)


def unchecked_config(case: Case) -> TrainingConfig:
    """Return the configuration of a case that the checks refuse."""
    allowed = training_config(replace(case, bf16=False, grad_accum_dtype=None))
    refused = {"bf16": {"enabled": case.bf16}}
    if case.grad_accum_dtype:
        refused["data_types"] = {"grad_accum_dtype": case.grad_accum_dtype}
    return replace(allowed, deepspeed={**allowed.deepspeed, **refused})


def start_engine(
    case: Case,
    config: TrainingConfig | None = None,
    *more: str,
    model: ModelDescription | None = None,
    objective: Objective | None = None,
) -> DeepSpeedEngine:
    """Build the engine as a run does. more: further flags. model: another model than that of the case."""
    quiet_deepspeed()
    flags = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x", "--seed", str(SEED)]
    flags += more
    unlocked = str(UNLOCKED_GROUPS.get(case.locked, 0))
    if case.locked in (*UNLOCKED_GROUPS, "image", "both"):
        flags += ["--lock-image", "--lock-image-unlocked-groups", unlocked]
    if case.locked in (*UNLOCKED_GROUPS, "text", "both"):
        flags += ["--lock-text", "--lock-text-unlocked-layers", unlocked]
    compilation.BACKEND = COMPILER
    engine = build_engine(
        config or training_config(case),
        parse_arguments(flags),
        model or model_of(case),
        compiles=case.compiled,
        objective=objective,
    )
    defining = {type(part).__module__ for part in engine.module.modules()}
    assert model or case.compiled == (compilation.__name__ in defining)
    return engine


class _Scaled(torch.autograd.Function):
    """Identity that multiplies its gradient by a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def loss_of(case: Case) -> Callable[..., Tensor]:
    """Return the project's loss with the faults of the case."""
    loss = LOSSES[case.loss](exchange=case.exchange, reduction=case.reduction)

    def faulty(x: Tensor, y: Tensor, scale: Tensor, *bias: Tensor) -> Tensor:
        x, y = _Scaled.apply(x, case.feature_fault), _Scaled.apply(y, case.feature_fault)
        return loss(x, y, *(_Scaled.apply(scalar, case.scale_fault) for scalar in (scale, *bias)))

    return faulty


def kept_of(model: ClipModel, case: Case) -> KeptGraphs:
    """Return the numbers of graphs that a step of the case keeps."""
    chunks = (case.accumulation, case.text_chunks or case.accumulation)
    pairs = model.objective is not None and model.objective.encodes_pairs()
    return kept_graphs(case.keep, chunks, [pairs or tower in trained_towers(model) for tower in Tower], pairs)


def backpropagate(
    engine: DeepSpeedEngine, case: Case, step: int, loss=None, batch: MemoryBatch | None = None, **options: Any
) -> float:
    """Accumulate the gradient of one step in the engine; return the loss. options: of `accumulate_gradients`."""
    scalars = [LogitScale(engine, 100.0)]
    if engine.module.logit_bias is not None:
        scalars.append(MasterScalar(engine.module.logit_bias))
    value = accumulate_gradients(
        engine,
        loss or loss_of(case),
        batch or batch_of(case, step),
        lambda: [scalar.read() for scalar in scalars],
        RandomState(SEED, step, dist.get_rank() // case.tensor_parallel),
        coalesce=case.coalesce,
        kept=kept_of(engine.module, case),
        embeddings_on_cpu=case.embeddings_on_cpu,
        **options,
    )
    return value.item()


def train(case: Case, config: TrainingConfig | None = None) -> Outcome:
    """Train two steps on this rank, together with the other ranks."""
    engine = start_engine(case, config)
    outcome = Outcome()
    for step in range(STEPS):
        take_step(engine, case, step, outcome)
    outcome.parameters = whole_parameters(engine)
    return outcome


def take_step(
    engine: DeepSpeedEngine, case: Case, step: int, outcome: Outcome, loss=None, batch: MemoryBatch | None = None
) -> None:
    """Take one optimizer step on this rank, together with the other ranks. loss, batch: instead of the case's."""
    outcome.losses.append(backpropagate(engine, case, step, loss, batch))
    outcome.scale_gradients += [safe_get_full_grad(scalar).item() for scalar in scalars_of(engine.module)]
    set_learning_rate(engine, LEARNING_RATES[step])
    outcome.norms.append(update(engine))


def whole_parameters(engine: DeepSpeedEngine) -> dict[str, np.ndarray]:
    """Return every parameter's working value as float32, gathered from all ranks of the replica."""
    values, tensor = {}, engine.module.tensor
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = whole_value(name, parameter.detach().float().clone(), tensor).numpy()
    return values


def masters(engine: DeepSpeedEngine) -> dict[str, np.ndarray]:
    """Return the float32 master of every trained parameter, gathered from all ranks; at ZeRO-0 all parameters."""
    if engine.zero_optimization_stage() == 0:
        return whole_parameters(engine)
    tensor = engine.module.tensor
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: whole_value(name, safe_get_full_fp32_param(p).detach().clone(), tensor).numpy() for name, p in named}


def whole_value(name: str, part: Tensor, tensor: RankGroup) -> Tensor:
    """Return a parameter or its optimizer state, joined from the parts of all ranks of a replica."""
    dim = split_dim(name)
    if tensor.size == 1 or dim is None:
        return part
    return torch.cat(gather_rows(part, group=tensor).chunk(tensor.size), dim)
