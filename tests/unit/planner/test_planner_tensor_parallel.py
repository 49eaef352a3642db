"""The plan of a tensor-parallel run: parameters, states, sums inside a replica, and faster runs without it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, ModelDescription, load_model_config
from megaclip.models.clip import ClipModel
from megaclip.planner import Workload, describe, faster_run, plan_memory, plan_time
from megaclip.planner.search import advice, fits
from megaclip.planner.traffic import feature_traffic, parameter_traffic, tensor_traffic
from tests.unit.planner.planner_cases import FLAT, H200, workload

TINY = ModelConfig.from_dict(
    {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "patch_size": 4, "width": 16, "head_width": 4, "layers": 3, "pool_type": "avg"},
        "text_cfg": {"context_length": 6, "vocab_size": 50, "width": 8, "heads": 4, "layers": 2},
    }
)


def split_over(
    tmp_path: Path,
    tensor_ranks: int,
    ranks: int = 8,
    model: str | ModelDescription = TINY,
    rows: int = 64,
    stage: int = 1,
    **changes,
) -> Workload:
    """Return a bf16 workload with checkpointing and coalesced gradients, and four chunks of `rows` rows per rank."""
    settings = {
        "train_batch_size": 4 * rows * ranks,
        "train_micro_batch_size_per_gpu": rows * tensor_ranks,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
        "megaclip": {"tensor_parallel_size": tensor_ranks, "coalesce_gradient_reduction": True, "keep_graphs": 0},
        **changes,
    }
    return workload(tmp_path, ranks, model, settings)


def test_parameters_of_a_rank_are_the_whole_ones_and_its_part_of_the_others(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = ClipModel(load_model_config("ViT-bigG-14"))
    split = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(f".{layer}_proj." in name for layer in "qkv")
        or ".c_fc." in name
        or name.endswith((".out_proj.weight", ".c_proj.weight"))
    )
    everything = sum(parameter.numel() for parameter in model.parameters()) - 1  # the logit scale is the loss's
    assert split / everything == pytest.approx(0.973, abs=5e-4)
    for tensor_ranks in (2, 4):
        job = split_over(tmp_path, tensor_ranks, model="ViT-bigG-14")
        assert job.total == job.trained == everything - split + split // tensor_ranks
        assert (job.world_size, job.tensor_ranks, job.replicas) == (8, tensor_ranks, 8 // tensor_ranks)
    with pytest.raises(ConfigError, match="tensor_parallel_size 8 does not divide the 20 attention heads"):
        split_over(tmp_path, 8, model="ViT-bigG-14")


def tiny(tmp_path: Path, tensor_ranks: int, **changes) -> Workload:
    job = split_over(tmp_path, tensor_ranks, **changes)
    return job.with_batch(text_micro_batch=job.batch.micro_batch)


def test_bytes_of_the_sums_inside_a_replica_by_hand(tmp_path: Path) -> None:
    """Images: 3 blocks of 5 tokens of 16 numbers. Texts: one block of 6 tokens of 8 numbers, and a last block.

    The last block sums one token, except for the gradient of attention's input.
    """
    image, text, last = 3 * 5 * 16, 6 * 8, 8
    rows = 2 * 256  # four chunks of 64 rows of each of the two ranks
    sent = rows * 2 * 2 * (2 - 1) / 2  # bf16, and a ring's share
    for sums, checkpointing in ((7, "gpu"), (6, "")):
        job = replace(tiny(tmp_path, 2), checkpointing=checkpointing)
        assert sum(job.encoded_again)
        by_hand = sums * (image + text) + (sums - 2) * last + last + text
        assert tensor_traffic(job) == by_hand * sent
        locked = replace(job, image_unlocked=0)
        assert tensor_traffic(locked) == (by_hand - (sums - 2) * image) * sent
        one_chunk = job.with_batch(64)
        assert not sum(one_chunk.encoded_again)
        by_hand -= 2 * (image + text + last)
        assert tensor_traffic(one_chunk) == by_hand * sent / 4
    assert tensor_traffic(tiny(tmp_path, 1)) == 0
    # A ring of four sends 3/4 of twice the rows of four ranks: per rank three times as much as a ring of two.
    assert tensor_traffic(tiny(tmp_path, 4)) == 3 * tensor_traffic(tiny(tmp_path, 2))


def test_the_sums_are_added_to_the_step_over_the_link_that_the_replica_has(tmp_path: Path) -> None:
    job = split_over(tmp_path, 4, ranks=16)
    slow = {"link": "100MB", "network": "1MB", "rates": replace(H200.rates, decoded=1e12)}
    inside, across = describe(gpus=8, hosts=2, **slow), describe(gpus=2, hosts=8, **slow)
    step, slower = plan_time(job, inside), plan_time(job, across)
    assert step.tensor_parallel == pytest.approx(tensor_traffic(job) / 100e6)
    assert slower.tensor_parallel == pytest.approx(tensor_traffic(job) / 1e6)
    assert slower.total - step.total == pytest.approx(slower.tensor_parallel - step.tensor_parallel)
    assert slower.dominant == "communication" and step.total > step.towers + step.tensor_parallel


def test_ranks_of_a_replica_exchange_features_and_share_no_partition(tmp_path: Path) -> None:
    one, two = split_over(tmp_path, 1), split_over(tmp_path, 2)
    chosen = {"exchange": "ring", "reduction": "feature"}
    assert feature_traffic(one.with_megaclip(**chosen)) == feature_traffic(two.with_megaclip(**chosen))
    # ZeRO-1 sends 3 (W - 1) / W of a rank's parameters.
    assert parameter_traffic(two) == pytest.approx(3 * 2 * two.trained * 3 / 4)
    plans = [plan_memory(job, H200) for job in (one, two)]
    for job, plan, replicas in zip((one, two), plans, (8, 4), strict=True):
        assert plan.gpu_states["optimizer states"] == pytest.approx(8 * job.trained / replicas)
        assert plan.cpu["step store"] == 8 * 256 * 3 * 8 * 8
        assert plan.gpu_phases.loss == plans[0].gpu_phases.loss
    replica = split_over(tmp_path, 4, ranks=4)
    assert replica.replicas == 1 and parameter_traffic(replica) == 0


def test_settings_in_advice_and_other_batches_are_those_of_a_replica(tmp_path: Path) -> None:
    megaclip = {"tensor_parallel_size": 2, "coalesce_gradient_reduction": True, "text_micro_batch_size": 64}
    job = split_over(tmp_path, 2, rows=512, megaclip=megaclip)
    assert (job.batch.micro_batch, job.batch.text_micro_batch) == (512, 32)
    assert job.with_batch(1024).batch.text_micro_batch == 32
    assert job.with_batch(text_micro_batch=16).megaclip.text_micro_batch_size == 32
    plain = split_over(tmp_path, 2, model="ViT-bigG-14", rows=512)
    # the captions of 7 image chunks would take as much memory, but 7 does not divide the number of chunks
    assert plain.with_batch(micro_batch=128).batch.text_micro_batch == 4 * 128
    flat, small = split_over(tmp_path, 2, model=FLAT, rows=512), describe(gpus=8, gpu_memory="40GiB")
    rows = next(rows for rows in (512, 256, 128, 64, 32) if fits(flat.with_batch(micro_batch=rows), small))
    assert f'"train_micro_batch_size_per_gpu": {2 * rows}, ' in advice(flat, small)[0] and rows < 512


def test_a_run_that_fits_and_is_faster_without_tensor_parallelism_is_reported(tmp_path: Path) -> None:
    """The alternative is the run of the same ds_config.json without tensor parallelism."""
    job, alone = split_over(tmp_path, 2, model=FLAT), split_over(tmp_path, 1, model=FLAT)
    assert alone.zero.stage == 1 and fits(alone, H200)
    without, seconds = plan_time(alone, H200).total, plan_time(job, H200).total
    assert without < 0.95 * seconds and faster_run(job, H200) == (
        "megaclip.tensor_parallel_size 2: ZeRO-1 without it fits too and is planned at "
        f"{without:.3g} s per step instead of {seconds:.3g} s"
    )
    assert faster_run(alone, H200) is None
    assert faster_run(job, describe(gpus=8, gpu_memory="4GiB")) is None
    # A slow network makes it faster with tensor parallelism.
    few = split_over(tmp_path, 4, ranks=64, model=FLAT, rows=8)
    slow, fast = (describe(gpu="h100", gpus=8, hosts=8, network=rate) for rate in ("5GB", "1000GB"))
    assert fits(few, slow) and faster_run(few, slow) is None and faster_run(few, fast) is not None


def test_a_run_that_fits_only_without_tensor_parallelism_is_reported(tmp_path: Path) -> None:
    job = split_over(tmp_path, 2, model=FLAT, rows=32)
    small = describe(gpus=8, gpu_memory="11GiB")
    assert not fits(job, small)
    settings = 'ZeRO-3 (megaclip.coalesce_gradient_reduction false, data_types.grad_accum_dtype "fp32"'
    assert str(faster_run(job, small)).startswith(f"megaclip.tensor_parallel_size 2 does not fit; {settings}")


def test_alternatives_have_only_settings_that_a_run_accepts(tmp_path: Path) -> None:
    accumulates = {"data_types": {"grad_accum_dtype": "fp32"}, "megaclip": {"tensor_parallel_size": 2}}
    found = str(faster_run(split_over(tmp_path, 2, model=FLAT, stage=2, **accumulates), H200))
    assert "2: ZeRO-" in found and "ZeRO-1" not in found  # it refuses float32 accumulation in bf16
