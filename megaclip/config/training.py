"""ds_config.json, read and checked before anything else happens.

The file belongs to DeepSpeed, except for its section "megaclip", which is ours (`MegaclipSection`). `checks.py`
says what it may hold. It is handed to DeepSpeed as it was read; nothing is rewritten.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from megaclip.config.checks import checked_section
from megaclip.config.section import MegaclipSection
from megaclip.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """DeepSpeed's batch triple, complete. `global_batch` is the contrastive batch B, `accumulation` the number of image
    chunks of `micro_batch` that make a rank's share of it.

    With tensor parallelism `micro_batch` and `text_micro_batch` are the rows that one rank loads; the towers run on
    those of all ranks of a replica at once.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int
    text_micro_batch: int

    @property
    def local_batch(self) -> int:
        """Samples of one rank."""
        return self.micro_batch * self.accumulation

    @property
    def text_chunks(self) -> int:
        return self.local_batch // self.text_micro_batch


@dataclass(frozen=True)
class TrainingConfig:
    """A ds_config.json that passed every check: the dictionary for DeepSpeed as read, and our section, typed."""

    path: Path
    deepspeed: dict[str, Any]
    megaclip: MegaclipSection

    @cached_property
    def zero(self) -> DeepSpeedZeroConfig:
        """zero_optimization as DeepSpeed reads it, with DeepSpeed's defaults."""
        return DeepSpeedZeroConfig(**self.deepspeed.get("zero_optimization", {}))

    @property
    def zero_stage(self) -> int:
        return int(self.zero.stage)

    @property
    def bf16(self) -> bool:
        return bool(self.deepspeed.get("bf16", {}).get("enabled", False))

    @property
    def accumulates_in_bf16(self) -> bool:
        """Whether the gradients of a step's chunks add up in bfloat16: by default unless they are coalesced."""
        dtype = self.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        return self.bf16 and (dtype == "bf16" if self.megaclip.coalesce_gradient_reduction else dtype != "fp32")

    @property
    def activation_checkpointing(self) -> bool:
        return "activation_checkpointing" in self.deepspeed

    @property
    def cpu_checkpointing(self) -> bool:
        return bool(self.deepspeed.get("activation_checkpointing", {}).get("cpu_checkpointing", False))

    @property
    def learning_rate(self) -> float:
        return float(self.deepspeed["optimizer"]["params"]["lr"])

    def batch_plan(self, world_size: int) -> BatchPlan:
        """Complete the batch triple for `world_size` ranks, and the text chunks.

        With tensor parallelism the micro-batches of the file are those of a replica of `tensor_parallel_size` ranks,
        as DeepSpeed counts them, and each rank loads its share.

        Raises ConfigError when the numbers and the world size do not fit together.
        """
        tensor = self.megaclip.tensor_parallel_size
        if world_size % tensor:
            raise ConfigError(
                f"{self.path}: megaclip.tensor_parallel_size {tensor} does not divide the number of ranks, "
                f"{world_size}; change one of them"
            )
        ranks, world_size = world_size, world_size // tensor
        total: int | None = self.deepspeed.get("train_batch_size")
        micro: int | None = self.deepspeed.get("train_micro_batch_size_per_gpu")
        accumulation: int | None = self.deepspeed.get("gradient_accumulation_steps")
        if micro is None:
            if total is None:
                raise ConfigError(f"{self.path}: set train_batch_size, train_micro_batch_size_per_gpu, or both")
            accumulation = accumulation or 1
            micro = total // (accumulation * world_size)
        elif accumulation is None:
            accumulation = total // (micro * world_size) if total else 1
        total = total or micro * accumulation * world_size
        if micro * accumulation * world_size != total:
            raise ConfigError(
                f"{self.path}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro or '?'} x "
                f"gradient_accumulation_steps {accumulation or '?'} x {world_size} "
                f"{'ranks' if tensor == 1 else f'replicas of {tensor} ranks'}; change one of them or the number of "
                "ranks"
            )
        text_micro = self.megaclip.text_micro_batch_size or micro
        if (micro * accumulation) % text_micro:
            raise ConfigError(
                f"{self.path}: megaclip.text_micro_batch_size {text_micro} does not divide a rank's share of the "
                f"batch, {micro} x {accumulation} = {micro * accumulation}"
            )
        for name, rows in (
            ("train_micro_batch_size_per_gpu", micro),
            ("megaclip.text_micro_batch_size", text_micro),
        ):
            if rows % tensor:
                raise ConfigError(
                    f"{self.path}: {name} {rows} is not a multiple of megaclip.tensor_parallel_size {tensor}: the "
                    "ranks of a replica load equal shares of it"
                )
        return BatchPlan(
            global_batch=total,
            micro_batch=micro // tensor,
            accumulation=accumulation,
            world_size=ranks,
            text_micro_batch=text_micro // tensor,
        )


def load_training_config(path: str | Path) -> TrainingConfig:
    """Read and check ds_config.json. Raises ConfigError with one line that names the file and the key at fault."""
    path = Path(path)
    config = _read_json(path)
    try:
        section = checked_section(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return TrainingConfig(path=path, deepspeed=config, megaclip=section)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the DeepSpeed config {str(path)!r}: {error}") from None
    try:
        config = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold one JSON object, not a {type(config).__name__}")
    return config


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"the key {key!r} is written twice")
    return dict(pairs)
