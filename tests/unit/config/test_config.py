"""ds_config.json: every unknown, misplaced, ineffective or contradictory setting is one readable error."""

import importlib
import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaclip.config import MegaclipSection, TrainingConfig, load_training_config
from megaclip.config.training import TextChunks
from megaclip.errors import ConfigError
from megaclip.zero import build

VALID = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "megaclip": {"exchange": "ring"},
}


def fastclip(loss: str, **settings) -> dict:
    return {"loss": loss, "fastclip": settings}


SECTIONS = "megaclip megaclip.fastclip zero_optimization data_types activation_checkpointing timers.throughput"
REFUSED = """
    scheduler fp16 amp torch_autocast pipeline prescale_gradients gradient_predivide_factor gradient_allreduce_op
    managed_gradient_accumulation sparse_gradients dataloader_drop_last tensor_parallel expert_parallel elasticity
    autotuning hybrid_engine data_efficiency curriculum_learning compression_training weight_quantization checkpoint
    compile activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
    activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile zero_optimization.elastic_checkpoint zero_optimization.round_robin_gradients
    zero_optimization.legacy_stage1 zero_optimization.zenflow zero_optimization.cpu_offload
    zero_optimization.cpu_offload_param zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.stage3_module_granularity_threshold zero_optimization.offload_optimizer.super_offload
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.immediate_grad_update
    zero_optimization.save_muon_momentum_buffer_in_memory
"""
"""Settings of DeepSpeed that a run must refuse."""


def nested(setting: str, value: object) -> dict:
    """Return the changes of `write` that set a dotted setting."""
    *sections, key = setting.split(".")
    changes: dict = {key: value}
    for section in reversed(sections):
        changes = {section: changes}
    return changes


def write(folder: Path, **changes) -> Path:
    config = {key: value for key, value in {**VALID, **changes}.items() if value is not ...}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_valid_file_is_typed_and_passed_on_unchanged(tmp_path):
    path = write(tmp_path)
    config = load_training_config(path)
    assert config.megaclip.exchange == "ring" and config.megaclip.reduction == "auto"
    assert config.zero_stage == 3 and not config.bf16 and not config.activation_checkpointing
    assert (
        config.optimizer.type == "AdamW"
        and config.learning_rate == 1e-3
        and config.settings.data_types.grad_accum_dtype is None
    )
    assert config.optimizer.params.model_dump(exclude_unset=True) == VALID["optimizer"]["params"]
    assert config.deepspeed == json.loads(path.read_text())


CHECK = {"check_grad_overflow": False}
ALIGNED = {"parameter_alignment": True}
NO_TIMER = {"throughput": {"enabled": False}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"timers": NO_TIMER}),
        ({"bf16": {"enabled": False}}, {"bf16": {"enabled": False}, "timers": NO_TIMER}),
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True, **CHECK}, "timers": NO_TIMER}),
        ({"steps_per_print": 10}, {"steps_per_print": 10}),
        ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2, **ALIGNED}, "timers": NO_TIMER}),
        ({"zero_optimization": {"stage": 3}}, {"zero_optimization": {"stage": 3}, "timers": NO_TIMER}),
        (
            {"zero_optimization": {"stage": 1, "parameter_alignment": False}},
            {"zero_optimization": {"stage": 1, "parameter_alignment": False}, "timers": NO_TIMER},
        ),
        (
            {"timers": {"throughput": {"enabled": True, "synchronized": False}}},
            {"timers": {"throughput": {"enabled": True, "synchronized": False}}},
        ),
        (
            {"timers": {"throughput": {"synchronized": False}}},
            {"timers": {"throughput": {"enabled": False, "synchronized": False}}},
        ),
    ],
)
def test_deepspeed_receives_the_file_with_defaults_for_what_it_leaves_out(tmp_path, changes, expected):
    changes = {"zero_optimization": {"stage": 1}, **changes}
    config = load_training_config(write(tmp_path, **changes))
    expected = {"zero_optimization": {"stage": 1, **ALIGNED}, **expected}
    assert config.for_deepspeed == {**VALID, **changes, **expected}
    assert config.deepspeed == {**VALID, **changes}, "settings.json must equal the file"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"megaclip": {"exchnage": "ring"}}, "unknown key megaclip.exchnage; did you mean 'exchange'?"),
        ({"megaclip": {"exchange": "rign"}}, "megaclip.exchange: Input should be 'auto', 'ring' or 'all_gather'"),
        ({"megaclip": {"tile_budget_mib": 0}}, "megaclip.tile_budget_mib"),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm cannot be false",
        ),
        ({"megaclip": {"gradient_clipping": 1.0}}, "megaclip.gradient_clipping is misplaced"),
        ({"megaclip": {"text_micro_batch_size": 0}}, "megaclip.text_micro_batch_size"),
        ({"megaclip": fastclip("fastclip_v3", gama_min=0.2)}, "fastclip.gama_min; did you mean 'gamma_min'?"),
        ({"megaclip": fastclip("fastclip_v3", gamma_min=0)}, "megaclip.fastclip.gamma_min"),
        ({"megaclip": fastclip("fastclip_v3", eps="1e-6")}, "megaclip.fastclip.eps"),
        (
            {"megaclip": {"loss": "sogclr", "same_ids": "mask"}},
            "megaclip.same_ids 'mask' cannot be used with megaclip.loss 'sogclr', which estimates means",
        ),
        ({"megaclip": fastclip("clip", eps=1e-6)}, "megaclip.fastclip has no effect with megaclip.loss 'clip'"),
        ({"megaclip": fastclip("fastclip_v1", rho=6.5)}, "fastclip.rho has no effect with megaclip.loss 'fastclip_v1'"),
        ({"megaclip": fastclip("fastclip_v0", rho=6.5)}, "fastclip.rho has no effect"),
        ({"megaclip": fastclip("sogclr", temperature_learning_rate=1e-4)}, "temperature_learning_rate has no effect"),
        (
            {"megaclip": fastclip("fastclip_v3", temperature_gradient_limit=5.0)},
            "temperature_gradient_limit has no effect with megaclip.loss 'fastclip_v3'",
        ),
        (
            {"megaclip": fastclip("fastclip_v3", temperature_schedule="threshold", temperature_warmup=5)},
            "temperature_warmup has no effect with temperature_schedule 'threshold'; leave it out, or use 'cosine'",
        ),
        ({"megaclip": fastclip("fastclip_v1", temperature_warmup=5)}, "temperature_warmup has no effect with megaclip"),
        ({"megaclip": fastclip("isogclr", gamma_epochs=3)}, "gamma_epochs has no effect with a constant gamma"),
        (
            {"megaclip": fastclip("fastclip_v2", temperature_schedule="threshold")},
            "requires a loss with one global temperature",
        ),
        (
            {"megaclip": fastclip("fastclip_v3", temperature=0.001)},
            "temperature_min and temperature_max",
        ),
        ({"exchange": "ring"}, "exchange is misplaced; write it in the section megaclip"),
        ({"stage": 3}, "stage is misplaced; write it in the section zero_optimization"),
        ({"optimizer": {"type": "AdamW", "lr": 1e-3}}, "lr is misplaced; write it in the section optimizer.params"),
        ({"megaclip": {"rho": 6.5}}, "megaclip.rho is misplaced; write it in the section megaclip.fastclip"),
        ({"megaclip": {"eps": 1e-6}}, "megaclip.eps is misplaced; write it in the section megaclip.fastclip"),
        ({"eps": 1e-6}, ": eps is misplaced; write it in the section optimizer.params"),
        (
            {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "eps": 1e-8}}},
            "unknown key optimizer.params.eps",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "betas": [0.9, 0.98]}}},
            "unknown key optimizer.params.betas",
        ),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean 'overlap_comm'?"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1}},
            "has no effect at zero_optimization.stage 1; use stage 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer has no effect at stage 0; use stage 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
            'zero_optimization.offload_optimizer.device is "nvme", which DeepSpeed replaces by "cpu" at stage 2',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            'offload_param.device "nvme" requires zero_optimization.offload_param.nvme_path',
        ),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {}},
            "bf16.enabled requires zero_optimization.stage 1, 2 or 3",
        ),
        (
            {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            "grad_accum_dtype 'fp32' with bf16 requires zero_optimization.stage 2 or 3",
        ),
        ({"gradient_clipping": ...}, "DeepSpeed would clip at 1.0"),
        ({"optimizer": ...}, "optimizer is missing; write one, for example"),
        ({"optimizer": {"type": "AdmW", "params": {"lr": 1}}}, "did you mean 'AdamW'?"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1"}}},
            "optimizer.params.lr: Input should be a valid number, got '1'",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [0.9, 2]}}}, "optimizer.params.betas.1"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "eps": "1e-6"}}}, "optimizer.params.eps"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, "Lamb requires zero_optimization.stage 0"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "replaces the gradient reduction"),
        ({"optimizer": {"type": "Adafactor", "params": {"lr": 1}}}, "Adafactor requires zero_optimization.stage 0"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, "zero_allow_untested_optimizer"),
        ({"zero_allow_untested_optimizer": True}, "no effect with optimizer.type AdamW"),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1, "nesterov": True}}, "zero_optimization": {}},
            "nesterov requires optimizer.params.momentum above 0",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1, "torch_adam": True, "bias_correction": True}}},
            "optimizer.params.bias_correction has no effect with optimizer.params.torch_adam",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1, "adam_w_mode": False}}},
            "adam_w_mode false has no effect with optimizer.type AdamW; use Adam",
        ),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1}}}, "zero_allow_untested_optimizer"),
        (
            {
                "optimizer": {"type": "Lion", "params": {"lr": 1}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "zero_allow_untested_optimizer": True,
            },
            "Lion has no implementation for offloaded parameters",
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "eps": 1e-8}}, "zero_optimization": {}}, "params.eps"),
        ({"train_batch_size": "24"}, "train_batch_size: Input should be a valid integer, got '24'"),
        ({"bf16": {"enabled": "false"}}, "bf16.enabled is 'false'; write true or false"),
        ({"activation_checkpointing": {"cpu_checkpointing": 1}}, "cpu_checkpointing: Input should be a valid boolean"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3'; write 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True; write 0, 1, 2 or 3"),
        (
            {
                "zero_optimization": {
                    "stage": "auto",
                    "reduce_bucket_size": "auto",
                    "stage3_max_live_parameters": "auto",
                }
            },
            "zero_optimization.stage (the default is 0), zero_optimization.reduce_bucket_size (the default is 500000000"
            "), zero_optimization.stage3_max_live_parameters (the default is 1000000000)",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": "auto"}}}, "the default is [0.9, 0.999]"),
        ({"wandb": {"enabled": "true"}}, "wandb.enabled is 'true'; write true or false"),
        ({"wandb": {"projekt": "clip"}}, "unknown key wandb.projekt; did you mean 'project'?"),
        (
            {"tensorboard": {"enabled": True}},
            "a run writes TensorBoard files to the folder tensorboard/ of its own folder",
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "gradients are float32 without bf16.enabled"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            "data_types.grad_accum_dtype: Input should be 'fp32' or 'bf16', got 'fp16'",
        ),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}},
            "overlap_comm at stage 1 requires megaclip.coalesce_gradient_reduction",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.7}}},
            "offload_optimizer.ratio cannot be 0.7: DeepSpeed updates the weights that stay on the GPU",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
            'zero_optimization.offload_optimizer.device is "none"; leave the section',
        ),
        ({"zero_optimization": {"load_from_fp32_weights": False}}, "load_from_fp32_weights cannot be false"),
        ({"gradient_clipping": math.inf}, "gradient_clipping: Input should be a finite number, got inf"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": math.inf}}}, "optimizer.params.lr: Input should be a finite"),
        (
            {"megaclip": {"loss": "fastclip_v3", "fastclip": {"rho": math.nan}}},
            "megaclip.fastclip.rho: Input should be a finite number",
        ),
        ({"timers": {"throughput": -1}}, "timers.throughput is -1; write a JSON object"),
        ({"steps_per_print": 0}, "steps_per_print: Input should be greater than 0, got 0"),
        ({"communication_data_type": "float32"}, "communication_data_type: Input should be 'fp32', 'fp16' or 'bf16'"),
        ({"wall_clock_breakdown": None}, "wall_clock_breakdown: Input should be a valid boolean"),
        ({"optimizer": {"type": ["AdamW"], "params": {"lr": 1}}}, "optimizer.type is ['AdamW']; use one of AdamW, "),
        (
            {"megaclip": {"coalesce_gradient_reduction": True}, "zero_optimization": {"stage": 0}},
            "coalesce_gradient_reduction has no effect at stage 0",
        ),
        ({"megaclip": {"compile": "yes"}}, "megaclip.compile"),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}},
            "optimizer.type 'Muon' cannot be used: at ZeRO-1 to 3 DeepSpeed measures and clips Muon's update",
        ),
        ({"megaclip": {"ema_decay": 1.0}}, "megaclip.ema_decay: Input should be less than 1"),
        (
            {
                "megaclip": {"ema_decay": 0.999},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            },
            "megaclip.ema_decay cannot be used with zero_optimization.offload_optimizer.device 'nvme': the average",
        ),
        ({"megaclip": {"lora": {"rank": 0}}}, "megaclip.lora.rank: Input should be greater than 0"),
        ({"megaclip": {"lora": {"r": 8}}}, "unknown key megaclip.lora.r"),
        ({"megaclip": {"rslora": True}}, "megaclip.rslora is misplaced; write it in the section megaclip.lora"),
        *(
            ({"megaclip": {"lora": {}, key: value}}, f"megaclip.{key} {value} cannot be used with megaclip.lora; leave")
            for key, value in (("text_layer_decay", 0.5), ("tensor_parallel_size", 2))
        ),
        (
            {"megaclip": {"lora": {"dora": True}}, "zero_optimization": {"stage": 3}},
            "megaclip.lora.dora true cannot be used at zero_optimization.stage 3",
        ),
        (
            {"megaclip": {"lora": {"dora": True}, "compile": True}},
            "megaclip.compile true cannot be used with megaclip.lora.dora",
        ),
        (
            {"megaclip": {"compile": True, "layer_norm": "apex"}},
            "megaclip.compile true cannot be used with megaclip.layer_norm 'apex'",
        ),
        (
            {"megaclip": {"selective_recompute": True, "tensor_parallel_size": 2}},
            "megaclip.selective_recompute true cannot be used with megaclip.tensor_parallel_size 2",
        ),
        *(
            (
                {"zero_optimization": {"stage": stage, setting: value}},
                f"zero_optimization.{setting} has no effect at zero_optimization.stage {stage}; use stage 3",
            )
            for stage, setting, value in (
                (0, "sub_group_size", 1000),
                (1, "zero_quantized_weights", True),
                (1, "zero_quantized_gradients", True),
                (2, "zero_hpz_partition_size", 8),
                (2, "memory_efficient_linear", False),
                (2, "leaf_module", {"classes": ["Block"]}),
            )
        ),
        *(
            (
                {"zero_optimization": {"stage": 0, setting: value}},
                f"zero_optimization.{setting} has no effect at stage 0; use stage 1, 2 or 3, or leave it out",
            )
            for setting, value in (
                ("overlap_comm", True),
                ("reduce_bucket_size", 1000),
                ("offload_optimizer", {"device": "cpu"}),
            )
        ),
        ({"aio": {"queue_depth": 16}}, "aio has no effect without offload to a disk; leave it out, or set the device"),
        (
            {"zero_force_ds_cpu_optimizer": False},
            "zero_force_ds_cpu_optimizer cannot be false: DeepSpeed reads it for optimizers that it does not construct",
        ),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": True}},
            "bf16.check_grad_overflow cannot be true: it checks every gradient alone, which slows down the update",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fp32_optimizer_states": False}}},
            "optimizer.params.fp32_optimizer_states cannot be false: the states have the dtype of the master",
        ),
        ({"megaclip": {"tensor_parallel_size": 0}}, "megaclip.tensor_parallel_size"),
        (
            {"megaclip": {"tensor_parallel_size": 2, "compile": True}, "zero_optimization": {"stage": 1}},
            "megaclip.compile true cannot be used with megaclip.tensor_parallel_size 2",
        ),
        *(
            (
                {"megaclip": {"tensor_parallel_size": 2}, "zero_optimization": {"stage": 3, setting: value}},
                f"zero_optimization.{setting} cannot be used with megaclip.tensor_parallel_size 2",
            )
            for setting, value in (
                ("zero_hpz_partition_size", 2),
                ("zero_quantized_gradients", True),
            )
        ),
        (
            {
                "megaclip": {"tensor_parallel_size": 2},
                "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": 0},
            },
            "optimizer.type Lamb cannot be used with megaclip.tensor_parallel_size 2",
        ),
        *(
            (
                {"megaclip": {"keep_graphs": wrong}},
                'megaclip.keep_graphs: write "auto" or a number of graphs, 0 or more',
            )
            for wrong in (-1, 1.5, True)
        ),
        *((nested(setting, True), f"{setting} is true; write a JSON object") for setting in SECTIONS.split()),
        *((nested(setting, {"enabled": True}), f"{setting} cannot be used: ") for setting in REFUSED.split()),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting_and_what_to_do(tmp_path, changes, expected):
    with pytest.raises(ConfigError) as error:
        load_training_config(write(tmp_path, **changes))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_section_that_is_switched_off_is_accepted(tmp_path):
    load_training_config(write(tmp_path, fp16={"enabled": False}, prescale_gradients=False))


def test_settings_that_only_one_device_or_stage_uses_are_accepted_there(tmp_path):
    on_disk = {"device": "nvme", "nvme_path": "/nvme"}
    stage_3 = {"stage": 3, "sub_group_size": 1000, "zero_quantized_weights": True, "offload_optimizer": on_disk}
    load_training_config(write(tmp_path, zero_optimization=stage_3, aio={"queue_depth": 16}))
    off = {"stage": 0, "round_robin_gradients": False}
    load_training_config(write(tmp_path, zero_optimization=off, bf16={"immediate_grad_update": False}))


def test_auto_is_accepted_in_the_section_megaclip(tmp_path):
    load_training_config(write(tmp_path, megaclip={"exchange": "auto"}))


def test_upper_case_names_and_whole_floats_are_accepted_as_deepspeed_does(tmp_path):
    load_training_config(write(tmp_path, log_level="INFO", communication_data_type="BF16", steps_per_print=1e9))


@pytest.mark.parametrize(("monitor", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_without_its_package_is_refused_at_the_start(tmp_path, monkeypatch, monitor, package):
    path = write(tmp_path, **{monitor: {"enabled": True}})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{monitor}.enabled requires the package {package}, .*pip install {package}"):
        load_training_config(path)
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / package).mkdir()  # for example, the folder that wandb logs to
    with pytest.raises(ConfigError, match="which is not installed"):
        load_training_config(path)
    (tmp_path / package / "__init__.py").touch()
    importlib.invalidate_caches()
    load_training_config(path)


def test_monitors_without_a_package_are_accepted(tmp_path):
    load_training_config(
        write(tmp_path, tensorboard={"enabled": True, "output_path": "x"}, csv_monitor={"enabled": True})
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_file_that_is_not_one_json_object_is_refused(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds_config\.json"):
        load_training_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json' is neither a file .* path of a ds_config\.json"):
        load_training_config(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "expected"),
    [
        (24, 4, ..., (24, 4, 3)),
        (24, ..., 3, (24, 4, 3)),
        (..., 4, 3, (24, 4, 3)),
        (24, 4, 3, (24, 4, 3)),
        (8, ..., ..., (8, 4, 1)),
    ],
)
def test_the_batch_triple_is_completed(tmp_path, total, micro, accumulation, expected):
    path = write(
        tmp_path,
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
    )
    plan = load_training_config(path).batch_layout(world_size=2)
    assert (plan.global_batch, plan.micro_batch, plan.accumulation) == expected


def test_text_chunks_divide_the_samples_of_a_rank(tmp_path):
    def config(size):
        return load_training_config(write(tmp_path, megaclip={"text_micro_batch_size": size}))

    plan = config(6).batch_layout(world_size=2)
    assert (plan.local_batch, plan.accumulation, plan.text_micro_batch, plan.text_chunks) == (12, 3, 6, 2)
    with pytest.raises(ConfigError, match=r"text_micro_batch_size 5 does not divide the 4 x 3 = 12 samples per rank"):
        config(5).batch_layout(world_size=2)


@pytest.mark.parametrize(("accumulation", "captions", "chunk"), [(8, 4, 4), (8, 3, 2), (6, 4, 3), (7, 4, 1), (1, 9, 1)])
def test_a_text_chunk_takes_no_more_memory_than_an_image_chunk(tmp_path, accumulation, captions, chunk):
    """A text chunk has the samples of several image chunks. Their number divides the number of image chunks."""
    path = write(tmp_path, train_batch_size=3 * accumulation, train_micro_batch_size_per_gpu=3)
    config = replace(load_training_config(path), text_chunks=TextChunks(captions))
    assert config.batch_layout(world_size=1).text_micro_batch == 3 * chunk
    section = config.megaclip.model_copy(update={"text_micro_batch_size": 1})
    assert replace(config, megaclip=section).batch_layout(world_size=1).text_micro_batch == 1


@pytest.mark.parametrize(
    ("accumulation", "captions", "chunk"), [(32, 7, 4), (64, 7, 4), (16, 7, 2), (8, 7, 1), (4, 7, 1), (16, 1, 1)]
)
def test_too_few_text_chunks_get_the_size_of_image_chunks(tmp_path, accumulation, captions, chunk):
    path = write(tmp_path, train_batch_size=3 * accumulation, train_micro_batch_size_per_gpu=3)
    config = replace(load_training_config(path), text_chunks=TextChunks(captions, least=8))
    assert config.batch_layout(world_size=1).text_micro_batch == 3 * chunk


@pytest.mark.parametrize("world_size", [4, 5, 48])
def test_a_world_size_that_does_not_divide_the_batch_is_refused(tmp_path, world_size):
    config = load_training_config(write(tmp_path, train_batch_size=24, train_micro_batch_size_per_gpu=4))
    with pytest.raises(ConfigError, match=f"{world_size} ranks"):
        config.batch_layout(world_size)


@pytest.mark.parametrize("name", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_a_batch_without_negatives_is_refused(tmp_path, name):
    path = write(tmp_path, **{"train_batch_size": ..., "train_micro_batch_size_per_gpu": ...} | {name: 1})
    with pytest.raises(ConfigError, match="use 2 or more samples over all ranks"):
        load_training_config(path).batch_layout(1)


@pytest.mark.parametrize("path", sorted((Path(__file__).resolve().parents[3] / "ds_configs").rglob("*.json")), ids=str)
def test_every_example_is_valid(path):
    load_training_config(path)


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (2, True), (3, True), (2, False)])
def test_bf16_accumulation_of_many_chunks_by_default_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, coalesce: bool, dtype: str | None, stage: int, bf16: bool
) -> None:
    types = {"data_types": {"grad_accum_dtype": dtype}} if dtype else {}
    settings = {**VALID, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}, **types}
    section = MegaclipSection(coalesce_gradient_reduction=coalesce)
    config = TrainingConfig(Path("ds.json"), settings, section)
    lines: list[str] = []
    monkeypatch.setattr(build.logger, "warning", lambda text, *values: lines.append(text % values))
    build._warn_of_bf16_accumulation(config, 32)
    assert lines == []
    build._warn_of_bf16_accumulation(config, 33)
    if not bf16 or coalesce or dtype:
        assert lines == []
    else:
        cure = "megaclip.coalesce_gradient_reduction" if stage == 1 else 'data_types.grad_accum_dtype to "fp32"'
        assert lines == [f"gradients of 33 chunks accumulate in bfloat16, which loses small values; set {cure}"]
    rounds = {(False, None), (False, "bf16"), (True, "bf16")} if bf16 else set()
    assert config.accumulates_in_bf16 == ((coalesce, dtype) in rounds)


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}', b"1e999", b'{"train_batch_size": ' + b"9" * 5000 + b"}"],
)
def test_files_that_are_no_ds_config_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_training_config(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": ...},
            "train_batch_size 7 is not a multiple of gradient_accumulation_steps 2 x 1 r",
        ),
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_batch_size 7 is not a multiple of train_micro_batch_size_per_gpu 8",
        ),
        (
            {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3},
            "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x 1 ranks;",
        ),
    ],
)
def test_a_batch_that_cannot_be_divided_is_explained_by_what_was_written(tmp_path, given, expected):
    config = load_training_config(write(tmp_path, train_batch_size=7, **given))
    with pytest.raises(ConfigError, match=expected):
        config.batch_layout(1)


def changed(tmp_path, *changes, **content):
    return load_training_config(write(tmp_path, **content), changes)


def test_set_replaces_adds_and_removes_settings(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megaclip"), "propagate", True)
    changes = [
        "optimizer.params.betas=[0.8, 0.9]",
        "optimizer.params.lr=1e-4",
        "megaclip.loss=siglip",
        "bf16.enabled=true",
        "zero_optimization.stage=2",
        "gradient_clipping=0.5",
        "zero_optimization.offload_optimizer=null",
    ]
    section = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    config = changed(tmp_path, *changes, **section)
    params = config.optimizer.params
    assert (params.betas, params.lr, config.megaclip.loss, config.bf16) == ([0.8, 0.9], 1e-4, "siglip", True)
    assert config.zero_stage == 2 and config.zero.offload_optimizer is None and config.settings.gradient_clipping == 0.5
    assert config.deepspeed["optimizer"]["params"]["lr"] == 1e-4, "settings.json and DeepSpeed receive it"
    assert "zero_optimization.stage 2 (1 in the file)" in caplog.text
    assert 'megaclip.loss "siglip" (not in the file)' in caplog.text


TOTAL, MICRO, CHUNKS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("file", "changes", "batch"),
    [
        ((64, 8, 4), {TOTAL: 128}, (128, 8, 8)),
        ((64, 8, 4), {MICRO: 4}, (64, 4, 8)),
        ((64, 8, 4), {CHUNKS: 8}, (64, 4, 8)),  # the contrastive batch stays
        ((64, None, 4), {TOTAL: 128}, (128, 16, 4)),
        ((64, None, 4), {MICRO: 4}, (64, 4, 8)),
        ((None, 8, 4), {TOTAL: 128}, (128, 8, 8)),
        ((None, 8, None), {TOTAL: 128}, (128, 8, 8)),
        ((64, 8, 4), {MICRO: 4, CHUNKS: 2}, (16, 4, 2)),
        ((64, 8, 4), {TOTAL: 256, CHUNKS: 2}, (256, 64, 2)),
    ],
)
def test_a_batch_size_of_set_wins_over_those_of_the_file(tmp_path, file, changes, batch):
    content = {key: value for key, value in zip((TOTAL, MICRO, CHUNKS), file, strict=True) if value is not None}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**content, "gradient_clipping": 1.0, "optimizer": VALID["optimizer"]}))
    layout = load_training_config(path, [f"{key}={value}" for key, value in changes.items()]).batch_layout(2)
    assert (layout.global_batch, layout.micro_batch, layout.accumulation) == batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("megaclip.los=siglip", "unknown key megaclip.los; did you mean 'loss'?"),
        ("megaclip.keep-graphs=0", "unknown key megaclip.keep-graphs; did you mean 'keep_graphs'?"),
        ("megclip.loss=siglip", "unknown key megclip; did you mean 'megaclip'?"),
        ("lr=1e-4", "lr is misplaced; write it in the section optimizer.params"),
        ("loss=siglip", "loss is misplaced; write it in the section megaclip"),
        ("megaclip.loss=siglp", "megaclip.loss: Input should be 'clip', 'siglip'"),
        ("optimizer.params.lr=fast", "optimizer.params.lr: Input should be a valid number, got 'fast'"),
        ("optimizer.params.betas=[0.9,", "optimizer.params.betas: Input should be a valid list"),
        ("optimizer.type.name=x", 'optimizer.type.name cannot be set: type is "AdamW", which has no settings'),
        ("megaclip.loss=null", "megaclip.loss is not in the file; leave --set megaclip.loss=null out"),
        ("gradient_clipping=null", "gradient_clipping is missing"),
        ("gradient_clipping", "'gradient_clipping' is not KEY=VALUE"),
        ("gradient_clipping=", "'gradient_clipping=' is not KEY=VALUE"),
        ("=1", "'=1' is not KEY=VALUE"),
        ("a..b=1", "unknown key a"),
        ("optimizer.params.lr=" + "[" * 9999, "optimizer.params.lr: Input should be a valid number"),
    ],
)
def test_a_wrong_set_is_one_line_that_names_the_file_and_the_flag(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        changed(tmp_path, change)
    text = str(error.value)
    assert message in text and "\n" not in text and f"ds_config.json --set {change[:100]}" in text


def test_a_setting_is_set_once(tmp_path):
    with pytest.raises(ConfigError, match=r"gradient_clipping is set twice; leave one of them out"):
        changed(tmp_path, "gradient_clipping=1", "gradient_clipping=2")


def test_the_nearest_file_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").mkdir()
    for name in ("small.json", "ds_configs/large2.json"):
        (tmp_path / name).write_text("{}")
    nearest_files = {
        "small2": "small.json",
        "small": "small.json",
        "Small.jsn": "small.json",
        "large2": "ds_configs/large2.json",
        "ds_configs/large": "ds_configs/large2.json",
        "zero-3": "zero3",
        "fastclip-v2": "fastclip/fastclip_v2",
    }
    for given, nearest_file in nearest_files.items():
        with pytest.raises(ConfigError, match=rf"did you mean '{nearest_file}'\?"):
            load_training_config(given)
    with pytest.raises(ConfigError, match=r"zero3_offload$"):
        load_training_config("quite-different")
