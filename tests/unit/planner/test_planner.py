"""The planner's memory: states compared with ZeRO's arithmetic, phases, placement of data, fit and advice."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megaclip.config.checks import check_ds_config
from megaclip.errors import ConfigError
from megaclip.losses import FastClipLoss
from megaclip.losses.settings import VARIANTS
from megaclip.models import meta_model
from megaclip.planner import advice, describe, faster_run, largest_batch, plan_memory, plan_time
from megaclip.planner.memory import resolve_auto
from megaclip.planner.phases import graph_bytes, step_phases
from megaclip.planner.search import _changes, fits
from megaclip.planner.states import states_of
from megaclip.planner.workload import EvaluationSets
from tests.unit.planner.planner_cases import FLAT, GIB, H200, of_batch, workload


def test_states_follow_the_arithmetic_of_zero(tmp_path: Path) -> None:
    parameters = 151_277_312  # open_clip's ViT-B-32 without its logit scale (PLATFORM: 151,277,313)
    per_stage = {
        # working copy, master, two moments; at stage 3 also float32 gradients and the bucket, at all times
        1: 2 + (4 + 8) / 8,
        2: 2 + (4 + 8) / 8,
        3: (2 + 4 + 8 + 4) / 8,
    }
    for stage, per_parameter in per_stage.items():
        types = {} if stage == 1 else {"grad_accum_dtype": "fp32"}
        zero = {"stage": stage, "reduce_bucket_size": 1_000_000}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        plan = plan_memory(workload(tmp_path, zero_optimization=zero, data_types=types), H200)
        bucket = 2e6 if stage == 3 else 0
        model = {key: size for key, size in plan.gpu_states.items() if key != "library workspaces"}
        assert sum(model.values()) == pytest.approx(per_parameter * parameters + bucket, rel=1e-4), (stage, model)
    zero = {"stage": 2, "reduce_bucket_size": 1_000_000}
    assert states_of(workload(tmp_path, zero_optimization=zero)).bucket == 0
    assert states_of(workload(tmp_path, zero_optimization={"stage": 3}).at_stage(2)).bucket == 0
    zero["contiguous_gradients"] = True  # with overlap_comm one bucket fills while another is reduced
    one, two = (workload(tmp_path, zero_optimization=zero | {"overlap_comm": on}) for on in (False, True))
    assert (states_of(one).bucket, states_of(two).bucket) == (2e6, 4e6)


def test_offload_moves_states_and_a_moving_average_to_the_host(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    plan = plan_memory(workload(tmp_path, zero_optimization=zero, megaclip={"ema_decay": 0.9999}), H200)
    assert not {"parameters", "master parameters", "optimizer states"} & plan.gpu_states.keys()
    assert plan.cpu["optimizer states"] == pytest.approx((8 + 4) * 151_277_312)  # all eight ranks of the host


@pytest.mark.parametrize(
    ("stage", "accumulate", "on_gpu", "in_host_memory"),
    # Bytes per parameter after two backward passes on one rank, measured in DeepSpeed 0.19's optimizer.
    [(1, "bf16", 2, 0), (1, "fp32", 4, 0), (2, "bf16", 0, 2), (2, "fp32", 4, 0)],
)
def test_gradients_accumulate_where_deepspeed_keeps_them_with_offload(
    tmp_path: Path, stage: int, accumulate: str, on_gpu: int, in_host_memory: int
) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    job = workload(tmp_path, ranks=1, zero_optimization=zero, data_types={"grad_accum_dtype": accumulate})
    plan = plan_memory(job, describe(gpus=1))
    assert plan.gpu_phases.text_tower_backward.gradients == on_gpu * job.trained
    kept = 2 if stage == 1 and accumulate == "bf16" else in_host_memory  # allocated for the last reduction
    assert plan.cpu["gradients"] == (4 + kept) * job.trained  # plus float32 for the step


def test_an_evaluation_is_planned_beside_the_steps(tmp_path: Path) -> None:
    job = workload(tmp_path)
    dropping = job.model.replace(vision_cfg={"patch_dropout": 0.5, "layers": 2}, text_cfg={"layers": 1})
    job = replace(job, model=dropping)
    million = replace(job, evaluation=EvaluationSets(64, pairs=2**20, labelled=50_000))
    plain, plan = plan_memory(job, H200), plan_memory(million, H200)
    # Features and their copy without padding: float32, both towers, one eighth of the pairs.
    features = 2 * 4 * 512 * 2**20 / 8
    assert plan.gpu_phases.evaluation_retrieval.copies_of_features == 1.5 * features
    assert plan.gpu_phases.evaluation_towers.features == features
    assert plan.cpu["processes"] - plain.cpu["processes"] == 8 * job.workers * 0.25 * GIB
    chunk = 64 * (3 * 224 * 224 + 8 * 77 + 8)
    assert plan.cpu["loader's chunks"] - plain.cpu["loader's chunks"] == 8 * (2 * job.workers + 2) * chunk
    labelled = replace(job, evaluation=EvaluationSets(64, labelled=50_000))
    assert plan_memory(labelled, H200).gpu_phases.evaluation_retrieval is None
    (beyond,) = advice(replace(job, evaluation=EvaluationSets(64, pairs=2**32)), H200)
    assert "no setting of ds_config.json is enough" in beyond and "--eval-batch-size" in beyond


@pytest.mark.parametrize("loss", VARIANTS)
def test_state_of_all_samples_is_what_the_loss_allocates(tmp_path: Path, loss: str) -> None:
    on_a_host = FastClipLoss(loss, samples=8000).state.values.untyped_storage().nbytes()
    for device, state_on_host, state_on_gpu in (("cpu", on_a_host, 0), ("accelerator", 0, on_a_host / 8)):
        job = workload(tmp_path, megaclip={"loss": loss, "fastclip": {"state_device": device}})
        plan = plan_memory(replace(job, samples=8000), H200)
        assert plan.cpu.get("per-sample state", 0) == state_on_host
        assert plan.cpu["its copy in a checkpoint"] == on_a_host
        assert plan.gpu_states.get("per-sample state", 0) == state_on_gpu


def test_the_copy_of_a_checkpoint_is_in_the_plan_only_with_async_save(tmp_path: Path) -> None:
    for stage, expected in ((0, 12), (1, 14), (3, 12)):  # bytes per parameter on a host of 8 ranks
        precision = {"bf16": {"enabled": stage > 0}, "data_types": {}}
        job = workload(tmp_path, **precision, zero_optimization={"stage": stage})
        plan, with_copy = (plan_memory(replace(job, async_save=copied), H200) for copied in (False, True))
        part = with_copy.cpu["copy of a checkpoint"]
        assert part == pytest.approx(job.trained * expected)
        assert with_copy.cpu_peak == pytest.approx(plan.cpu_peak + part)
        assert "copy of a checkpoint" not in plan.cpu


def test_coalesced_bf16_gradients_have_float32_sums_unless_grad_accum_dtype_is_bf16(tmp_path: Path) -> None:
    section = {"coalesce_gradient_reduction": True}
    for dtypes, bytes_each in (({}, 4), ({"grad_accum_dtype": "bf16"}, 0)):
        job = workload(tmp_path, megaclip=section, data_types=dtypes)
        phases = plan_memory(job, H200).gpu_phases
        assert phases.text_tower_backward.gradient_sums == bytes_each * job.trained
        assert phases.image_tower_backward.gradient_sums == bytes_each * job.parameters[0].trained


def test_only_the_loss_and_the_embeddings_grow_with_the_batch(tmp_path: Path) -> None:
    small = workload(tmp_path, ranks=1)
    large = of_batch(small, 1_048_576)
    before, after = (plan_memory(each, H200).gpu_phases.by_name() for each in (small, large))
    changed = {
        part for name in before for part, size in asdict(before[name]).items() if size != getattr(after[name], part)
    }
    assert changed == {"loss", "embeddings", "embedding_gradients"}
    growth = plan_memory(large, H200).gpu_peak - plan_memory(small, H200).gpu_peak
    assert 0 < growth < 2 * 4 * 2 * 512 * 1_048_576  # less than float32 embeddings and gradients of both towers


def test_auto_gathers_on_one_host_unless_that_takes_half_of_the_memory(tmp_path: Path) -> None:
    job = workload(tmp_path)
    assert resolve_auto(job, H200).megaclip.exchange == "all_gather"
    huge = of_batch(job, 2**25)  # all_gather would take 96 GiB
    assert resolve_auto(huge, H200).megaclip.exchange == "ring"
    asked = huge.with_megaclip(exchange="all_gather")
    assert resolve_auto(asked, H200).megaclip.exchange == "all_gather"


def test_the_largest_batch_fits_and_a_larger_one_does_not(tmp_path: Path) -> None:
    job = workload(tmp_path, megaclip={"data_offload": "cpu"})
    host = describe(gpu="h200", gpus=8, host_memory="200GiB")
    largest = largest_batch(job, host)
    assert fits(of_batch(job, largest), host)
    assert not fits(job.with_batch(int(largest / 8 * 1.02) // 512 * 512), host)
    assert largest_batch(job.with_megaclip(data_offload="reread"), host) > largest
    assert largest_batch(job, describe(gpu="h200", gpus=8, gpu_memory="4GiB")) == 0


def test_a_batch_that_fits_is_not_larger_than_the_largest(tmp_path: Path) -> None:
    """With 11 image chunks a text chunk is as large as one image chunk. With 16 it equals eight, which do not fit."""
    job = workload(
        tmp_path,
        model="ViT-L-14",
        train_batch_size=112640,
        train_micro_batch_size_per_gpu=1280,
        activation_checkpointing={},
        zero_optimization={"stage": 1},
        data_types={"grad_accum_dtype": "bf16"},
    )
    cluster = describe(gpu="a100-40gb", gpus=8)
    assert fits(job, cluster) and job.batch.text_micro_batch == 1280
    largest = largest_batch(job, cluster)
    chunk = {"text_micro_batch": 1280}
    assert largest >= job.batch.global_batch and fits(job.with_batch(largest // 8, **chunk), cluster)
    assert not fits(job.with_batch(int(largest * 1.02) // (8 * 1280) * 1280, **chunk), cluster)


def merged(settings: dict, change: str) -> dict:
    """Return settings of ds_config.json with a change that `advice` words."""
    sections = json.loads("{" + change + "}").items()
    return settings | {key: {**settings.get(key, {}), **v} if isinstance(v, dict) else v for key, v in sections}


@pytest.mark.parametrize("optimizer", ["SGD", "Lion", "Lamb", "Adafactor", "AdamW"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_advice_is_accepted_with_every_optimizer(tmp_path: Path, optimizer: str, stage: int) -> None:
    settings = {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 512,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 0.001}},
        "zero_optimization": {"stage": stage},
    }
    try:
        check_ds_config(settings)
    except ConfigError:
        assert optimizer in ("Lamb", "Adafactor") and stage
        return
    job = workload(tmp_path, 4, settings=settings)
    kinds = set()
    for kind, text, changed in _changes(job):
        check_ds_config(merged(settings, text))
        if kind == "stage":
            assert states_of(changed) == states_of(workload(tmp_path, 4, settings=merged(settings, text))), text
        kinds.add(kind)
    assert ("stage" in kinds) == (optimizer not in ("Lamb", "Adafactor") and stage < 3)
    assert ("optimizer" in kinds) == (optimizer == "AdamW" and stage > 0)


HUGE = json.loads((Path(__file__).parents[3] / "ds_configs" / "huge_batch.json").read_text())
LARGE = {"train_batch_size": 2**23, "train_micro_batch_size_per_gpu": 512, "gradient_clipping": 1.0}
LARGE |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
LARGE |= {"megaclip": {"keep_graphs": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


@pytest.mark.parametrize(
    ("settings", "machine", "refused", "expected"),
    [
        (LARGE, {"gpu_memory": "40GiB"}, "a GPU", '"train_micro_batch_size_per_gpu": 128'),
        (LARGE | {"megaclip": {"data_offload": "cpu"}}, {"host_memory": "400GiB"}, "of memory", '"disk"'),
        (LARGE | {"megaclip": {"data_offload": "disk"}}, {"disk": "100GiB"}, "of disk", '"data_offload": "reread"'),
        # The peak is in the text tower, whose chunks are set in the file. Smaller image chunks would not change it.
        (HUGE, {"gpus": 1, "gpu_memory": "24GB", "host_memory": "64GB"}, "a GPU", "text_micro_batch_size"),
    ],
    ids=["gpu", "host", "disk", "huge batch"],
)
def test_each_piece_of_advice_written_into_the_file_makes_the_run_fit(
    tmp_path: Path, settings: dict, machine: dict, refused: str, expected: str
) -> None:
    cluster = describe(**{"gpus": 8, **machine})
    model = "ViT-B-32" if settings is HUGE else "ViT-L-14"
    job = workload(tmp_path, cluster.gpus, model, settings)
    assert any(refused in text for text in plan_memory(job, cluster).refusals)
    words = advice(job, cluster)
    assert any(expected in change for change in words), words
    for change in words:
        assert fits(workload(tmp_path, cluster.gpus, model, merged(settings, change)), cluster), change


def test_settings_are_combined_where_no_single_one_is_enough(tmp_path: Path) -> None:
    job = workload(tmp_path, model=FLAT)
    (together,) = advice(job, describe(gpus=8, gpu_memory="9GiB"))
    assert " and " in together
    (beyond,) = advice(job, describe(gpus=8, gpu_memory="3GiB"))
    assert "no setting of ds_config.json is enough" in beyond and "--eval-batch-size" not in beyond


def test_a_run_at_zero_3_that_would_be_faster_at_a_lower_stage_is_told_so(tmp_path: Path) -> None:
    """The plan is that of the same file with the lower stage. Sums in float32 exclude ZeRO-1, except with offload."""
    offloads = {"offload_optimizer": {"device": "cpu"}}
    for stage, dtype, more in ((2, "fp32", {}), (1, "bf16", {}), (1, "fp32", offloads)):
        each, lower = (
            replace(
                workload(tmp_path, data_types={"grad_accum_dtype": dtype}, zero_optimization={"stage": at, **more}),
                workers=64,  # not bound by data
            )
            for at in (3, stage)
        )
        assert plan_time(each.at_stage(stage), H200) == plan_time(lower, H200)
        assert plan_memory(each.at_stage(stage), H200).gpu_phases == plan_memory(lower, H200).gpu_phases
        of_stage, seconds = (plan_time(one, H200).total for one in (each.at_stage(stage), each))
        advised = f"ZeRO-{stage} fits too and is planned at {of_stage:.3g} s per step instead of {seconds:.3g} s"
        assert of_stage < 0.95 * seconds and faster_run(each, H200) == f"ZeRO-3: {advised}"
        assert each.at_stage(stage).zero.stage == stage and faster_run(each.at_stage(stage), H200) is None


def test_no_lower_zero_stage_is_recommended_that_does_not_fit_or_is_not_faster(tmp_path: Path) -> None:
    job = workload(tmp_path, model=FLAT, zero_optimization={"stage": 3, "reduce_bucket_size": 10**6}).with_batch(
        64, micro_batch=4
    )
    small = describe(gpus=8, gpu_memory="8GiB")
    assert fits(job, small) and not fits(job.at_stage(2), small)
    assert faster_run(job, small) is None and faster_run(job, H200) is not None
    hidden = job.with_batch(2048, micro_batch=128)  # each block takes longer than its hooks
    assert fits(hidden.at_stage(2), H200) and faster_run(hidden, H200) is None
    tiny = workload(tmp_path, model="demo-tiny", zero_optimization={"stage": 3}).with_batch(8, micro_batch=1)
    assert faster_run(tiny, H200) is not None and faster_run(tiny, describe(gpu="cpu")) is None


def test_a_frozen_tower_in_chunks_keeps_no_graph(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1).with_batch(512, text_micro_batch=128)
    cached, kept = plan_memory(job, H200), plan_memory(replace(job, text_unlocked=0), H200)
    both = plan_memory(job.with_batch(text_micro_batch=512), H200)
    assert [plan.image_place for plan in (cached, kept, both)] == ["cpu", "once", "once"]
    # With "cpu" and "disk" the step store keeps the images even if they are read only once.
    asked = plan_memory(replace(job, text_unlocked=0).with_megaclip(data_offload="cpu"), H200)
    assert asked.image_place == "cpu" and asked.cpu["step store"] == 8 * 512 * 3 * 224 * 224


def test_zero_3_keeps_a_tower_whole_as_far_as_half_the_reuse_distance(tmp_path: Path) -> None:
    """Between the two passes over a parameter, all later ones are used twice: forward and backward.

    Of the others, those in use and those fetched ahead are in memory twice: as received, and as parameters.
    """
    matrix = 768 * 3072  # the largest parameter
    for reuse, kept in ((10_000_000, 2 * matrix + 2 * (1_000_000 + matrix)), (10**9, 87_849_216)):  # or the whole tower
        zero = {"stage": 3, "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 1_000_000}
        phases = plan_memory(workload(tmp_path, zero_optimization=zero), H200).gpu_phases
        assert phases.image_tower_forward.gathered_parameters == pytest.approx(2 * kept, rel=0.01)


def test_the_image_towers_graph_is_kept_during_the_text_towers_backward_pass(tmp_path: Path) -> None:
    job = workload(tmp_path).with_batch(512)
    whole, frozen = (plan_memory(each, H200).gpu_phases for each in (job, replace(job, image_unlocked=0)))
    at_the_loss = whole.loss.kept_graphs - frozen.loss.kept_graphs
    assert at_the_loss == whole.text_tower_backward.kept_graphs - frozen.text_tower_backward.kept_graphs
    assert at_the_loss > 512 * 12 * 50 * 768 * 2  # at least every block's input, 50 tokens of 768 in bf16


def test_the_first_text_graph_counts_the_gradients_of_its_tower(tmp_path: Path) -> None:
    """It is back-propagated before the images, so the text tower's gradients exist beside the images' graphs."""
    job = workload(tmp_path, 1, zero_optimization={"stage": 1}, data_types={}).with_megaclip(keep_graphs="auto")
    first, second = plan_memory(job, H200).graph_bytes[8:10]  # after those of eight image chunks
    assert first - second == job.gradient_bytes * job.parameters[1].trained


def test_offloaded_embeddings_and_their_gradients_are_in_host_memory(tmp_path: Path) -> None:
    on_gpu, on_host = (
        plan_memory(workload(tmp_path, ranks=16, megaclip={"embeddings_offload": where}), describe(gpus=8, hosts=2))
        for where in (False, True)
    )
    assert "embeddings" not in on_gpu.cpu
    # ranks, towers, features and gradients, (b, D), bf16
    assert on_host.cpu["embeddings"] == 8 * 2 * 2 * 4096 * 512 * 2


def test_a_ring_over_hosts_holds_the_sums_of_gradients_of_two_levels(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=16, megaclip={"exchange": "ring", "reduction": "feature"})
    one, two, single = (
        plan_memory(job, describe(gpus=16 // hosts, hosts=hosts)).gpu_phases.loss.total for hosts in (1, 2, 16)
    )
    assert two - one == 2 * 4 * job.local_batch * job.model.embed_dim  # one is sent, and one received, in float32
    assert single == one  # one rank per host: one level


def test_a_caption_decoder_is_planned_with_the_text_tower(tmp_path: Path) -> None:
    """Chunks of images and of captions have the same samples, and a pass has the graphs of both."""
    job = workload(tmp_path, 1, "coca_ViT-B-32")
    parts = meta_model(job.model).parts()
    image, *others = (sum(parameter.numel() for parameter in part.parameters()) for part in parts.values())
    assert [tower.total for tower in job.parameters] == [image, sum(others)]
    assert (job.chunks, job.one_chunk_each, job.with_megaclip(keep_graphs=5).kept) == ((8, 8), False, (2, 2))
    image_graph, text_graph = graph_bytes(job)
    phases = step_phases(job)
    assert phases.text_tower_backward.total > image_graph + text_graph
    for setting, value in (("text_micro_batch_size", 256), ("cut_captions", True)):
        with pytest.raises(ConfigError, match=f"megaclip.{setting}"):
            workload(tmp_path, 1, "coca_ViT-B-32", megaclip={setting: value})
