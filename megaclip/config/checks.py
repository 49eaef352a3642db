"""What ds_config.json may hold: every key that is unknown, misplaced or without effect is a `ConfigError`.

DeepSpeed accepts unknown top-level keys and ignores several known ones, so a typing mistake would pass silently. Every
error here names the key and what to write instead; `megaclip.config` adds the file.
"""

import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megaclip.config.deepspeed import PlainValues, misread_value, section_models
from megaclip.config.optimizers import OPTIMIZER_PARAMS, SUPPORTED_OPTIMIZERS, refusal
from megaclip.config.section import MegaclipSection
from megaclip.errors import ConfigError, nearest
from megaclip.losses.fastclip_variants import VARIANTS
from megaclip.losses.settings import FastClipSettings

_HONOURED_KEYS = {
    "megaclip",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "bf16",
    "data_types",
    "communication_data_type",
    "zero_optimization",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "log_level",
    "timers",
}

_REFUSED_KEYS = {
    "scheduler": "the schedule is set on the command line: --lr-scheduler, --warmup, --epochs",
    "fp16": "float16 needs a loss scale that the gradient cache does not carry; use bf16",
    "amp": "use bf16",
    "torch_autocast": "use bf16",
    "pipeline": "pipeline parallelism is not supported; use ZeRO-3",
    "prescale_gradients": "it changes the gradient scale under ZeRO; leave it out",
    "gradient_predivide_factor": "it changes the gradient scale under ZeRO; leave it out",
    "gradient_allreduce_op": "gradients are averaged over ranks; leave it out",
    "managed_gradient_accumulation": "the gradient cache relies on DeepSpeed's own accumulation; leave it out",
    "sparse_gradients": "it has no effect here; leave it out",
    "dataloader_drop_last": "the data order is MegaCLIP's own and never drops a sample; leave it out",
    "tensor_parallel": "tensor parallelism is not supported in this version; use ZeRO-3",
    "expert_parallel": "there are no experts in a CLIP model; leave it out",
    "elasticity": "elastic batch sizes would change the contrastive batch; leave it out",
    "autotuning": "set the batch sizes directly",
    "hybrid_engine": "it is for text generation; leave it out",
    "data_efficiency": "the data order is MegaCLIP's own; leave it out",
    "curriculum_learning": "use --shard-order sequential with shards in curriculum order",
    "compression_training": "it is not supported; leave it out",
    "weight_quantization": "it is not supported; leave it out",
    "checkpoint": "MegaCLIP writes and finds its checkpoints itself: --logs, --name, --resume",
    "compile": "it is not supported in this version; leave it out",
}

_ACTIVATION_CHECKPOINTING_KEYS = {"cpu_checkpointing"}
_REFUSED_ACTIVATION_CHECKPOINTING_KEYS = {
    "partition_activations": "it needs tensor parallelism",
    "contiguous_memory_optimization": "it needs partitioned activations, hence tensor parallelism",
    "number_checkpoints": "every transformer block is one checkpoint",
    "synchronize_checkpoint_boundary": "it has no effect here",
    "profile": "it has no effect here",
}
_REFUSED_ZERO_KEYS = {
    "elastic_checkpoint": "its files cannot be divided among another number of ranks; others can, so leave it out",
    "round_robin_gradients": "DeepSpeed loses track of which weights lie where in its checkpoints; leave it out",
    "legacy_stage1": "DeepSpeed no longer has it; leave it out",
    "zenflow": "it puts off parts of the update, so training would not be that of one process; leave it out",
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "write pin_memory in offload_optimizer and offload_param",
    "stage3_module_granularity_threshold": "whole transformer blocks are gathered already; leave it out",
}

Section = TypeVar("Section", bound=BaseModel)


def checked_section(config: dict[str, Any]) -> MegaclipSection:
    """Check the whole of ds_config.json; returns its section "megaclip". Raises ConfigError for the first mistake."""
    _check_top_level(config)
    for name in ("zero_optimization", "activation_checkpointing"):
        _check_is_object(name, config.get(name, {}))
    if problem := misread_value(config):
        raise ConfigError(problem)
    _check_batch_numbers(config)
    _check_optimizer(config)
    _check_zero(config)
    _check_sections(config)
    _check_precision(config)
    _check_activation_checkpointing(config)
    section = _parse_section(config.get("megaclip", {}))
    _check_stage(section, config.get("zero_optimization", {}))
    return section


def _is_switched_off(value: Any) -> bool:
    return value is False or (isinstance(value, dict) and value.get("enabled") is False)


def _check_top_level(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in _HONOURED_KEYS or (key in _REFUSED_KEYS and _is_switched_off(value)):
            continue
        if key in _REFUSED_KEYS:
            raise ConfigError(f"{key!r} cannot be used: {_REFUSED_KEYS[key]}")
        if key in MegaclipSection.model_fields:
            raise ConfigError(f"{key!r} is misplaced: it belongs in the section 'megaclip'")
        raise ConfigError(f"unknown key {key!r}{nearest(key, _HONOURED_KEYS)}")


def _check_batch_numbers(config: dict[str, Any]) -> None:
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key} must be a positive whole number, not {value!r}")
    clipping = config.get("gradient_clipping")
    if isinstance(clipping, bool) or not isinstance(clipping, int | float) or not 0 <= clipping < math.inf:
        raise ConfigError(
            "write gradient_clipping as a number (0.0 turns it off): left out, DeepSpeed would clip at 1.0"
        )


def _check_optimizer(config: dict[str, Any]) -> None:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        raise ConfigError('an optimizer is needed, for example {"type": "AdamW", "params": {"lr": 0.001}}')
    _check_keys("optimizer", optimizer, {"type", "params"})
    zero = config.get("zero_optimization", {})
    params = optimizer.get("params")
    if not isinstance(optimizer["type"], str):
        raise ConfigError(f"optimizer.type must be one of {', '.join(SUPPORTED_OPTIMIZERS)}, not {optimizer['type']!r}")
    untested = config.get("zero_allow_untested_optimizer", False) is not False
    known_params = params if isinstance(params, dict) else {}
    if reason := refusal(optimizer["type"], known_params, zero.get("stage", 0), untested, "offload_optimizer" in zero):
        raise ConfigError(reason)
    if optimizer["type"] not in SUPPORTED_OPTIMIZERS:
        hint = nearest(optimizer["type"], set(SUPPORTED_OPTIMIZERS))
        raise ConfigError(f"optimizer.type {optimizer['type']!r} is not one of {', '.join(SUPPORTED_OPTIMIZERS)}{hint}")
    rate = params.get("lr") if isinstance(params, dict) else None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError(f"optimizer.params.lr must be a positive number (the peak learning rate), not {rate!r}")
    _parse("optimizer.params", params, OPTIMIZER_PARAMS[optimizer["type"]])


def _check_zero(config: dict[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    for key in zero:
        if stage != 3 and (key.startswith("stage3_") or key == "offload_param"):
            raise ConfigError(f"zero_optimization.{key} has no effect at stage {stage}; it needs stage 3")
        if key in _REFUSED_ZERO_KEYS and zero[key]:
            raise ConfigError(f"zero_optimization.{key} cannot be used: {_REFUSED_ZERO_KEYS[key]}")
        if stage == 0 and key == "offload_optimizer":
            raise ConfigError("zero_optimization.offload_optimizer needs stage 1, 2 or 3")
        if key in ("offload_optimizer", "offload_param"):
            _check_offload_to_disk(stage, key, zero[key])
    offload = zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("super_offload"):
        raise ConfigError(
            "zero_optimization.offload_optimizer.super_offload is not supported in this version; leave it out"
        )
    divided = isinstance(offload, dict) and offload.get("ratio", 1) != 1
    if divided and config["optimizer"]["params"].get("torch_adam"):
        raise ConfigError(
            "zero_optimization.offload_optimizer.ratio is for DeepSpeed's own Adam; leave it or "
            "optimizer.params.torch_adam out"
        )
    if zero.get("compute_grad_norm") is False:
        raise ConfigError(
            "zero_optimization.compute_grad_norm cannot be off: an update with a gradient of NaN is "
            "refused by its norm; leave it out"
        )


def _check_sections(config: dict[str, Any]) -> None:
    _parse("", {key: config[key] for key in PlainValues.model_fields if key in config}, PlainValues)
    for name, model in section_models().items():
        _parse(name, config.get(name, {}), model)


def _check_offload_to_disk(stage: Any, key: str, section: Any) -> None:
    if not isinstance(section, dict) or section.get("device") != "nvme":
        return
    if stage != 3:
        raise ConfigError(
            f'zero_optimization.{key}.device "nvme" needs stage 3: at stage {stage} DeepSpeed takes it for '
            '"cpu"; write that, or use stage 3'
        )
    if not section.get("nvme_path"):
        raise ConfigError(f'zero_optimization.{key}.device "nvme" needs an nvme_path, a folder on that disk')


def _check_precision(config: dict[str, Any]) -> None:
    """Refuse sums of gradients in a dtype that gradients do not have, and two combinations in which DeepSpeed 0.19
    computes something else than asked (measured, see the tests)."""
    bf16 = config.get("bf16", {}).get("enabled", False)
    dtypes = (None, "fp32", "bf16") if bf16 else (None, "fp32")
    if (accumulate := config.get("data_types", {}).get("grad_accum_dtype")) not in dtypes:
        raise ConfigError(
            f"data_types.grad_accum_dtype {accumulate!r} cannot be used: gradients are "
            f"{'bfloat16: fp32 or bf16' if bf16 else 'float32 without bf16.enabled; leave it out'}"
        )
    if not bf16:
        return
    stage = config.get("zero_optimization", {}).get("stage", 0)
    offload = config.get("zero_optimization", {}).get("offload_optimizer")
    if stage == 0:
        raise ConfigError(
            "bf16 needs zero_optimization.stage 1, 2 or 3 (on one GPU too): DeepSpeed's stage 0 rescales bf16 "
            "gradients before the optimizer sees them"
        )
    if stage == 1 and accumulate == "fp32" and not offload:
        raise ConfigError(
            "data_types.grad_accum_dtype fp32 with bf16 needs zero_optimization.stage 2 or 3: at stage 1 "
            "DeepSpeed reports, and clips by, a wrong gradient norm in the first step; "
            "megaclip.coalesce_gradient_reduction without it accumulates in float32, too"
        )


def _check_activation_checkpointing(config: dict[str, Any]) -> None:
    section = config.get("activation_checkpointing", {})
    for key, value in section.items():
        if key in _REFUSED_ACTIVATION_CHECKPOINTING_KEYS and value:
            reason = _REFUSED_ACTIVATION_CHECKPOINTING_KEYS[key]
            raise ConfigError(f"activation_checkpointing.{key} cannot be used: {reason}")
    known = _ACTIVATION_CHECKPOINTING_KEYS | set(_REFUSED_ACTIVATION_CHECKPOINTING_KEYS)
    _check_keys("activation_checkpointing", section, known)


def _parse_section(section: Any) -> MegaclipSection:
    if isinstance(section, dict) and "fastclip" in section:
        _check_keys("megaclip.fastclip", section["fastclip"], set(FastClipSettings.model_fields))
    parsed = _parse("megaclip", section, MegaclipSection)
    _check_fastclip(parsed)
    return parsed


def _check_stage(section: MegaclipSection, zero: dict[str, Any]) -> None:
    """Refuse our settings that this ZeRO stage cannot honour, and one of its own that goes with one of ours only."""
    stage = zero.get("stage", 0)
    if stage == 1 and zero.get("overlap_comm") and not section.coalesce_gradient_reduction:
        raise ConfigError(
            "zero_optimization.overlap_comm at stage 1 needs megaclip.coalesce_gradient_reduction: where gradients of "
            "several chunks add up, DeepSpeed 0.19 reduces wrong sums without it; leave it out, or use stage 2"
        )
    if section.coalesce_gradient_reduction and stage == 0:
        raise ConfigError("megaclip.coalesce_gradient_reduction needs zero_optimization.stage 1, 2 or 3")
    if section.compile_blocks and stage == 3:
        raise ConfigError(
            "megaclip.compile_blocks cannot be used at zero_optimization.stage 3, whose hooks gather the parameters "
            "inside every block; use stage 1 or 2"
        )


def _check_fastclip(section: MegaclipSection) -> None:
    """Refuse settings of the global losses that the chosen loss would ignore, and bounds that contradict."""
    given, settings = section.fastclip.model_fields_set, section.fastclip
    variant = VARIANTS.get(section.loss)
    if variant is None:
        if given:
            raise ConfigError(f"megaclip.fastclip has no effect with megaclip.loss {section.loss!r}")
        return
    for key in sorted(given):
        learning = key in ("temperature_learning_rate", "temperature_schedule", "temperature_betas", "temperature_eps")
        if (learning and variant.temperature == "constant") or (key == "rho" and not variant.with_rho):
            raise ConfigError(f"megaclip.fastclip.{key} has no effect with megaclip.loss {section.loss!r}")
    schedule = variant.gamma_schedule if settings.gamma_schedule == "auto" else settings.gamma_schedule
    if schedule == "constant":
        for key in sorted(given & {"gamma_epochs", "gamma_per"}):
            raise ConfigError(f"megaclip.fastclip.{key} has no effect with a constant gamma")
    if variant.individual and settings.temperature_schedule == "threshold":
        raise ConfigError(
            "megaclip.fastclip.temperature_schedule threshold needs one global temperature (fastclip_v0, v3)"
        )


def _check_is_object(name: str, section: Any) -> None:
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must be a JSON object, not {section!r}")


def _check_keys(name: str, section: Any, known: set[str]) -> None:
    _check_is_object(name, section)
    for key in section:
        if key in known:
            continue
        if key in _HONOURED_KEYS:
            raise ConfigError(f"{name}.{key} is misplaced: it belongs at the top level")
        raise ConfigError(f"unknown key {name}.{key}{nearest(key, known)}")


def _parse(name: str, section: Any, model: type[Section]) -> Section:
    """The section `name` ("" is the top level), checked by `model`; ConfigError for the first key or value at fault."""
    _check_keys(name, section, {field.alias or key for key, field in model.model_fields.items()})
    try:
        return model(**section)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(filter(None, [name, *map(str, problem["loc"])]))
        raise ConfigError(f"{key}: {problem['msg']}, got {problem['input']!r}") from None
