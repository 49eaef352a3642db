"""Build the model, and the DeepSpeed engine that trains it, from a checked configuration."""

import contextlib
import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from pydantic import ValidationError
from torch import nn
from torch.utils.checkpoint import checkpoint

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.open_clip_weights import pretrained_weights
from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.comm.parallelism import Parallelism, parallel_groups
from megaclip.config import TrainArguments, TrainingConfig
from megaclip.config.optimizers import TIMM_OPTIMIZERS
from megaclip.errors import ConfigError, config_error
from megaclip.logging import format_count, get_logger, log_once
from megaclip.models import DualEncoder, ModelConfig, ModelDescription, build_model
from megaclip.models.compilation import compiles_whole_tower
from megaclip.models.layers import require_apex, whole_shape
from megaclip.models.lora import add_adapters, checksum_of
from megaclip.models.weights import copy_weights
from megaclip.objectives import Objective
from megaclip.ops.tiles import require_implementation
from megaclip.zero.gathered_tower import trace_kinds_of_passes
from megaclip.zero.linear import use_linear_of_zero3
from megaclip.zero.masters import write_masters
from megaclip.zero.op_builds import prepare_ops, require_build_folder
from megaclip.zero.optimizers import guard_gradients, needed_ops, step_without_history, timm_optimizer
from megaclip.zero.parameter_groups import parameter_groups
from megaclip.zero.parameters import gathered_shape, is_partitioned
from megaclip.zero.update import group_kernels

logger = get_logger(__name__)

_MANY_CHUNKS = 32
"""Number of chunks above which summing in bfloat16 loses more precision than rounding the terms (2^-9 each, random)."""


def build_engine(
    config: TrainingConfig,
    arguments: TrainArguments,
    model_config: ModelDescription,
    *,
    compiles: bool = False,
    recomputes: bool = False,
    objective: Objective | None = None,
) -> DeepSpeedEngine:
    """Build the model (partitioned at ZeRO-3), load pretrained weights and start DeepSpeed's engine.

    Every rank calls it with the same arguments, after the process group exists. compiles: torch.compile runs the
    towers. recomputes: they then compute some activations again in the backward pass. objective: its modules become
    part of the model.

    Raises:
        ConfigError: DeepSpeed refuses the configuration or cannot run it on this machine.
        CheckpointError: the pretrained weights cannot be read or do not fit.
    """
    with raise_on_all_ranks():
        _check_machine(config)
    prepare_ops()
    torch.manual_seed(arguments.seed)
    parallel = parallel_groups(config.megaclip.tensor_parallel_size)
    batch_layout = config.batch_layout(dist.get_world_size())
    partition = functools.partial(  # divides parameters among the ranks at ZeRO-3
        deepspeed.zero.Init,
        config_dict_or_path=config.for_deepspeed,
        enabled=config.zero_stage == 3,
        data_parallel_group=parallel.data.handle,
        mpu=parallel.mpu,
    )
    model = _construct(config, model_config, parallel, partition)
    if model.statistics(model.visual) and batch_layout.micro_batch == 1:
        raise ConfigError(
            "train_micro_batch_size_per_gpu 1 cannot be used with the batch norms of this image tower, which normalise "
            "a chunk by its own mean and deviation; use 2 or more"
        )
    for path in filter(None, (arguments.pretrained, arguments.pretrained_image, arguments.pretrained_text)):
        require_whole(Path(path))
    pretrained = pretrained_weights(
        model,
        arguments.pretrained,
        image=arguments.pretrained_image,
        text=arguments.pretrained_text,
        kept_positions=arguments.keep_text_positions,
    )
    copy_weights(model, pretrained)
    if arguments.lock_image:
        model.lock_tower("image", arguments.lock_image_unlocked_groups)
    if arguments.lock_text:
        model.lock_tower("text", arguments.lock_text_unlocked_layers)
    locked = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if (lora := config.megaclip.lora) is not None:
        model.base_sha256 = checksum_of(pretrained)
        torch.manual_seed(arguments.seed)
        layers = add_adapters(model, lora.model_dump())
        if config.zero_stage == 3:
            partition(module=model)  # the adapters: the other parameters are partitioned already
        logger.info(
            "LoRA: adapters of rank %d at %d layers, from %s to %s", lora.rank, len(layers), layers[0], layers[-1]
        )
    if objective is not None:
        torch.manual_seed(arguments.seed)
        objective.attach(model)
        model.objective = objective
        if any(True for _ in objective.parameters()) and not objective.paired:
            raise ConfigError(
                f"megaclip.objective {config.megaclip.objective} has parameters but not paired = True; set it in the "
                "class: a pass over one tower would not use them"
            )
        if config.zero_stage == 3:
            if config.bf16:
                objective.bfloat16()  # DeepSpeed casts parameters to bfloat16 only before it partitions them
            partition(module=model)  # the objective's parameters: the other ones are partitioned already
    kept = locked & pretrained.keys() if config.bf16 and dist.get_rank() == 0 else ()
    model.locked_weights = {name: pretrained[name] for name in kept}
    if config.zero_stage == 3:
        use_linear_of_zero3()
        # ZeRO-3 gathers each block's parameters at once instead of one projection or norm at a time: DeepSpeed's hooks
        # take longer than small matrix products. `blocks_gathered_at_once` documents the exception.
        for block, at_once in model.blocks_gathered_at_once():
            deepspeed.utils.set_z3_leaf_module(block, at_once)
    engine = _initialize(config, model, parallel)
    write_masters(engine, pretrained)
    del pretrained
    if config.activation_checkpointing:
        on_cpu = config.settings.activation_checkpointing.cpu_checkpointing
        model.set_activation_checkpointing(_checkpoint_on_cpu if on_cpu else _checkpoint)
    compiled = _compile_towers(model, config, recomputes=recomputes) if compiles else ""
    trace_kinds_of_passes(engine)
    group_kernels(engine)
    guard_gradients(engine)
    step_without_history(engine)
    _describe(engine, config, model, compiled)
    _warn_of_bf16_accumulation(config, max(batch_layout.accumulation, batch_layout.text_chunks))
    return engine


def _check_machine(config: TrainingConfig) -> None:
    """Raise ConfigError if a setting requires a device or a package that this rank does not have."""
    require_build_folder(needed_ops(config))
    if config.megaclip.layer_norm == "apex":
        require_apex()
    device = torch.device(get_accelerator().device_name())
    quantized = [name for name, value in config.zero if name.startswith("zero_quantized_") and value]
    if quantized and device.type == "cpu":  # DeepSpeed has no op for ZeRO++'s quantized collectives there
        raise ConfigError(
            f"{config.path}: zero_optimization.{quantized[0]} requires a GPU; leave it out to train on a CPU"
        )
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    require_implementation(config.megaclip.implementation, device, dtype, "megaclip.implementation")


def _initialize(config: TrainingConfig, model: DualEncoder, parallel: Parallelism) -> DeepSpeedEngine:
    """Return DeepSpeed's engine around the model, with the optimizer of ds_config.json."""
    groups = parameter_groups(model, config)
    optimizer = timm_optimizer(config.optimizer, groups) if config.optimizer.type in TIMM_OPTIMIZERS else None
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=groups, config=config.for_deepspeed, mpu=parallel.mpu
        )
    except ValidationError as error:
        raise ConfigError(f"{config.path}: {config_error(error)}") from None
    return engine


def _construct(
    config: TrainingConfig, model_config: ModelDescription, parallel: Parallelism, partition: Callable[..., Any]
) -> DualEncoder:
    """Return the model with its initial values, partitioned at ZeRO-3."""
    from_the_start = isinstance(model_config, ModelConfig)
    with partition() if from_the_start else contextlib.nullcontext():
        model = build_model(
            model_config,
            tensor=parallel.tensor,
            layer_norm=config.megaclip.layer_norm,
        )
    if from_the_start:
        logger.info("towers: MegaCLIP's own")
        return model
    logger.info("towers: open_clip's modules %s and %s", type(model.visual).__name__, type(model.text).__name__)
    if config.zero_stage == 3:
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        logger.info(
            "the model was built whole in the host memory of every rank, %.1f GB, and is partitioned now: its "
            "libraries set initial values after deepspeed.zero.Init would have partitioned them",
            nbytes / 1e9,
        )
        if config.bf16:  # DeepSpeed casts parameters to bfloat16 only before it partitions them
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        partition(module=model)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(get_accelerator().current_device_name()))
    return model


def _compile_towers(model: DualEncoder, config: TrainingConfig, *, recomputes: bool) -> str:
    """Let torch.compile compile the towers in the first step; return a description of the compiled parts for the log.

    recomputes: compute layer norms and activation functions again in the backward pass.
    """
    whole = compiles_whole_tower(
        config.zero_stage,
        checkpointing=config.activation_checkpointing,
        coalesces=config.megaclip.coalesce_gradient_reduction,
    )
    return model.compile_towers(whole, _is_gathered_at_once, recomputes=recomputes)


def _is_gathered_at_once(block: nn.Module) -> bool:
    """Return False if ZeRO-3 gathers the parameters of `block` one by one: its hooks would run inside the graph."""
    partitioned = any(is_partitioned(parameter) for parameter in block.parameters())
    return not partitioned or bool(deepspeed.utils.z3_leaf_module(block))


# PyTorch's checkpoint is used because both of DeepSpeed's fail here: deepspeed.checkpointing.checkpoint loses the
# gradients of a block whose input has none (locked towers), and non_reentrant_checkpoint fails on parameters that
# ZeRO-3 has partitioned.
def _checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False, **options)


def _checkpoint_on_cpu(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return _checkpoint(function, *arguments, **options)


def _describe(engine: DeepSpeedEngine, config: TrainingConfig, model: DualEncoder, compiled: str) -> None:
    parameters: list[Any] = list(model.parameters())
    total = sum(gathered_shape(parameter).numel() for parameter in parameters)
    partitioned = sum(p.ds_numel for p in parameters if is_partitioned(p) and not p.ds_persist)
    options = ["activation checkpointing"] if config.activation_checkpointing else []
    options += [compiled] if compiled else []
    options += [f"{config.megaclip.layer_norm} layer norms"] if config.megaclip.layer_norm != "torch" else []
    if model.tensor.size > 1:
        version = metadata.version("megatron-core")
        options.append(f"tensor-parallel size {model.tensor.size} with megatron-core {version}")
    whole = trained = 0
    for name, parameter in model.named_parameters():
        size = whole_shape(name, parameter, model.tensor).numel()
        whole, trained = whole + size, trained + size * parameter.requires_grad
    logger.info(
        "model: %.1f M parameters%s in %s, ZeRO-%d on %s, %.0f%% of the parameters partitioned, optimizer %s%s",
        whole / 1e6,
        f", {trained / 1e6:.1f} M of them trained," if trained < whole else "",
        " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        config.zero_stage,
        format_count(dist.get_world_size(), "rank"),
        100 * partitioned / total,
        type(engine.basic_optimizer).__name__,
        "".join(f", {option}" for option in options),
    )


def _warn_of_bf16_accumulation(config: TrainingConfig, chunks: int) -> None:
    """Warn when many gradient chunks accumulate in bfloat16 by default."""
    is_default = config.settings.data_types.grad_accum_dtype is None
    if config.accumulates_in_bf16 and is_default and chunks > _MANY_CHUNKS:
        cure = (
            'data_types.grad_accum_dtype to "fp32"' if config.zero_stage > 1 else "megaclip.coalesce_gradient_reduction"
        )
        log_once(
            logger.warning,
            f"gradients of {chunks} chunks accumulate in bfloat16, which loses small values; set {cure}",
        )
