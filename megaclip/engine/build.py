"""From a checked configuration to a DeepSpeed engine around the model, ready to train."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import ValidationError
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import get_default_build_root

from megaclip.checkpoint.open_clip_weights import load_pretrained
from megaclip.comm.collectives import raise_together
from megaclip.comm.parallelism import parallel_groups
from megaclip.config import TrainArguments, TrainingConfig
from megaclip.config.optimizers import TIMM_OPTIMIZERS
from megaclip.engine.optimizers import guard_gradients, parameter_groups, timm_optimizer
from megaclip.errors import ConfigError
from megaclip.logging import get_logger
from megaclip.models import ClipModel, ModelConfig, build_model

logger = get_logger(__name__)

_LOCK_IS_OLD_S = 60.0
"""What DeepSpeed has compiled before it loads in less than a second."""
MANY_CHUNKS = 32
"""Above it the rounding of a sum in bfloat16 (2^-9 a step, at random) is more than that of its terms."""


def build_engine(config: TrainingConfig, arguments: TrainArguments, model_config: ModelConfig) -> DeepSpeedEngine:
    """Build the model (partitioned from the start under ZeRO-3), load pretrained weights, lock, checkpoint, wrap.

    Every rank calls it with the same arguments, after the process group exists.

    Raises:
        ConfigError: DeepSpeed refuses the configuration, or lacks what it needs on this machine.
        CheckpointError: the pretrained weights cannot be read or do not fit.
    """
    raise_together(_disk_offload_error(config) or _quantization_error(config))
    _warn_of_locks()
    torch.manual_seed(arguments.seed)
    parallel = parallel_groups(config.megaclip.tensor_parallel_size)
    with deepspeed.zero.Init(
        config_dict_or_path=config.deepspeed,
        enabled=config.zero_stage == 3,
        data_parallel_group=parallel.data.handle,
        mpu=parallel.mpu,
    ):
        model = build_model(model_config, patch_dropout=arguments.force_patch_dropout, tensor=parallel.tensor)
    if arguments.pretrained:
        logger.info("%s", load_pretrained(model, arguments.pretrained))
    if arguments.lock_image:
        model.lock_image_tower(arguments.lock_image_unlocked_groups)
    if arguments.lock_text:
        model.lock_text_tower(arguments.lock_text_unlocked_layers)
    if config.zero_stage == 3:
        _gather_whole_blocks(model)
    kind, params = config.deepspeed["optimizer"]["type"], config.deepspeed["optimizer"]["params"]
    groups = parameter_groups(model, params.get("weight_decay", 0.0))
    optimizer = timm_optimizer(kind, params, groups) if kind in TIMM_OPTIMIZERS else None
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=groups, config=config.deepspeed, mpu=parallel.mpu
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{config.path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    if config.activation_checkpointing:
        model.set_activation_checkpointing(_checkpoint_on_cpu if config.cpu_checkpointing else _checkpoint)
    if config.megaclip.compile_blocks:
        for tower in (model.visual, model.text):
            tower.transformer.compile_blocks()
    guard_gradients(engine)
    _describe(engine, config, model)
    batch_plan = config.batch_plan(dist.get_world_size())
    _warn_of_rounded_sums(config, max(batch_plan.accumulation, batch_plan.text_chunks))
    return engine


def _warn_of_locks() -> None:
    """Name lock files that runs killed while they compiled have left: torch waits for them for ever, in silence."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with contextlib.suppress(FileNotFoundError):  # given back just now
            age_s = time.time() - lock.stat().st_mtime
            if age_s > _LOCK_IS_OLD_S and os.environ.get("LOCAL_RANK", "0") == "0":
                message = (
                    "%s is %d minutes old and may make this run wait for ever: delete it, unless another run compiles"
                )
                logger.warning(message, lock, age_s / 60)


def _gather_whole_blocks(model: ClipModel) -> None:
    """One gather per block, not one per projection and norm: DeepSpeed's hooks take longer than small products.

    But for the first trained block of a tower that is locked below it: DeepSpeed reduces a whole block's gradients when
    that of its input is there, and takes an input without one for the end of a backward pass that has not begun.
    """
    for tower in (model.visual, model.text):
        locked_below = not tower.positional_embedding.requires_grad
        for block in tower.transformer.resblocks:
            locked = not any(parameter.requires_grad for parameter in block.parameters())
            deepspeed.utils.set_z3_leaf_module(block, locked or not locked_below)
            locked_below = locked_below and locked


def _disk_offload_error(config: TrainingConfig) -> ConfigError | None:
    """Whether offload to disk is asked for where DeepSpeed neither has nor can compile what it does that with."""
    zero = config.deepspeed.get("zero_optimization", {})
    sections = {key: zero.get(key) or {} for key in ("offload_optimizer", "offload_param")}
    asking = [key for key, section in sections.items() if section.get("device") == "nvme"]
    if not asking or installed_ops.get(AsyncIOBuilder.NAME) or AsyncIOBuilder().is_compatible():
        return None
    return ConfigError(
        f'{config.path}: zero_optimization.{asking[0]}.device "nvme" needs libaio with its headers, to compile '
        'DeepSpeed\'s async_io op: install it (apt install libaio-dev), or set "cpu"'
    )


def _quantization_error(config: TrainingConfig) -> ConfigError | None:
    """Whether ZeRO++'s quantized collectives are asked for where DeepSpeed has no op for them."""
    zero = config.deepspeed.get("zero_optimization", {})
    asked = [key for key, value in zero.items() if key.startswith("zero_quantized_") and value]
    if not asked or get_accelerator().device_name() != "cpu":
        return None
    return ConfigError(f"{config.path}: zero_optimization.{asked[0]} needs a GPU: DeepSpeed cannot do it on a CPU")


# PyTorch's checkpoint, not DeepSpeed's: deepspeed.checkpointing.checkpoint loses the gradients of a block whose input
# needs none (locked towers), and its non_reentrant_checkpoint fails on parameters that ZeRO-3 has partitioned.
def _checkpoint(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *tensors, use_reentrant=False)


def _checkpoint_on_cpu(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return _checkpoint(function, *tensors)


def _describe(engine: DeepSpeedEngine, config: TrainingConfig, model: ClipModel) -> None:
    sizes = [(getattr(p, "ds_numel", p.numel()), bool(getattr(p, "ds_persist", False))) for p in model.parameters()]
    total = sum(size for size, _ in sizes)
    partitioned = sum(size for size, persistent in sizes if not persistent) if config.zero_stage == 3 else 0
    logger.info(
        "model: %.1f M parameters in %s, ZeRO-%d on %d ranks, %.0f%% of the parameters partitioned, optimizer %s%s%s",
        total / 1e6,
        str(engine.get_data_types()[0]).removeprefix("torch."),
        config.zero_stage,
        dist.get_world_size(),
        100 * partitioned / total,
        type(engine.basic_optimizer).__name__,
        ", activation checkpointing" if config.activation_checkpointing else "",
        ", compiled blocks" if config.megaclip.compile_blocks else "",
    )


def _warn_of_rounded_sums(config: TrainingConfig, chunks: int) -> None:
    """Of gradients of many chunks that add up in bfloat16 without having been told to."""
    told = "grad_accum_dtype" in config.deepspeed.get("data_types", {})
    if config.accumulates_in_bf16 and not told and chunks > MANY_CHUNKS:
        logger.warning(
            "gradients of %d chunks add up in bfloat16, which loses small ones: set %s",
            chunks,
            "data_types.grad_accum_dtype to fp32" if config.zero_stage > 1 else "megaclip.coalesce_gradient_reduction",
        )
