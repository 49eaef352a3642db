"""Read and check ds_config.json, before any other part of a run starts.

The file is DeepSpeed's configuration file with one additional section, "megaclip" (`MegaclipSection`). DeepSpeed
receives the file's contents, with `DEEPSPEED_DEFAULTS` for missing settings and two that follow others
(`TrainingConfig.for_deepspeed`). It ignores the section "megaclip".
`megaclip.config.checks` decides which settings are accepted.
"""

import contextlib
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megaclip.config.checks import check_ds_config
from megaclip.config.ds_config import DsConfig
from megaclip.config.optimizers import UNTESTED_BY_DEEPSPEED, Optimizer
from megaclip.config.section import MegaclipSection
from megaclip.errors import ConfigError, closest, os_errors_as
from megaclip.logging import format_count, get_logger
from megaclip.zero.settings import DeepSpeedMonitorConfig, DeepSpeedZeroConfig

logger = get_logger(__name__)

DEEPSPEED_DEFAULTS: dict[str, dict[str, Any]] = {
    # A check of every gradient, at ZeRO-1 and 2 only. The run itself refuses an update whose gradient norm is not
    # finite, at every stage (`megaclip.zero.optimizers.guard_gradients`).
    "bf16": {"check_grad_overflow": False},
    # DeepSpeed's timer waits for the GPU before every forward pass. Its result is logged every `steps_per_print` steps.
    "timers": {"throughput": {"enabled": False}},
    # Every parameter starts at a multiple of 16 bytes. Otherwise all parameters after a bias of 2,730 numbers
    # (EVA02-L-14) would start at other addresses, and a product with such a bias takes three times as long (H200: 2.09
    # instead of 0.70 ms).
    "zero_optimization": {"parameter_alignment": True},
}
"""Settings that DeepSpeed receives with a default other than its own: "bf16" if bf16 is enabled, "timers" without
`steps_per_print`, "zero_optimization" at ZeRO-1 and 2."""


@dataclass(frozen=True)
class BatchLayout:
    """The batch of a step, divided into ranks and chunks (DeepSpeed's three batch settings, completed).

    With tensor parallelism, DeepSpeed's micro-batch belongs to a replica of T ranks, and each rank loads 1/T of it. The
    numbers here are those of one rank.
    """

    global_batch: int
    """Contrastive batch size B: samples of a step on all ranks."""
    micro_batch: int
    """Samples per image chunk."""
    accumulation: int
    """Image chunks per rank and step."""
    world_size: int
    """Ranks, tensor-parallel ones included."""
    text_micro_batch: int
    """Captions per text chunk."""

    @property
    def local_batch(self) -> int:
        """Samples per rank and step."""
        return self.micro_batch * self.accumulation

    @property
    def text_chunks(self) -> int:
        """Text chunks per rank and step."""
        return self.local_batch // self.text_micro_batch


@dataclass(frozen=True)
class TextChunks:
    """Limits of text chunks if megaclip.text_micro_batch_size is not set (`megaclip.planner.text_chunks`)."""

    captions_per_image: int = 1
    """Captions that take about as much memory as one image."""
    least: int = 1
    """Number of text chunks per step below which text chunks are not larger than image chunks."""


def default_text_micro_batch(micro_batch: int, accumulation: int, text_chunks: TextChunks) -> int:
    """Return the number of captions per text chunk, with which it takes about as much memory as an image chunk.

    accumulation: number of image chunks.
    """
    most = max(1, min(accumulation // text_chunks.least, text_chunks.captions_per_image))
    return micro_batch * next(number for number in range(most, 0, -1) if accumulation % number == 0)


@dataclass(frozen=True)
class TrainingConfig:
    """A checked ds_config.json. `deepspeed` is its contents as read, with the changes of --set."""

    path: Path
    deepspeed: dict[str, Any]
    megaclip: MegaclipSection
    text_chunks: TextChunks = TextChunks()
    """Limits of text chunks for the model (`megaclip.planner.text_chunks.fitted`)."""

    @cached_property
    def settings(self) -> DsConfig:
        """All settings, typed, with defaults for those that the file leaves out."""
        return DsConfig.model_validate(self.deepspeed)

    @property
    def for_deepspeed(self) -> dict[str, Any]:
        """The configuration that DeepSpeed receives: the file's contents without `monitors`, with `DEEPSPEED_DEFAULTS`.

        Two settings follow others: contiguous_gradients (`zero`) and zero_allow_untested_optimizer.

        DeepSpeed's engine would log the learning rate by the number of samples. wandb then ignores the run's curves,
        whose steps are smaller.
        """
        config = {
            name: section for name, section in self.deepspeed.items() if name not in DeepSpeedMonitorConfig.model_fields
        }
        if self.bf16:
            config["bf16"] = DEEPSPEED_DEFAULTS["bf16"] | config["bf16"]
        if self.zero_stage in (1, 2):
            ours = DEEPSPEED_DEFAULTS["zero_optimization"] | {"contiguous_gradients": self.zero.contiguous_gradients}
            config["zero_optimization"] = ours | config["zero_optimization"]
        if self.optimizer.type in UNTESTED_BY_DEEPSPEED:
            config["zero_allow_untested_optimizer"] = True
        if self.settings.steps_per_print is None:
            timers = config.get("timers", {})
            throughput = DEEPSPEED_DEFAULTS["timers"]["throughput"] | timers.get("throughput", {})
            config["timers"] = timers | {"throughput": throughput}
        return config

    @property
    def monitors(self) -> DeepSpeedMonitorConfig:
        """Sections of DeepSpeed's monitors, to which the run writes its curves."""
        return DeepSpeedMonitorConfig(
            **{name: getattr(self.settings, name) for name in DeepSpeedMonitorConfig.model_fields}
        )

    @property
    def zero(self) -> DeepSpeedZeroConfig:
        """Section zero_optimization, with DeepSpeed's defaults, except contiguous_gradients at ZeRO-1 and 2.

        With it DeepSpeed copies each gradient into a bucket of 1 GB, before it joins what it reduces
        (docs/measurements.md). Without it and with overlap_comm DeepSpeed would wait for the GPU at every bucket.
        """
        section = self.settings.zero_optimization
        if section.stage in (1, 2) and "contiguous_gradients" not in section.model_fields_set:
            return section.model_copy(update={"contiguous_gradients": bool(section.overlap_comm)})
        return section

    @property
    def zero_stage(self) -> int:
        return int(self.zero.stage)

    @property
    def optimizer(self) -> Optimizer:
        """Section optimizer, with typed `params`."""
        return self.settings.optimizer

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        return self.optimizer.params.lr

    @property
    def bf16(self) -> bool:
        return bool(self.settings.bf16.enabled)

    @property
    def accumulates_in_bf16(self) -> bool:
        """True if the gradients of a step's chunks accumulate in bfloat16: the default, unless they are coalesced."""
        dtype = self.settings.data_types.grad_accum_dtype
        return self.bf16 and (dtype == "bf16" if self.megaclip.coalesce_gradient_reduction else dtype != "fp32")

    @property
    def activation_checkpointing(self) -> bool:
        """True if the file has the section activation_checkpointing."""
        return "activation_checkpointing" in self.settings.model_fields_set

    def batch_layout(self, world_size: int) -> BatchLayout:
        """Return the batch settings for `world_size` ranks, completed, with the text chunks.

        Raises ConfigError if the settings and the number of ranks do not fit together.
        """
        tensor_size = self.megaclip.tensor_parallel_size
        if world_size % tensor_size:
            raise ConfigError(
                f"{self.path}: megaclip.tensor_parallel_size {tensor_size} does not divide the number of ranks, "
                f"{world_size}; change one of them"
            )
        replicas = world_size // tensor_size
        total = self.settings.train_batch_size
        micro = self.settings.train_micro_batch_size_per_gpu
        accumulation = self.settings.gradient_accumulation_steps
        if micro is None:
            if total is None:
                raise ConfigError(f"{self.path}: set train_batch_size, train_micro_batch_size_per_gpu, or both")
            accumulation = accumulation or 1
            micro = total // (accumulation * replicas)
        elif accumulation is None:
            accumulation = total // (micro * replicas) if total else 1
        total = total or micro * accumulation * replicas
        if total == 1:
            raise ConfigError(
                f"{self.path}: train_batch_size is 1, a batch without negatives, from which a contrastive loss learns "
                "nothing; use 2 or more samples over all ranks"
            )
        if micro * accumulation * replicas != total:
            given = {
                "train_micro_batch_size_per_gpu": self.settings.train_micro_batch_size_per_gpu,
                "gradient_accumulation_steps": self.settings.gradient_accumulation_steps,
            }
            factors = [f"{name} {value}" for name, value in given.items() if value is not None]
            factors.append(format_count(replicas, "rank" if tensor_size == 1 else f"{tensor_size}-rank replica"))
            raise ConfigError(
                f"{self.path}: train_batch_size {total} is not {'' if len(factors) == 3 else 'a multiple of '}"
                f"{' x '.join(factors)}; change one of them or the number of ranks"
            )
        text_micro = self.megaclip.text_micro_batch_size or default_text_micro_batch(
            micro, accumulation, self.text_chunks
        )
        if (micro * accumulation) % text_micro:
            raise ConfigError(
                f"{self.path}: megaclip.text_micro_batch_size {text_micro} does not divide the "
                f"{micro} x {accumulation} = {micro * accumulation} samples per rank; choose a divisor of that number"
            )
        for name, rows in (
            ("train_micro_batch_size_per_gpu", micro),
            ("megaclip.text_micro_batch_size", text_micro),
        ):
            if rows % tensor_size:
                raise ConfigError(
                    f"{self.path}: {name} {rows} is not a multiple of megaclip.tensor_parallel_size {tensor_size}: the "
                    "ranks of a replica load equal shares of it"
                )
        return BatchLayout(
            global_batch=total,
            micro_batch=micro // tensor_size,
            accumulation=accumulation,
            world_size=world_size,
            text_micro_batch=text_micro // tensor_size,
        )


SHIPPED = Path(__file__).parents[1] / "ds_configs"
"""Folder of the shipped ds_config.json files, in a checkout and in an installed package."""


_BATCH_SETTINGS = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
"""Two of these determine the third. If --set changes one, the first unchanged one is left out of three."""


def load_training_config(name_or_path: str | Path, changes: Sequence[str] = ()) -> TrainingConfig:
    """Read and check ds_config.json: a file, or one of the shipped files by name, such as "zero3_offload".

    changes: values of --set, each KEY=VALUE. They replace settings of the file before the checks, and are logged.

    Raises ConfigError with one line that names the file and the setting.
    """
    path = Path(name_or_path)
    shipped = {str(file.relative_to(SHIPPED).with_suffix("")): file for file in SHIPPED.rglob("*.json")}
    if not path.exists():
        name = str(name_or_path).removesuffix(".json")
        if name not in shipped:
            raise ConfigError(
                f"--deepspeed_config {str(path)!r} is neither a file nor a shipped configuration; expected the path of "
                f"a ds_config.json, or one of {', '.join(sorted(shipped))}{_nearest_file(path, set(shipped))}"
            )
        path = shipped[name]
    with os_errors_as(ConfigError, f"cannot read the DeepSpeed config {str(path)!r}", also=UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    try:
        config = json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
        if not isinstance(config, dict):
            raise ConfigError(f"the file contains a {type(config).__name__}; write one JSON object")
        if changes:
            config, replaced = with_changes(config, changes)
            logger.info("--set replaces settings of %s: %s", path, ", ".join(replaced))
        return TrainingConfig(path=path, deepspeed=config, megaclip=check_ds_config(config).megaclip)
    except ConfigError as error:
        raise ConfigError(f"{' '.join([str(path), *(f'--set {change}' for change in changes)])}: {error}") from None
    except (ValueError, RecursionError) as error:  # also integers of 5,000 digits, and thousands of nested brackets
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"the key {key!r} is written twice; remove one of them")
    return dict(pairs)


def _nearest_file(path: Path, shipped: set[str]) -> str:
    """Return "; did you mean ...?" with a shipped name, or with a JSON file beside `path` or in ds_configs/."""
    files = {Path(name).stem: name for name in shipped}
    files |= {file.stem: str(file) for folder in (path.parent, Path("ds_configs")) for file in folder.glob("*.json")}
    close = closest(path.stem, set(files), cutoff=0.6)
    return "" if close is None else f"; did you mean {files[close]!r}?"


def with_changes(config: dict[str, Any], changes: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with `changes`, the values of --set, and a text for each setting that they replace."""
    config, replaced = copy.deepcopy(config), dict[str, str]()
    for change in changes:
        key, _, text = change.partition("=")
        if not key or not text:
            raise ConfigError(f"{change!r} is not KEY=VALUE; write for example optimizer.params.lr=1e-4")
        if any(f"{other}.".startswith(f"{key}.") for other in replaced):  # a section would replace its setting
            raise ConfigError(f"{key} is set twice; leave one of them out")
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key} cannot be set: {part} is {json.dumps(section)}, which has no settings")
        value, before = _json_or_text(text), section.pop(name, None)
        if value is None and before is None:
            raise ConfigError(f"{key} is not in the file; leave --set {change} out")
        if value is not None:
            section[name] = value
        replaced[key] = f"{key} {json.dumps(value)} ({'not' if before is None else json.dumps(before)} in the file)"
    unchanged = [key for key in _BATCH_SETTINGS if key not in replaced]
    if set(_BATCH_SETTINGS) <= config.keys() and len(unchanged) in (1, 2):
        left_out = config.pop(unchanged[0])
        replaced[unchanged[0]] = f"{unchanged[0]} follows from the other two ({left_out} in the file)"
    return config, list(replaced.values())


def _json_or_text(text: str) -> Any:
    """Return `text` as JSON, as a number that JSON writes differently, such as .5, or as it is."""
    for read in (json.loads, float):
        with contextlib.suppress(ValueError, RecursionError):
            return read(text)
    return text
