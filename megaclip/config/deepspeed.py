"""Values in DeepSpeed's own part of ds_config.json that it would take for something else than they say.

DeepSpeed leaves out what says "auto", which Hugging Face's trainer would have filled in; it reads a string where a
switch should be; and it looks for a monitor's package only when every rank has started.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveInt

from megaclip.config.optimizers import OPTIMIZER_PARAMS

_SWITCHES = (
    "bf16.enabled",
    "activation_checkpointing.cpu_checkpointing",
    "zero_allow_untested_optimizer",
    "zero_optimization.compute_grad_norm",
    "comms_logger.enabled",
    "flops_profiler.enabled",
    "tensorboard.enabled",
    "wandb.enabled",
    "csv_monitor.enabled",
    "comet.enabled",
)
_LogLevel = Literal["debug", "info", "warning", "error", "critical"]
_MONITOR_PACKAGES = {"wandb": "wandb", "comet": "comet_ml"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """1e9 is a float in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class PlainValues(_Strict):
    """The top-level keys that are no sections, but for the batch numbers."""

    steps_per_print: Annotated[PositiveInt | None, BeforeValidator(_whole)] = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    communication_data_type: Annotated[Literal["fp32", "fp16", "bf16"] | None, BeforeValidator(_lower)] = None
    log_level: Annotated[_LogLevel | None, BeforeValidator(_lower)] = None


class _DataTypes(_Strict):
    """Not DeepSpeed's param_dtype, which follows bf16.enabled, nor what it says of buffers: the models have none."""

    grad_accum_dtype: str | None = None


class _Aio(_Strict):
    block_size: PositiveInt = 2**20
    queue_depth: PositiveInt = 8
    intra_op_parallelism: PositiveInt = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


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


def section_models() -> dict[str, type[BaseModel]]:
    """The description of each section: DeepSpeed's own, where it has one with named fields."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "data_types": _DataTypes,
        "aio": _Aio,
        "flops_profiler": _FlopsProfiler,
        "timers": _Timers,
    }


def misread_value(config: dict[str, Any]) -> str | None:
    """What is wrong with the first value that DeepSpeed would misread, or a monitor that could not start; None if
    nothing is."""
    values = {key: value for part in config if part != "megaclip" for key, value in _leaves(part, config[part])}
    autos = [key for key, value in values.items() if value == "auto"]
    if autos:
        kind = values.get("optimizer.type")
        named = ", ".join(key + _default(key, kind) for key in autos)
        return f'"auto" is for Hugging Face\'s trainer, which fills it in: write a value for {named}'
    for key in _SWITCHES:
        if not isinstance(values.get(key, False), bool):
            return f"{key} must be true or false, not {values[key]!r}"
    stage = values.get("zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3) or not isinstance(stage, int):
        return f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}"
    return _monitor_that_cannot_start(values)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below `key` that is not an object; an entry of a list has the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, "auto" if isinstance(value, list) and "auto" in value else value


def _default(key: str, optimizer: Any) -> str:
    """ " (DeepSpeed's default is ...)" for a setting whose default is known."""
    section, _, name = key.rpartition(".")
    models: dict[str, type[BaseModel]] = section_models()
    if optimizer in OPTIMIZER_PARAMS:
        models["optimizer.params"] = OPTIMIZER_PARAMS[optimizer]
    fields = models[section].model_fields if section in models else {}
    for field_name, field in fields.items():
        if name == (field.alias or field_name) and not field.is_required():
            return f" (the default is {json.dumps(field.default, default=str)})"
    return ""


def _monitor_that_cannot_start(values: dict[str, Any]) -> str | None:
    for monitor, package in _MONITOR_PACKAGES.items():
        if values.get(f"{monitor}.enabled") and not _is_installed(package):
            return f"{monitor}.enabled needs the package {package}, which is not installed: pip install {package}"
    if values.get("tensorboard.enabled") and not values.get("tensorboard.output_path"):
        return (
            "'tensorboard' is not needed: a run writes its TensorBoard files to its own folder, tensorboard/; leave it "
            "out, or say with tensorboard.output_path where a second copy belongs"
        )
    return None


def _is_installed(package: str) -> bool:
    """A folder of that name, such as the one wandb logs to, is no package: it has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
