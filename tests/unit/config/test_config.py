"""ds_config.json: every unknown, misplaced, ineffective or contradictory setting is one readable error."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaclip.config import MegaclipSection, TrainingConfig, load_training_config
from megaclip.config.training import SHIPPED, TextChunks
from megaclip.errors import ConfigError
from megaclip.zero import build

VALID = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3},
    "megaclip": {"exchange": "ring"},
}
TOTAL, MICRO, CHUNKS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


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
    assert config.optimizer.type == "AdamW" and config.learning_rate == 1e-3
    assert config.settings.data_types.grad_accum_dtype is None
    assert config.optimizer.params.model_dump(exclude_unset=True) == VALID["optimizer"]["params"]
    assert config.deepspeed == json.loads(path.read_text())


CHECK = {"check_grad_overflow": False}
ZERO = {"parameter_alignment": True, "contiguous_gradients": False}
NO_TIMER = {"throughput": {"enabled": False}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"timers": NO_TIMER}),
        ({"bf16": {"enabled": False}}, {"bf16": {"enabled": False}, "timers": NO_TIMER}),
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True, **CHECK}, "timers": NO_TIMER}),
        ({"steps_per_print": 10}, {"steps_per_print": 10}),
        ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2, **ZERO}, "timers": NO_TIMER}),
        (
            {"zero_optimization": {"stage": 2, "overlap_comm": True}},
            {
                "zero_optimization": {"stage": 2, "overlap_comm": True, **ZERO, "contiguous_gradients": True},
                "timers": NO_TIMER,
            },
        ),
        ({"zero_optimization": {"stage": 3}}, {"zero_optimization": {"stage": 3}, "timers": NO_TIMER}),
        (
            {"zero_optimization": {"stage": 1, "parameter_alignment": False, "contiguous_gradients": True}},
            {
                "zero_optimization": {"stage": 1, "parameter_alignment": False, "contiguous_gradients": True},
                "timers": NO_TIMER,
            },
        ),
        ({"timers": {"throughput": {"enabled": True}}}, {"timers": {"throughput": {"enabled": True}}}),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
            {"zero_allow_untested_optimizer": True, "timers": NO_TIMER},
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
    expected = {"zero_optimization": {"stage": 1, **ZERO}, **expected}
    assert config.for_deepspeed == {**VALID, **changes, **expected}
    assert config.deepspeed == {**VALID, **changes}, "settings.json must equal the file"


def test_deepspeed_does_not_write_to_the_monitors_of_a_run(tmp_path):
    """Its engine counts samples, and wandb ignores smaller steps after them."""
    table = {"enabled": True, "output_path": "x", "job_name": "y"}
    config = load_training_config(write(tmp_path, csv_monitor=table, wandb={"enabled": False}))
    assert config.for_deepspeed == {**VALID, "timers": NO_TIMER}
    assert config.monitors.enabled and config.monitors.csv_monitor.job_name == "y"


MISTAKES = """
megaclip.exchnage=ring | unknown key megaclip.exchnage; did you mean 'exchange'?
megaclip.keep-graphs=0 | unknown key megaclip.keep-graphs; did you mean 'keep_graphs'?
megclip.loss=siglip | unknown key megclip; did you mean 'megaclip'?
megaclip.exchange=rign | megaclip.exchange: Input should be 'auto', 'ring' or 'all_gather'
megaclip.loss=siglp | megaclip.loss: Input should be 'clip', 'siglip'
megaclip.tile_budget_mib=0 | megaclip.tile_budget_mib: Input should be greater than 0
megaclip.text_micro_batch_size=0 | megaclip.text_micro_batch_size: Input should be greater than 0
megaclip.tensor_parallel_size=0 | megaclip.tensor_parallel_size: Input should be greater than 0
megaclip.compile=yes | megaclip.compile: Input should be True, False, 'auto' or 'measure'
megaclip.keep_graphs=-1 | megaclip.keep_graphs: write "auto" or a number of graphs, 0 or more
megaclip.keep_graphs=1.5 | megaclip.keep_graphs: write "auto" or a number of graphs, 0 or more
megaclip.keep_graphs=true | megaclip.keep_graphs: write "auto" or a number of graphs, 0 or more
megaclip.ema_decay=1.0 | megaclip.ema_decay: Input should be less than 1
megaclip.gradient_clipping=1.0 | megaclip.gradient_clipping is misplaced; write it at the top level
exchange=ring | exchange is misplaced; write it in the section megaclip
stage=3 | stage is misplaced; write it in the section zero_optimization
lr=1e-4 | lr is misplaced; write it in the section optimizer.params
optimizer.lr=1e-3 | lr is misplaced; write it in the section optimizer.params
megaclip.rho=6.5 | megaclip.rho is misplaced; write it in the section megaclip.fastclip
megaclip.eps=1e-6 | megaclip.eps is misplaced; write it in the section megaclip.fastclip
eps=1e-6 | eps is misplaced; write it in the section optimizer.params
megaclip.rslora=true | megaclip.rslora is misplaced; write it in the section megaclip.lora
megaclip.loss=fastclip_v3 megaclip.fastclip.gama_min=0.2 | fastclip.gama_min; did you mean 'gamma_min'?
megaclip.loss=fastclip_v3 megaclip.fastclip.gamma_min=0 | megaclip.fastclip.gamma_min: Input should be greater than 0
megaclip.loss=fastclip_v3 megaclip.fastclip.eps="1e-6" | megaclip.fastclip.eps: Input should be a valid number
megaclip.loss=fastclip_v3 megaclip.fastclip.rho=NaN | megaclip.fastclip.rho: Input should be a finite number
megaclip.loss=fastclip_v3 megaclip.fastclip.temperature=0.001 | temperature_min and temperature_max
megaclip.loss=sogclr megaclip.same_ids=mask | 'mask' cannot be used with megaclip.loss 'sogclr', which estimates means
megaclip.fastclip.eps=1e-6 | megaclip.fastclip has no effect with megaclip.loss 'clip'
megaclip.loss=fastclip_v1 megaclip.fastclip.rho=6.5 | fastclip.rho has no effect with megaclip.loss 'fastclip_v1'
megaclip.loss=fastclip_v0 megaclip.fastclip.rho=6.5 | fastclip.rho has no effect with megaclip.loss 'fastclip_v0'
megaclip.loss=sogclr megaclip.fastclip.temperature_learning_rate=1e-4 | temperature_learning_rate has no effect
megaclip.loss=fastclip_v3 megaclip.fastclip.temperature_gradient_limit=5.0 | temperature_gradient_limit has no effect
megaclip.loss=fastclip_v1 megaclip.fastclip.temperature_warmup=5 | temperature_warmup has no effect with megaclip.loss
megaclip={"loss":"fastclip_v3","fastclip":{"temperature_schedule":"threshold","temperature_warmup":5}} | use 'cosine'
megaclip.loss=isogclr megaclip.fastclip.gamma_epochs=3 | gamma_epochs has no effect with a constant gamma
megaclip.loss=fastclip_v2 megaclip.fastclip.temperature_schedule=threshold | requires a loss with one global temperature
megaclip.lora.rank=0 | megaclip.lora.rank: Input should be greater than 0
megaclip.lora.rank=1000000 | megaclip.lora.rank: Input should be less than or equal to 16384
megaclip.lora.r=8 | unknown key megaclip.lora.r
megaclip.lora={} megaclip.text_layer_decay=0.5 | megaclip.text_layer_decay 0.5 cannot be used with megaclip.lora; leave
megaclip.lora={} megaclip.tensor_parallel_size=2 | megaclip.tensor_parallel_size 2 cannot be used with megaclip.lora
megaclip.lora.dora=true | megaclip.lora.dora true cannot be used at zero_optimization.stage 3
megaclip.lora.dora=true megaclip.compile=true | megaclip.compile true cannot be used with megaclip.lora.dora
megaclip.compile=true megaclip.layer_norm=apex | megaclip.compile true cannot be used with megaclip.layer_norm 'apex'
megaclip.tensor_parallel_size=2 megaclip.selective_recompute=true | megaclip.selective_recompute true cannot be used
megaclip.tensor_parallel_size=2 megaclip.compile=true | megaclip.compile true cannot be used with
megaclip.tensor_parallel_size=2 zero_optimization.zero_hpz_partition_size=2 | zero_hpz_partition_size cannot be used
megaclip.tensor_parallel_size=2 zero_optimization.zero_quantized_gradients=true | zero_quantized_gradients cannot be
megaclip.tensor_parallel_size=2 optimizer={"type":"Lamb","params":{"lr":1}} zero_optimization.stage=0 | Lamb cannot be
zero_optimization.stage=0 megaclip.coalesce_gradient_reduction=true | coalesce_gradient_reduction has no effect at stage
zero_optimization.stage=1 zero_optimization.overlap_comm=true | requires megaclip.coalesce_gradient_reduction
zero_optimization.overlap_com=true | did you mean 'overlap_comm'?
zero_optimization.stage=7 | zero_optimization.stage is 7; write 0, 1, 2 or 3
zero_optimization.stage="3" | zero_optimization.stage is '3'; write 0, 1, 2 or 3
zero_optimization.stage=true | zero_optimization.stage is True; write 0, 1, 2 or 3
zero_optimization.compute_grad_norm=false | zero_optimization.compute_grad_norm cannot be false
zero_optimization.load_from_fp32_weights=false | load_from_fp32_weights cannot be false
zero_optimization.stage=1 zero_optimization.stage3_max_live_parameters=1 | no effect at zero_optimization.stage 1; use
zero_optimization.stage=0 zero_optimization.sub_group_size=1000 | has no effect at zero_optimization.stage 0; use stage
zero_optimization.stage=1 zero_optimization.zero_quantized_weights=true | no effect at zero_optimization.stage 1; use
zero_optimization.stage=2 zero_optimization.zero_hpz_partition_size=8 | no effect at zero_optimization.stage 2; use
zero_optimization.stage=2 zero_optimization.memory_efficient_linear=false | no effect at zero_optimization.stage 2; use
zero_optimization.stage=2 zero_optimization.leaf_module={"classes":["Block"]} | no effect at zero_optimization.stage 2;
zero_optimization.stage=0 zero_optimization.reduce_bucket_size=9 | has no effect at stage 0; use stage 1, 2 or 3, or
zero_optimization.stage=0 zero_optimization.offload_optimizer.device=cpu | offload_optimizer has no effect at stage 0;
zero_optimization.offload_optimizer.device=none | zero_optimization.offload_optimizer.device is "none"; leave the
zero_optimization.offload_param.device=nvme | offload_param.device is "nvme", and offload to disks is not supported;
zero_optimization.offload_optimizer={"device":"cpu","ratio":0.7} | ratio cannot be 0.7: DeepSpeed updates the weights
aio.queue_depth=16 | aio cannot be used: it is for offload to disks, which is not supported; leave it out, and use the
bf16.enabled=true zero_optimization.stage=0 | bf16.enabled requires zero_optimization.stage 1, 2 or 3
bf16.enabled=true zero_optimization.stage=1 data_types.grad_accum_dtype=fp32 | with bf16 requires
bf16.enabled=true data_types.grad_accum_dtype=fp16 | data_types.grad_accum_dtype: Input should be 'fp32' or 'bf16'
data_types.grad_accum_dtype=bf16 | gradients are float32 without bf16.enabled
bf16.enabled="false" | bf16.enabled is 'false'; write true or false
bf16.check_grad_overflow=true | bf16.check_grad_overflow cannot be true: it checks every gradient alone
gradient_clipping=null | gradient_clipping is missing; write a number, or 0.0 for no clipping: without it DeepSpeed
gradient_clipping=Infinity | gradient_clipping: Input should be a finite number, got inf
optimizer=null | optimizer is missing; write one, for example
optimizer.type=AdmW | did you mean 'AdamW'?
optimizer.type=["AdamW"] | optimizer.type is ['AdamW']; use one of AdamW,
optimizer.type=OneBitAdam | replaces the gradient reduction
optimizer.type=Muon | optimizer.type 'Muon' cannot be used: at ZeRO-1 to 3 DeepSpeed measures and clips Muon's update
optimizer={"type":"Lamb","params":{"lr":1}} | Lamb requires zero_optimization.stage 0
optimizer={"type":"Adafactor","params":{"lr":1}} | Adafactor requires zero_optimization.stage 0
optimizer={"type":"Lion","params":{"lr":1,"eps":1e-8}} | unknown key optimizer.params.eps
optimizer={"type":"SGD","params":{"lr":1,"betas":[0.9,0.98]}} | unknown key optimizer.params.betas
optimizer={"type":"SGD","params":{"lr":1,"nesterov":true}} zero_optimization.stage=0 | requires
optimizer={"type":"Lion","params":{"lr":1}} zero_optimization.offload_optimizer.device=cpu | Lion has no implementation
optimizer.params.torch_adam=true optimizer.params.bias_correction=true | bias_correction has no effect with
optimizer.params.adam_w_mode=false | adam_w_mode false has no effect with optimizer.type AdamW; use Adam
optimizer.params.fp32_optimizer_states=false | optimizer.params.fp32_optimizer_states cannot be false: the states have
optimizer.params.lr=fast | optimizer.params.lr: Input should be a valid number, got 'fast'
optimizer.params.lr="1" | optimizer.params.lr: Input should be a valid number, got '1'
optimizer.params.lr=Infinity | optimizer.params.lr: Input should be a finite
optimizer.params.betas=[0.9,2] | optimizer.params.betas.1: Input should be less than 1
optimizer.params.betas=[0.9, | optimizer.params.betas: Input should be a valid list
optimizer.params.eps="1e-6" | optimizer.params.eps: Input should be a valid number
zero_force_ds_cpu_optimizer=false | zero_force_ds_cpu_optimizer cannot be false: DeepSpeed reads it for optimizers that
train_batch_size=9223372036854775808 | train_batch_size: Input should be less than or equal to 2147483647
train_batch_size="24" | train_batch_size: Input should be a valid integer, got '24'
activation_checkpointing.cpu_checkpointing=1 | cpu_checkpointing: Input should be a valid boolean
optimizer.params.betas="auto" | write a value for optimizer.params.betas (the default is [0.9, 0.999])
zero_optimization={"stage":"auto","reduce_bucket_size":"auto"} | stage (the default is 0),
optimizer.params.betas=[0.9,"auto"] | "auto" is only for Hugging Face's trainer; write a value for
wandb.enabled="true" | wandb.enabled is 'true'; write true or false
wandb.projekt=clip | unknown key wandb.projekt; did you mean 'project'?
tensorboard.enabled=true | a run writes TensorBoard files to the folder tensorboard/ of its own folder
steps_per_print=0 | steps_per_print: Input should be greater than 0, got 0
communication_data_type=float32 | communication_data_type: Input should be 'fp32', 'fp16' or 'bf16'
wall_clock_breakdown=1 | wall_clock_breakdown: Input should be a valid boolean
timers.throughput=-1 | timers.throughput is -1; write a JSON object
optimizer.type.name=x | optimizer.type.name cannot be set: type is "AdamW", which has no settings
megaclip.loss=null | megaclip.loss is not in the file; leave --set megaclip.loss=null out
gradient_clipping=1 gradient_clipping=2 | gradient_clipping is set twice; leave one of them out
optimizer.params.lr=0.1 optimizer.params={"lr":1} | optimizer.params is set twice; leave one of them out
gradient_clipping | 'gradient_clipping' is not KEY=VALUE; write for example
gradient_clipping= | 'gradient_clipping=' is not KEY=VALUE
=1 | '=1' is not KEY=VALUE
a..b=1 | unknown key a
"""
"""Changes by --set, and what the error must contain."""
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
SECTIONS = "megaclip megaclip.fastclip zero_optimization data_types activation_checkpointing timers.throughput"


def test_a_mistake_is_one_line_that_names_the_file_the_change_and_what_to_do(tmp_path):
    path = write(tmp_path)
    rows = [tuple(line.split(" | ")) for line in MISTAKES.strip().splitlines()]
    rows += [(f'{setting}={{"enabled":true}}', f"{setting} cannot be used: ") for setting in REFUSED.split()]
    rows += [(f"{setting}=true", f"{setting} is true; write a JSON object") for setting in SECTIONS.split()]
    rows += [("optimizer.params.lr=" + "[" * 9999, "optimizer.params.lr: Input should be a valid number")]
    for changes, expected in rows:
        with pytest.raises(ConfigError) as error:
            load_training_config(path, changes.split())
        flags = " ".join(f"--set {change}" for change in changes.split())
        start = str(ConfigError(f"{path} {flags}: "))
        message = str(error.value)
        assert message.startswith(start) and expected in message[len(start) :] and "\n" not in message, message


@pytest.mark.parametrize(
    "changes",
    [
        'fp16={"enabled":false} prescale_gradients=false',
        "zero_optimization.sub_group_size=1000 zero_optimization.zero_quantized_weights=true",
        'zero_optimization={"stage":0,"round_robin_gradients":false} bf16.immediate_grad_update=false',
        "megaclip.exchange=auto log_level=INFO communication_data_type=BF16 steps_per_print=1e9",
        "tensorboard.enabled=true tensorboard.output_path=x csv_monitor.enabled=true",
    ],
)
def test_settings_that_are_off_or_have_an_effect_are_accepted(tmp_path, changes):
    load_training_config(write(tmp_path), changes.split())


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


def test_a_file_that_is_not_one_json_object_is_refused(tmp_path):
    path = tmp_path / "ds_config.json"
    contents = [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b"\xff", b"[" * 100_000, b"1e999"]
    for content in [*contents, b'{"train_batch_size": ' + b"9" * 5000 + b"}"]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"ds_config\.json"):
            load_training_config(path)


@pytest.mark.parametrize(
    ("file", "changes", "batch"),
    [
        ((24, 4, None), {}, (24, 4, 3)),
        ((24, None, 3), {}, (24, 4, 3)),
        ((None, 4, 3), {}, (24, 4, 3)),
        ((24, 4, 3), {}, (24, 4, 3)),
        ((8, None, None), {}, (8, 4, 1)),
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
def test_the_batch_triple_is_completed_and_set_wins_over_the_file(tmp_path, file, changes, batch):
    sizes = {key: value or ... for key, value in zip((TOTAL, MICRO, CHUNKS), file, strict=True)}
    config = load_training_config(write(tmp_path, **sizes), [f"{key}={value}" for key, value in changes.items()])
    layout = config.batch_layout(2)
    assert (layout.global_batch, layout.micro_batch, layout.accumulation) == batch


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ("", 4, "train_batch_size 24 is not a multiple of train_micro_batch_size_per_gpu 4 x 4 ranks"),
        ("", 48, "48 ranks"),
        ("train_batch_size=1 train_micro_batch_size_per_gpu=null", 1, "use 2 or more samples over all ranks"),
        ("train_batch_size=null train_micro_batch_size_per_gpu=1", 1, "use 2 or more samples over all ranks"),
        ("train_batch_size=null train_micro_batch_size_per_gpu=null", 1, "set train_batch_size, train_micro_batch"),
        ("train_batch_size=7 train_micro_batch_size_per_gpu=8", 1, "7 is not a multiple of train_micro_batch_size_per"),
        (
            "train_batch_size=7 train_micro_batch_size_per_gpu=null gradient_accumulation_steps=2",
            1,
            "train_batch_size 7 is not a multiple of gradient_accumulation_steps 2 x 1 r",
        ),
        (
            "train_batch_size=7 train_micro_batch_size_per_gpu=3 gradient_accumulation_steps=2",
            1,
            "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x 1 rank;",
        ),
        ("megaclip.text_micro_batch_size=5", 2, "text_micro_batch_size 5 does not divide the 4 x 3 = 12 samples per"),
        ("megaclip.tensor_parallel_size=2", 3, "tensor_parallel_size 2 does not divide the number of ranks, 3"),
        ("megaclip.tensor_parallel_size=3", 3, "train_micro_batch_size_per_gpu 4 is not a multiple of .* 3: the ranks"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_explained_by_what_was_written(tmp_path, changes, ranks, message):
    config = load_training_config(write(tmp_path), changes.split())
    with pytest.raises(ConfigError, match=message):
        config.batch_layout(ranks)


@pytest.mark.parametrize(
    ("accumulation", "captions", "least", "chunk"),
    [
        *[(8, 4, 1, 4), (8, 3, 1, 2), (6, 4, 1, 3), (7, 4, 1, 1), (1, 9, 1, 1)],
        *[(32, 7, 8, 4), (64, 7, 8, 4), (16, 7, 8, 2), (8, 7, 8, 1), (4, 7, 8, 1), (16, 1, 8, 1)],
    ],
)
def test_a_text_chunk_takes_no_more_memory_than_an_image_chunk(tmp_path, accumulation, captions, least, chunk):
    """A text chunk has the samples of several image chunks. Their number divides the number of image chunks. Too few
    text chunks get the size of image chunks."""
    path = write(tmp_path, train_batch_size=3 * accumulation, train_micro_batch_size_per_gpu=3)
    config = replace(load_training_config(path), text_chunks=TextChunks(captions, least))
    layout = config.batch_layout(world_size=1)
    assert (layout.text_micro_batch, layout.text_chunks) == (3 * chunk, accumulation // chunk)
    section = config.megaclip.model_copy(update={"text_micro_batch_size": 1})
    assert replace(config, megaclip=section).batch_layout(world_size=1).text_micro_batch == 1


def test_every_shipped_file_is_valid_and_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in SHIPPED.rglob("*.json"):
        name = path.relative_to(SHIPPED)
        assert load_training_config(name.with_suffix("")).path == load_training_config(name).path == path
    (tmp_path / "zero1").write_text((SHIPPED / "zero2.json").read_text())
    assert load_training_config("zero1").zero_stage == 2, "a file is preferred"
    with pytest.raises(ConfigError, match=r"'zero4' is neither a file nor a shipped configuration; .* zero2, zero3"):
        load_training_config("zero4")


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (2, True), (2, False)])
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


def test_set_replaces_adds_and_removes_settings(tmp_path, caplog):
    changes = [
        "optimizer.params.betas=[0.8, 0.9]",
        "optimizer.params.lr=.1",  # not JSON, but a number
        "megaclip.loss=siglip",
        "bf16.enabled=true",
        "zero_optimization.stage=2",
        "zero_optimization.offload_optimizer=null",
    ]
    section = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = load_training_config(write(tmp_path, zero_optimization=section), changes)
    params = config.optimizer.params
    assert (params.betas, params.lr, config.megaclip.loss, config.bf16) == ([0.8, 0.9], 0.1, "siglip", True)
    assert config.zero_stage == 2 and config.zero.offload_optimizer is None
    assert config.deepspeed["optimizer"]["params"]["lr"] == 0.1, "settings.json and DeepSpeed receive it"
    assert "zero_optimization.stage 2 (1 in the file)" in caplog.text
    assert 'megaclip.loss "siglip" (not in the file)' in caplog.text


def test_the_nearest_file_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").mkdir()
    for name in ("small.json", "ds_configs/large2.json"):
        (tmp_path / name).write_text("{}")
    nearest_files = {
        "small2": "small.json",
        "Small.jsn": "small.json",
        "large2": "ds_configs/large2.json",
        "ds_configs/large": "ds_configs/large2.json",
        "zero-3": "zero3",
        "fastclip-v2": "fastclip/fastclip_v2",
    }
    for given, nearest_file in nearest_files.items():
        with pytest.raises(ConfigError, match=rf"is neither a file .*did you mean '{nearest_file}'\?"):
            load_training_config(given)
    with pytest.raises(ConfigError, match=r"zero3_offload$"):
        load_training_config("quite-different")
