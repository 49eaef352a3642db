"""Check ds_config.json: refuse settings that are unknown, misplaced, without effect or in conflict with another one.

DeepSpeed ignores unknown top-level keys and several known ones, so a typing mistake would pass silently. Every check
raises `ConfigError` for the first mistake; `load_training_config` adds the path of the file.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megaclip.config.ds_config import DsConfig
from megaclip.config.optimizers import NEED_WHOLE_TENSORS, check_optimizer, params_model
from megaclip.config.section import LoraSettings, MegaclipSection
from megaclip.errors import ConfigError, config_error, nearest
from megaclip.losses.settings import VARIANTS, FastClipSettings
from megaclip.zero.settings import DeepSpeedZeroConfig

_REQUIRED = {
    "gradient_clipping": "write a number, or 0.0 for no clipping: without it DeepSpeed would clip at 1.0",
    "optimizer": 'write one, for example {"type": "AdamW", "params": {"lr": 0.001}}',
}

_REFUSED = {
    "scheduler": "the schedule is set on the command line: --lr-scheduler, --warmup, --epochs",
    "fp16": "float16 needs a loss scale, which the gradient cache does not have; use bf16",
    "amp": "mixed precision is set by bf16; use bf16",
    "torch_autocast": "mixed precision is set by bf16; use bf16",
    "pipeline": "pipeline parallelism is not supported; use ZeRO-3",
    "aio": 'it is for offload to disks, which is not supported; leave it out, and use the device "cpu"',
    "prescale_gradients": "it changes the gradient scale under ZeRO; leave it out",
    "gradient_predivide_factor": "it changes the gradient scale under ZeRO; leave it out",
    "gradient_allreduce_op": "gradients are always averaged over ranks; leave it out",
    "managed_gradient_accumulation": "the gradient cache relies on DeepSpeed's own accumulation; leave it out",
    "sparse_gradients": "it has no effect here; leave it out",
    "dataloader_drop_last": "MegaCLIP has its own data order, which never drops a sample; leave it out",
    "tensor_parallel": "it is DeepSpeed's AutoTP; use megaclip.tensor_parallel_size",
    "expert_parallel": "CLIP models have no experts; leave it out",
    "elasticity": "elastic batch sizes would change the contrastive batch; leave it out",
    "autotuning": "it is not supported; set the batch sizes directly",
    "hybrid_engine": "it is for text generation; leave it out",
    "data_efficiency": "MegaCLIP has its own data order; leave it out",
    "curriculum_learning": "it is not supported; use --shard-order sequential with shards in curriculum order",
    "compression_training": "it is not supported; leave it out",
    "weight_quantization": "it is not supported; leave it out",
    "checkpoint": "MegaCLIP writes and finds its checkpoints itself; use --logs, --name and --resume",
    "compile": "DeepCompile is not supported; use megaclip.compile",
    "activation_checkpointing.partition_activations": "activations are checkpointed by PyTorch; leave it out",
    "activation_checkpointing.contiguous_memory_optimization": "activations are checkpointed by PyTorch; leave it out",
    "activation_checkpointing.number_checkpoints": "every transformer block is one checkpoint; leave it out",
    "activation_checkpointing.synchronize_checkpoint_boundary": "it has no effect here; leave it out",
    "activation_checkpointing.profile": "it has no effect here; leave it out",
    "zero_optimization.elastic_checkpoint": "such checkpoints cannot be resumed on another number of ranks; leave it "
    "out",
    "zero_optimization.round_robin_gradients": "DeepSpeed's checkpoints do not record the order of weights that it "
    "produces; leave it out",
    "zero_optimization.legacy_stage1": "DeepSpeed no longer has it; leave it out",
    "zero_optimization.zenflow": "it delays parts of the update, so the result would differ from training in one "
    "process; leave it out",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory in offload_optimizer and offload_param",
    "zero_optimization.stage3_module_granularity_threshold": "whole transformer blocks are gathered already; leave it "
    "out",
    "zero_optimization.offload_optimizer.super_offload": "it is not supported in this version; leave it out",
    "bf16.bf16_master_weights_and_grads": "masters of bfloat16 lose small updates, and resumed runs would differ; "
    "leave it out",
    "bf16.bf16_optimizer_states": "states of bfloat16 lose small updates; leave it out",
    "bf16.immediate_grad_update": "it is for DeepSpeed's BF16_Optimizer, which is not supported; leave it out",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer Muon is not supported; leave it out",
}
"""Setting of DeepSpeed -> reason why it is refused, and what to do. The setting is accepted if it is switched off."""

_FIXED: dict[str, tuple[Any, str]] = {
    "zero_optimization.load_from_fp32_weights": (True, "a resumed run would start from weights rounded to bfloat16"),
    "zero_optimization.compute_grad_norm": (True, "the run needs the norm to detect NaN"),
    "bf16.check_grad_overflow": (
        False,
        "it checks every gradient alone, which slows down the update, and a run always refuses an update whose "
        "gradient norm is infinite or NaN",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        1,
        "DeepSpeed updates the weights that stay on the GPU with another "
        "optimizer, which follows no schedule and is not saved in checkpoints",
    ),
    "zero_force_ds_cpu_optimizer": (True, "DeepSpeed reads it for optimizers that it does not construct"),
    "optimizer.params.fp32_optimizer_states": (True, "the states have the dtype of the master weights, float32"),
}
"""Setting -> its only accepted value, and why another value is refused."""

_ONLY_AT_STAGE_3 = (
    "zero_optimization.stage3_",
    "zero_optimization.offload_param",
    "zero_optimization.sub_group_size",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.enable_sanity_checks",
    "zero_optimization.override_module_apply",
    "zero_optimization.leaf_module",
)
"""Prefixes of the settings that only ZeRO-3 uses."""

_HOMES: dict[str, type[BaseModel]] = {
    "megaclip": MegaclipSection,
    "": DsConfig,
    "zero_optimization": DeepSpeedZeroConfig,
    "optimizer.params": params_model("AdamW"),
    "megaclip.fastclip": FastClipSettings,
    "megaclip.lora": LoraSettings,
}
"""Sections whose settings are often written elsewhere."""


def check_ds_config(config: dict[str, Any]) -> DsConfig:
    """Return the contents of ds_config.json, typed. Raises ConfigError for the first mistake."""
    fields: dict[str, FieldInfo] = {}
    values: dict[str, Any] = {}
    for setting, value, field in _settings("", config, DsConfig):
        fields[setting], values[setting] = field, value
    for setting, cure in _REQUIRED.items():
        if setting not in values:
            raise ConfigError(f"{setting} is missing; {cure}")
    _check_no_auto(values, fields)
    _check_values_that_deepspeed_misreads(values)
    try:
        parsed = DsConfig.model_validate(config)
    except ValidationError as error:
        raise config_error(error) from None
    _check_monitors(parsed)
    check_optimizer(
        parsed.optimizer,
        zero_stage=int(parsed.zero_optimization.stage),
        offload="zero_optimization.offload_optimizer" in values,
    )
    _check_zero(parsed, values)
    _check_precision(parsed, values)
    _check_megaclip(parsed)
    _check_lora(parsed)
    _check_tensor_parallel(parsed)
    _check_fastclip(parsed.megaclip)
    return parsed


def _settings(path: str, section: Any, model: type[BaseModel]) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield (dotted name, value, field) of every setting in `section` and its sub-sections.

    path: dotted name of the section, "" for the whole file. model: its accepted settings. Raises ConfigError for keys
    that are refused, misplaced or unknown.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"{path} is {json.dumps(section)}; write a JSON object, {{...}}")
    fields = _keys(model)
    for key, value in section.items():
        setting = f"{path}.{key}" if path else key
        if setting in _REFUSED:
            if not _is_switched_off(setting, value):
                raise ConfigError(f"{setting} cannot be used: {_REFUSED[setting]}")
            if key not in fields:
                continue
        if key not in fields:
            _refuse_unknown(setting, key, set(fields))
        yield setting, value, fields[key]
        kinds = (fields[key].annotation, *get_args(fields[key].annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if setting == "optimizer.params":
            inner = params_model(section.get("type"))
        if inner is not None and not (value is None and type(None) in kinds):
            yield from _settings(setting, value, inner)


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _is_switched_off(setting: str, value: Any) -> bool:
    if "." in setting:
        return not value  # inside a section DeepSpeed takes null, 0 and {} for "off" too
    return value is False or (isinstance(value, dict) and value.get("enabled") is False)


def _refuse_unknown(setting: str, key: str, known: set[str]) -> NoReturn:
    section = setting.removesuffix(key)
    homes = [home for home, model in _HOMES.items() if key in _keys(model)]
    if section.rstrip(".") in homes:  # another optimizer has this setting
        homes = []
    inner = [home for home in homes if home.startswith(section)]  # megaclip.eps: of the two sections with eps, fastclip
    if homes:
        home = (inner or homes)[0]
        place = f"in the section {home}" if home else "at the top level"
        raise ConfigError(f"{setting} is misplaced; write it {place}")
    raise ConfigError(f"unknown key {setting}{nearest(key, known)}")


def _check_no_auto(values: dict[str, Any], fields: dict[str, FieldInfo]) -> None:
    """Refuse "auto" outside the section "megaclip": DeepSpeed ignores it, and only Hugging Face's trainer replaces
    it."""
    named = []
    for setting, value in values.items():
        if setting.startswith("megaclip.") or not (value == "auto" or (isinstance(value, list) and "auto" in value)):
            continue
        default = None if fields[setting].is_required() else fields[setting].default
        shown = "" if default is None else f" (the default is {json.dumps(default, default=str)})"
        named.append(setting + shown)
    if named:
        raise ConfigError(f'"auto" is only for Hugging Face\'s trainer; write a value for {", ".join(named)}')


def _check_values_that_deepspeed_misreads(values: dict[str, Any]) -> None:
    """Refuse switches that are not true or false (DeepSpeed may read "false" as true) and unknown ZeRO stages."""
    for setting, value in values.items():
        if setting.endswith((".enabled", ".compute_grad_norm")) and not isinstance(value, bool):
            raise ConfigError(f"{setting} is {value!r}; write true or false")
    stage = values.get("zero_optimization.stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage is {stage!r}; write 0, 1, 2 or 3")
    for setting, (accepted, reason) in _FIXED.items():
        if (value := values.get(setting, accepted)) != accepted:
            raise ConfigError(f"{setting} cannot be {json.dumps(value)}: {reason}; leave it out")


def _check_monitors(config: DsConfig) -> None:
    """Refuse monitors that DeepSpeed would fail to start. Without this check it fails after every rank has started."""
    for monitor, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if getattr(config, monitor).enabled and not _is_installed(package):
            raise ConfigError(
                f"{monitor}.enabled requires the package {package}, which is not installed; run  pip install {package}"
            )
    if config.tensorboard.enabled and not config.tensorboard.output_path:
        raise ConfigError(
            "tensorboard.enabled is not required: a run writes TensorBoard files to the folder tensorboard/ of its own "
            "folder; leave it out, or set tensorboard.output_path to the folder of a second copy"
        )


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a plain folder of that name, such as wandb's, has no origin


def _check_zero(config: DsConfig, values: dict[str, Any]) -> None:
    """Refuse settings of zero_optimization that its stage or the optimizer does not use."""
    zero = config.zero_optimization
    for setting in values:
        if zero.stage != 3 and setting.startswith(_ONLY_AT_STAGE_3):
            raise ConfigError(
                f"{setting} has no effect at zero_optimization.stage {zero.stage}; use stage 3, or leave it out"
            )
        is_of_stages = setting.startswith("zero_optimization.") and setting != "zero_optimization.stage"
        if zero.stage == 0 and is_of_stages and setting not in _REFUSED:
            raise ConfigError(f"{setting} has no effect at stage 0; use stage 1, 2 or 3, or leave it out")
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        setting = f"zero_optimization.{name}"
        if section is not None and section.device == "none":
            raise ConfigError(f'{setting}.device is "none"; leave the section {setting} out')
        if section is not None and section.device == "nvme":
            raise ConfigError(f'{setting}.device is "nvme", and offload to disks is not supported; use "cpu"')


def _check_precision(config: DsConfig, values: dict[str, Any]) -> None:
    """Refuse bfloat16 sums of float32 gradients, and bf16 where DeepSpeed 0.19 runs other optimizer classes.

    tests/distributed/test_engine_guards.py shows that bf16 at stage 0 gives different results.
    """
    accumulate, stage = config.data_types.grad_accum_dtype, int(config.zero_optimization.stage)
    if not config.bf16.enabled:
        if accumulate == "bf16":
            raise ConfigError(
                "data_types.grad_accum_dtype is 'bf16', but gradients are float32 without bf16.enabled; leave it out"
            )
        return
    if stage == 0:
        raise ConfigError(
            "bf16.enabled requires zero_optimization.stage 1, 2 or 3, on one GPU too: at stage 0 DeepSpeed rescales "
            "bf16 gradients before the optimizer receives them"
        )
    if stage == 1 and accumulate == "fp32" and not values.get("zero_optimization.offload_optimizer"):
        raise ConfigError(
            "data_types.grad_accum_dtype 'fp32' with bf16 requires zero_optimization.stage 2 or 3: at stage 1 "
            "DeepSpeed runs its BF16_Optimizer, which keeps whole float32 gradients on every rank and is not supported "
            "here; use another stage, or megaclip.coalesce_gradient_reduction alone, which accumulates in float32 too"
        )


def _check_megaclip(config: DsConfig) -> None:
    """Refuse settings of the section "megaclip" that do not work at the ZeRO stage or together, and overlap_comm
    without its setting there."""
    section, zero = config.megaclip, config.zero_optimization
    if zero.stage == 1 and zero.overlap_comm and not section.coalesce_gradient_reduction:
        raise ConfigError(
            "zero_optimization.overlap_comm at stage 1 requires megaclip.coalesce_gradient_reduction: without it "
            "DeepSpeed 0.19 reduces wrong sums of the gradients of several chunks; leave it out, or use stage 2"
        )
    if section.coalesce_gradient_reduction and zero.stage == 0:
        raise ConfigError("megaclip.coalesce_gradient_reduction has no effect at stage 0; use ZeRO stage 1, 2 or 3")
    for name in ("compile", "selective_recompute"):
        if getattr(section, name) is True and section.untraced:
            raise ConfigError(f"megaclip.{name} true cannot be used with {section.untraced}; leave one of them out")


def _check_lora(config: DsConfig) -> None:
    """Refuse settings that cannot be used with adapters."""
    section = config.megaclip
    if section.lora is None:
        return
    decays = [name for name in ("image_layer_decay", "text_layer_decay") if getattr(section, name) is not None]
    if decays or section.tensor_parallel_size > 1:
        name = decays[0] if decays else "tensor_parallel_size"
        raise ConfigError(f"megaclip.{name} {getattr(section, name)} cannot be used with megaclip.lora; leave it out")
    if section.lora.dora and config.zero_optimization.stage == 3:
        raise ConfigError(
            "megaclip.lora.dora true cannot be used at zero_optimization.stage 3, which partitions the weights whose "
            "rows DoRA measures; use stage 2 or less, which keeps the frozen weights on each rank"
        )


def _check_tensor_parallel(config: DsConfig) -> None:
    """Refuse settings that are wrong, or have not been tested, with tensor parallelism."""
    size, zero = config.megaclip.tensor_parallel_size, config.zero_optimization
    if size == 1:
        return
    setting = f"megaclip.tensor_parallel_size {size}"
    optimizer = config.optimizer.type
    if optimizer in NEED_WHOLE_TENSORS:
        raise ConfigError(
            f"optimizer.type {optimizer} cannot be used with {setting}: {optimizer} {NEED_WHOLE_TENSORS[optimizer]}, "
            "and each rank has only parts of them; use AdamW"
        )
    if zero.zero_hpz_partition_size > 1 or zero.zero_quantized_gradients:
        name = "zero_hpz_partition_size" if zero.zero_hpz_partition_size > 1 else "zero_quantized_gradients"
        raise ConfigError(
            f"zero_optimization.{name} cannot be used with {setting}: DeepSpeed forms its groups from consecutive "
            "ranks, which hold different parts of the model; leave it out"
        )


def _check_fastclip(section: MegaclipSection) -> None:
    """Refuse settings of the global losses that the chosen loss ignores."""
    settings, given = section.fastclip, section.fastclip.model_fields_set
    no_effect = f"has no effect with megaclip.loss {section.loss!r}; leave it out"
    variant = VARIANTS.get(section.loss)
    if variant is None:
        if given:
            raise ConfigError(f"megaclip.fastclip {no_effect}")
        return
    if section.same_ids != "ignore":
        raise ConfigError(
            f"megaclip.same_ids {section.same_ids!r} cannot be used with megaclip.loss {section.loss!r}, which "
            "estimates means over all other samples of the dataset; set same_ids to 'ignore', or use 'clip' or 'siglip'"
        )
    for key in sorted(given):
        learning = key.startswith("temperature_") and key not in ("temperature_min", "temperature_max")
        if (
            (learning and variant.temperature == "constant")
            or (key == "temperature_gradient_limit" and not variant.individual)
            or (key == "rho" and not variant.with_rho)
        ):
            raise ConfigError(f"megaclip.fastclip.{key} {no_effect}")
    if "temperature_warmup" in given and settings.temperature_schedule != "cosine":
        raise ConfigError(
            "megaclip.fastclip.temperature_warmup has no effect with temperature_schedule "
            f"{settings.temperature_schedule!r}; leave it out, or use 'cosine'"
        )
    schedule = variant.gamma_schedule if settings.gamma_schedule == "auto" else settings.gamma_schedule
    if schedule == "constant":
        for key in sorted(given & {"gamma_epochs", "gamma_per"}):
            raise ConfigError(f"megaclip.fastclip.{key} has no effect with a constant gamma; leave it out")
    if variant.individual and settings.temperature_schedule == "threshold":
        raise ConfigError(
            "megaclip.fastclip.temperature_schedule 'threshold' requires a loss with one global temperature; use "
            "fastclip_v0 or fastclip_v3, or another schedule"
        )
