"""The settings that ds_config.json may contain: the pydantic class `DsConfig`, with one class for each section.

DeepSpeed's own pydantic classes are used for the sections for which it has one. `megaclip.config.checks` refuses every
key that is not a field here.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from megaclip.config.command_line import Positive
from megaclip.config.optimizers import Optimizer
from megaclip.config.section import MegaclipSection
from megaclip.zero.settings import (
    CometConfig,
    CommsLoggerConfig,
    CSVConfig,
    DeepSpeedBF16Config,
    DeepSpeedZeroConfig,
    TensorBoardConfig,
    WandbConfig,
)


class _Strict(BaseModel):
    """Base class of the sections. Values must have the declared type. `megaclip.config.checks` refuses unknown keys."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def _lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _whole_number(value: Any) -> Any:
    """Return 1e9, which JSON reads as a float, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class DataTypes(_Strict):
    """Section "data_types" without param_dtype, which bf16.enabled sets, and without a dtype of buffers."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = None


class ActivationCheckpointing(_Strict):
    """Section "activation_checkpointing"; its presence turns activation checkpointing on."""

    cpu_checkpointing: bool = False


class _FlopsProfiler(_Strict):
    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


class _ThroughputTimer(_Strict):
    enabled: bool = True
    synchronized: bool = True


class _Timers(_Strict):
    throughput: _ThroughputTimer = _ThroughputTimer()


class DsConfig(_Strict):
    """Every setting of ds_config.json that is accepted. Settings left out have DeepSpeed's defaults."""

    megaclip: MegaclipSection = MegaclipSection.model_validate({})

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    gradient_clipping: float = Field(ge=0)
    optimizer: Optimizer
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True

    bf16: DeepSpeedBF16Config = Field(default_factory=DeepSpeedBF16Config)
    data_types: DataTypes = DataTypes()
    communication_data_type: Annotated[Literal["fp32", "fp16", "bf16"] | None, BeforeValidator(_lower_case)] = None
    zero_optimization: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()

    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    flops_profiler: _FlopsProfiler = _FlopsProfiler()
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    steps_per_print: Annotated[PositiveInt | None, BeforeValidator(_whole_number)] = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None, BeforeValidator(_lower_case)
    ] = None
    timers: _Timers = _Timers()


def count_kept(sizes: Sequence[int], reuse_distance: int, live: int, prefetched: int, *, offloads: bool) -> int:
    """Return how many of a tower's last parameters ZeRO-3 keeps gathered from one pass over the tower to the next.

    Between a forward pass and its backward pass all later parameters are used twice. So half of DeepSpeed's reuse
    distance covers a tower of that size. With offload_param none is kept, to use the least memory.

    sizes: elements of each parameter. reuse_distance, live, prefetched: stage3_max_reuse_distance,
        stage3_max_live_parameters and stage3_prefetch_bucket_size.
    """
    limit = 0 if offloads else min(reuse_distance // 2, live - prefetched)
    return sum(total <= limit for total in itertools.accumulate(reversed(sizes)))
