"""The planner: losses against measured and published figures, states against ZeRO's arithmetic, fit and advice."""

import itertools
import json
import weakref
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaclip.config import load_training_config
from megaclip.config_section import GLOBAL_LOSSES
from megaclip.data.batch import Batch
from megaclip.engine import rates
from megaclip.engine.gradient_cache import keeps_graph, trained_towers
from megaclip.engine.step_batch import Tower
from megaclip.errors import ConfigError
from megaclip.evaluation import evaluate, suite
from megaclip.losses import FastClipLoss, siglip
from megaclip.losses.plan import SOFTMAX_COST
from megaclip.models import build_model, load_model_config
from megaclip.planner import Workload, advice, describe, largest_batch, last_resort, memory, plan_memory, plan_time
from megaclip.planner.cluster import Rates, parse_size, rates_json
from megaclip.planner.losses import (
    LossSizes,
    inf_cl_loss_bytes,
    megaclip_loss_bytes,
    megaclip_loss_operations,
    open_clip_loss_bytes,
)
from megaclip.planner.memory import settled
from megaclip.planner.peers import INF_CL, OPEN_CLIP_ACCUMULATING, peer_gpu_bytes, peer_step_seconds
from megaclip.planner.search import fits
from megaclip.planner.towers import image_tower, text_tower
from megaclip.planner.traffic import offload_traffic, parameter_traffic
from megaclip.planner.workload import EvaluationSets

GIB, MIB = 2**30, 2**20
H200 = describe(gpu="h200", gpus=8)

# tools/bench_loss.py on one and four H200s, bf16 features: MiB beyond the features.
MEASURED_MIB = {
    ("ring feature", 8192, 512, 1): 160,
    ("ring feature", 32768, 512, 1): 257,
    ("ring feature", 32768, 1024, 1): 385,
    ("ring feature", 32768, 512, 4): 514,
    ("ring scalar", 32768, 512, 4): 386,
    ("all_gather feature", 32768, 512, 4): 578,
    ("all_gather scalar", 32768, 512, 4): 514,
    ("ring feature bf16", 32768, 512, 4): 450,
    ("all_gather feature bf16", 32768, 512, 4): 674,
    ("siglip ring feature bf16", 16384, 768, 4): 326,
    ("siglip all_gather feature bf16", 16384, 768, 4): 504,
    ("siglip ring feature", 16384, 768, 4): 374,
    ("siglip ring scalar", 16384, 768, 4): 327,
    ("siglip all_gather feature", 16384, 768, 4): 470,
    ("siglip all_gather scalar", 16384, 768, 4): 327,
    ("open_clip", 8192, 512, 1): 528,
    ("open_clip", 32768, 1024, 1): 8320,
    ("open_clip", 32768, 512, 4): 33088,
    ("Inf-CL", 8192, 512, 1): 161,
    ("Inf-CL", 32768, 1024, 1): 1282,
    ("Inf-CL", 32768, 512, 4): 1089,
}


@pytest.mark.parametrize("case", MEASURED_MIB, ids=str)
def test_the_losses_take_what_was_measured(case: tuple[str, int, int, int]) -> None:
    method, *numbers = case
    sizes = LossSizes(*numbers)
    if method == "open_clip":
        planned = open_clip_loss_bytes(sizes, autocast=False)
    elif method == "Inf-CL":
        planned = inf_cl_loss_bytes(sizes)
    else:
        payload = 2 if method.endswith("bf16") else 4
        *loss, exchange, reduction = method.removesuffix(" bf16").split()
        planned = megaclip_loss_bytes(
            sizes, exchange, reduction, 128, loss[0] if loss else "clip", payload_bytes=payload
        )
    assert planned / MIB == pytest.approx(MEASURED_MIB[case], rel=0.025)


@pytest.mark.parametrize(("loss", "products"), [("clip", SOFTMAX_COST.products), ("siglip", siglip._COST.products)])
def test_the_losses_are_charged_the_products_that_they_compute(loss: str, products: dict[str, int]) -> None:
    sizes = LossSizes(local_batch=6, embed_dim=5, world_size=4)
    for reduction, count in products.items():
        assert megaclip_loss_operations(sizes, reduction, loss) == count * 6 * 24 * 5


RUNS = json.loads((Path(__file__).parent / "planner_h200_runs.json").read_text())["results"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['world_size']}-{run['peak_mib']}")
def test_planned_peaks_are_within_a_tenth_of_those_measured_on_h200s(tmp_path: Path, run: dict) -> None:
    """Rows of tools/bench_train.py, of models, ZeRO stages, batches and offload as different as they come."""
    ranks = run["world_size"]
    plan = plan_memory(workload(tmp_path, ranks, run["model"], settings=run["ds_config"]), describe(gpus=ranks))
    assert plan.gpu_peak / MIB == pytest.approx(run["peak_mib"], rel=0.1), plan.peak_phase


def is_suspect(run: dict) -> bool:
    """ViT-B/32 at ZeRO-2, B = 65,536: its 15.2 s are a quarter more than four times the 3.0 s of B = 16,384."""
    return run["step_s"] == 15.23


@pytest.mark.parametrize(
    "run",
    [run for run in RUNS if run["step_s"] and not is_suspect(run)],
    ids=lambda run: f"{run['model']}-{run['world_size']}-{run['step_s']}",
)
def test_planned_steps_take_about_what_was_measured_on_h200s(tmp_path: Path, run: dict) -> None:
    """Synthetic samples, which are not decoded: so many workers that decoding does not count."""
    ranks = run["world_size"]
    job = replace(workload(tmp_path, ranks, run["model"], settings=run["ds_config"]), workers=1000)
    offloads = "offload_param" in run["ds_config"]["zero_optimization"]
    planned = plan_time(job, describe(gpus=ranks)).total
    assert planned == pytest.approx(run["step_s"], rel=0.22 if offloads else 0.1)


def test_each_tower_works_at_its_own_rate(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1)
    rates = replace(H200.rates, image_flops=1e14, text_flops=1e13)
    image, text = image_tower(job.model).forward_operations(), text_tower(job.model).forward_operations()
    step = plan_time(job, describe(gpus=1, rates=rates))
    assert step.towers == pytest.approx(4 * 4096 * (image / 1e14 + text / 1e13))
    assert peer_step_seconds(job, describe(gpus=1, rates=rates), OPEN_CLIP_ACCUMULATING) == pytest.approx(
        step.towers / 0.64, rel=0.01
    )


# arXiv:2410.17243, Table 1, loss memory in GB: ranks, contrastive batch in units of 1,024 -> open_clip, Inf-CL.
PUBLISHED_GB = {
    (8, 32): (2.27, 0.18),
    (8, 64): (8.63, 0.36),
    (8, 128): (33.64, 0.72),
    (8, 256): (None, 1.45),
    (32, 128): (8.98, 0.18),
    (32, 256): (34.35, 0.35),
    (32, 1024): (None, 1.44),
}


def test_the_published_loss_memory_of_inf_cl_follows_from_its_formula() -> None:
    for (ranks, batch), (open_clip, inf_cl) in PUBLISHED_GB.items():
        sizes = LossSizes(batch * 1024 // ranks, 768, ranks, feature_bytes=4)
        # The paper's GB are 1,000 MiB: its column of OpenCLIP says so to four digits.
        assert inf_cl_loss_bytes(sizes) / (1000 * MIB) == pytest.approx(inf_cl, abs=0.0101)
        if open_clip is not None:
            assert open_clip_loss_bytes(sizes) / (1000 * MIB) == pytest.approx(open_clip, rel=0.003)
        ours = megaclip_loss_bytes(replace(sizes, feature_bytes=2), "ring", "feature", 128)
        assert ours < inf_cl_loss_bytes(sizes)


def test_peers_take_what_was_published_and_measured(tmp_path: Path) -> None:
    accumulating = {"train_micro_batch_size_per_gpu": 128}
    job = workload(tmp_path, 8, "ViT-L-14", **accumulating)
    for batch, peak in ((32, 44.20), (64, 46.63), (128, 51.46), (256, 61.13)):  # Table 1 again, in brackets
        planned = peer_gpu_bytes(replace(job, local_batch=batch * 128), INF_CL)
        assert planned / (1000 * MIB) == pytest.approx(peak, rel=0.01)
    # open_clip with --accum-freq, pure bf16, in the runs of planner_h200_runs.json.
    for model, batch, chunk, peak in (("ViT-B-16", 4096, 512, 39120), ("ViT-B-32", 16384, 1024, 37761)):
        job = workload(tmp_path, 1, model, train_batch_size=batch, train_micro_batch_size_per_gpu=chunk)
        planned = peer_gpu_bytes(job, OPEN_CLIP_ACCUMULATING, autocast=False)
        assert planned / MIB == pytest.approx(peak, rel=0.03)


def workload(
    tmp_path: Path, ranks: int = 8, model: str = "ViT-B-32", settings: dict | None = None, **changes
) -> Workload:
    """bf16, ZeRO-2 with float32 accumulation, eight chunks of 512 on each rank; `changes` to ds_config.json."""
    settings = settings or {
        "train_batch_size": 4096 * ranks,
        "train_micro_batch_size_per_gpu": 512,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 2},
        **changes,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    return Workload.of(load_model_config(model), load_training_config(path), ranks)


def of_batch(job: Workload, global_batch: int) -> Workload:
    """The same with another contrastive batch, of whole chunks."""
    return replace(job, local_batch=global_batch // job.world_size)


def test_states_are_zeros_arithmetic(tmp_path: Path) -> None:
    parameters = 151_277_312  # open_clip's ViT-B-32 without its logit scale (PLATFORM: 151,277,313)
    per_stage = {
        # working copy, master, two moments; at stage 3 also float32 gradients and the bucket, all the time
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


def test_offload_moves_states_to_the_host(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    plan = plan_memory(workload(tmp_path, zero_optimization=zero), H200)
    assert not {"parameters", "master parameters", "optimizer states"} & plan.gpu_states.keys()
    assert plan.cpu["optimizer states"] == pytest.approx(8 * 151_277_312)  # all eight ranks of the host
    assert "activations" in plan.gpu_phases[plan.peak_phase]


@pytest.mark.parametrize(
    ("stage", "accumulate", "on_gpu", "in_host_memory"),
    # Bytes per parameter after two backward passes on one rank: seen in DeepSpeed 0.19's optimizer.
    [(1, "bf16", 2, 0), (1, "fp32", 4, 0), (2, "bf16", 0, 2), (2, "fp32", 4, 0)],
)
def test_gradients_accumulate_where_deepspeed_keeps_them_with_offload(
    tmp_path: Path, stage: int, accumulate: str, on_gpu: int, in_host_memory: int
) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    job = workload(tmp_path, ranks=1, zero_optimization=zero, data_types={"grad_accum_dtype": accumulate})
    plan = plan_memory(job, describe(gpus=1))
    assert plan.gpu_phases["text tower backward"].get("gradients", 0) == on_gpu * job.trained
    waiting = 2 if stage == 1 and accumulate == "bf16" else in_host_memory  # made for the last reduction
    assert plan.cpu["gradients"] == (4 + waiting) * job.trained  # and float32 for the step


def test_offload_to_disk_is_planned_there_and_charged(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 1_000_000}}
    job = replace(workload(tmp_path, zero_optimization=zero), data_offload="cpu")
    parameters = 151_277_312  # of eight ranks, which share a host and its disk
    plan = plan_memory(job, H200)
    assert plan.nvme["master parameters"] + plan.nvme["gradients"] == pytest.approx((4 + 4) * parameters)
    assert plan.nvme["optimizer states"] == pytest.approx(8 * parameters)
    assert plan.nvme["parameters"] == pytest.approx(2 * (parameters - 8 * 1_000_000))
    assert plan.cpu["parameters"] == pytest.approx(2 * 8 * 1_000_000)
    assert plan.cpu["gradients"] == pytest.approx(4 * parameters)  # that accumulate
    assert plan.cpu["parameter buffers"] == 8 * 5 * 100_000_000 * 2  # DeepSpeed's defaults
    assert plan.cpu["optimizer buffers"] == pytest.approx(4 * parameters * 4)
    # Gradients, master, moments: written and read; parameters: read in 24 passes and 2 of company, written once.
    passes = 3 * 8 + 2
    copied = 2 * 16 * parameters + (passes + 1) * plan.nvme["parameters"]
    rates = replace(H200.rates, disk_write=1e9, decoded=1e9)
    step = plan_time(job, describe(gpus=8, rates=rates))
    assert step.swap == pytest.approx(copied / 1e9) and step.total > step.swap + step.towers
    # The disk at nvme_path counts where it is another one, and not where there is none.
    full = replace(H200, nvme=1e9)
    assert any("of disk at nvme_path and has" in text for text in plan_memory(job, full).refusals)
    assert not plan_memory(job, replace(H200, nvme=1e12, disk=0)).refusals
    assert any("of disk and has" in text for text in plan_memory(job, replace(H200, disk=1e9)).refusals)


def test_an_evaluation_is_planned_beside_the_steps(tmp_path: Path) -> None:
    job = workload(tmp_path)
    dropping = job.model.replace(vision_cfg={"patch_dropout": 0.5})
    million = replace(job, model=dropping, evaluation=EvaluationSets(64, pairs=2**20, labelled=50_000))
    plain, plan = plan_memory(replace(job, model=dropping), H200), plan_memory(million, H200)
    # Features and their copy without padding: float32, both towers, an eighth of the pairs.
    features = 2 * 4 * 512 * 2**20 / 8
    assert plan.gpu_phases["evaluation: retrieval"]["copies of features"] == 1.5 * features
    towers = plan.gpu_phases["evaluation: towers"]
    assert towers["features"] == features
    whole_images = image_tower(job.model).forward_peak(64, 2) + 64 * 3 * 224 * 224
    assert towers["activations"] == max(whole_images, text_tower(job.model).forward_peak(256, 2))
    assert plan.cpu["processes"] - plain.cpu["processes"] == 8 * job.workers * 0.25 * GIB
    chunk = 64 * (3 * 224 * 224 + 8 * 77 + 8)
    assert plan.cpu["loader's chunks"] - plain.cpu["loader's chunks"] == 8 * (2 * job.workers + 1) * chunk
    labelled = replace(job, evaluation=EvaluationSets(64, labelled=50_000))
    assert "evaluation: retrieval" not in plan_memory(labelled, H200).gpu_phases
    assert advice(replace(job, evaluation=EvaluationSets(64, pairs=2**32)), H200) == []


class _PeakBytes(TorchDispatchMode):
    """The most that tensors made under it took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[int, int]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))
        return made


def test_retrieval_takes_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, rows = 4096, 512
    dimensions = workload(tmp_path).model.embed_dim

    def encode(images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(len(images), dimensions), torch.randn(len(tokens), dimensions)

    batches = (
        Batch(torch.zeros(rows, 1), torch.zeros(rows, 1), torch.arange(start, start + rows))
        for start in range(0, pairs, rows)
    )
    monkeypatch.setattr(suite, "retrieval", partial(suite.retrieval, tile_budget_mib=2))
    with _PeakBytes() as measured:
        evaluate(encode, tokenizer=list, pairs=batches)
    job = replace(workload(tmp_path, ranks=1), evaluation=EvaluationSets(rows, pairs))
    monkeypatch.setattr(memory, "EVALUATION_TILES", 2 * MIB)
    planned = plan_memory(job, H200).gpu_phases["evaluation: retrieval"]
    assert sum(planned.values()) == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.parametrize("loss", GLOBAL_LOSSES)
def test_state_of_every_sample_is_what_the_loss_allocates(tmp_path: Path, loss: str) -> None:
    on_a_host = FastClipLoss(loss, samples=8000).state.values.untyped_storage().nbytes()
    for device, state_on_host, state_on_gpu in (("cpu", on_a_host, 0), ("accelerator", 0, on_a_host / 8)):
        job = workload(tmp_path, megaclip={"loss": loss, "fastclip": {"state_device": device}})
        plan = plan_memory(replace(job, samples=8000), H200)
        assert plan.cpu.get("per-sample state", 0) == state_on_host
        assert plan.cpu["its copy in a checkpoint"] == on_a_host
        assert plan.gpu_states.get("per-sample state", 0) == state_on_gpu


def test_coalesced_bf16_gradients_have_float32_sums_unless_told_otherwise(tmp_path: Path) -> None:
    section = {"coalesce_gradient_reduction": True}
    for dtypes, bytes_each in (({}, 4), ({"grad_accum_dtype": "bf16"}, 0)):
        job = workload(tmp_path, megaclip=section, data_types=dtypes)
        phases = plan_memory(job, H200).gpu_phases
        assert phases["text tower backward"].get("gradient sums", 0) == bytes_each * job.trained
        assert phases["image tower backward"].get("gradient sums", 0) == bytes_each * job.parameters[0].trained


def test_only_the_loss_and_the_embeddings_grow_with_the_batch(tmp_path: Path) -> None:
    small = workload(tmp_path, ranks=1)
    large = of_batch(small, 1_048_576)
    phases = [plan_memory(each, H200).gpu_phases for each in (small, large)]
    changed = {name for name in phases[0] if phases[0][name] != phases[1][name]}
    assert changed == {
        "loss",
        *(f"{tower} tower {way}" for tower in ("image", "text") for way in ("forward", "backward")),
    }
    for name in changed - {"loss"}:
        parts = {part for part in phases[0][name] if phases[0][name][part] != phases[1][name][part]}
        assert parts == {"embeddings"} or parts == {"embedding gradients"}
    growth = plan_memory(large, H200).gpu_peak - plan_memory(small, H200).gpu_peak
    assert 0 < growth < 2 * 4 * 2 * 512 * 1_048_576  # less than float32 embeddings and gradients of both towers


def test_auto_gathers_on_one_host_while_that_is_small_and_keeps_large_embeddings_on_the_host(tmp_path: Path) -> None:
    job = workload(tmp_path)
    assert (settled(job, H200).exchange, settled(job, H200).embeddings_offload) == ("all_gather", False)
    assert settled(job, describe(gpus=8, hosts=2)).exchange == "ring"
    huge = settled(of_batch(job, 2**25), H200)
    assert (huge.exchange, huge.embeddings_offload) == ("ring", True)
    assert settled(replace(job, exchange="all_gather"), describe(gpus=8, hosts=2)).exchange == "all_gather"


def test_the_largest_batch_fits_and_a_larger_one_does_not(tmp_path: Path) -> None:
    job = replace(workload(tmp_path), data_offload="cpu")
    host = describe(gpu="h200", gpus=8, host_memory="200GiB")
    largest = largest_batch(job, host)
    assert fits(of_batch(job, largest), host)
    assert not fits(replace(job, local_batch=int(largest / 8 * 1.02) // 512 * 512), host)
    assert largest_batch(replace(job, data_offload="reread"), host) > largest
    assert largest_batch(job, describe(gpu="h200", gpus=8, gpu_memory="4GiB")) == 0


@pytest.mark.parametrize("refused", ["gpu", "host", "disk"])
def test_a_run_that_cannot_fit_is_told_what_to_change(tmp_path: Path, refused: str) -> None:
    job = workload(tmp_path, model="ViT-L-14")
    if refused == "gpu":
        cluster, expected = describe(gpu="h200", gpus=8, gpu_memory="40GiB"), '"train_micro_batch_size_per_gpu": 128'
    elif refused == "host":
        job = replace(job, data_offload="cpu", local_batch=2**20)
        cluster, expected = describe(gpu="h200", gpus=8, host_memory="400GiB"), '"data_offload": "disk"'
    else:
        job = replace(job, data_offload="disk", local_batch=2**20)
        cluster, expected = describe(gpu="h200", gpus=8, disk="100GiB"), '"data_offload": "reread"'
    plan = plan_memory(job, cluster)
    assert any({"gpu": "a GPU", "host": "of memory", "disk": "of disk"}[refused] in text for text in plan.refusals)
    assert any(expected in words for words in advice(job, cluster)), advice(job, cluster)


def test_each_piece_of_advice_written_into_the_file_makes_the_run_fit(tmp_path: Path) -> None:
    """The text tower's chunks, which the file sets, are the peak; half of the images' would change nothing."""
    cluster = describe(gpus=1, gpu_memory="24GB", host_memory="64GB")
    settings = json.loads((Path(__file__).parents[2] / "ds_configs" / "huge_batch.json").read_text())
    words = advice(workload(tmp_path, 1, settings=settings), cluster)
    assert any("text_micro_batch_size" in change for change in words)
    for change in words:
        changed = dict(settings)
        for key, value in json.loads("{" + change + "}").items():
            changed[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
        assert fits(workload(tmp_path, 1, settings=changed), cluster), change


def test_changes_are_combined_where_none_is_enough_alone(tmp_path: Path) -> None:
    job = workload(tmp_path, model="ViT-bigG-14", train_micro_batch_size_per_gpu=512)
    (together,) = advice(job, describe(gpu="h200", gpus=8, gpu_memory="11GiB"))
    assert " and " in together
    assert advice(job, describe(gpu="h200", gpus=8, gpu_memory="3GiB")) == []
    assert "--eval-batch-size" in last_resort(replace(job, evaluation=EvaluationSets(4096, pairs=1)))


def test_time_has_one_more_forward_with_the_cache_and_the_loss_wins_at_a_huge_batch(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, ranks=1), workers=32, data_offload="cpu")
    step, plain = plan_time(job, H200), plan_time(of_batch(job, 512), H200)
    assert step.towers / job.local_batch == pytest.approx(4 / 3 * plain.towers / 512)
    assert step.dominant == "towers" and plan_time(of_batch(job, 2**27), H200).dominant == "loss"
    locked = plan_time(replace(job, image_unlocked=0), H200)
    forward = 4096 * image_tower(job.model).forward_operations() / H200.rates.image_flops
    assert locked.towers == pytest.approx(step.towers - 3 * forward)


def test_zero_3_gathers_a_frozen_tower_once_per_chunk(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, zero_optimization={"stage": 3}), text_micro_batch=256)
    image, text = (tower.total for tower in job.parameters)
    share = 2 * 7 / 8  # bytes of bfloat16; seven of eight ranks' parts arrive
    chunks = {"image": 4096 // 512, "text": 4096 // 256}
    trained = (3 + 1) * (image * chunks["image"] + text * chunks["text"])  # three passes, and gradients
    trained += (2 + 1) * text  # goes along through the first backward pass
    assert parameter_traffic(job) == pytest.approx(share * trained)
    frozen = image * chunks["image"] + (3 + 1) * text * chunks["text"]
    assert parameter_traffic(replace(job, image_unlocked=0)) == pytest.approx(share * frozen)


@pytest.mark.parametrize("coalesce", [False, True], ids=["", "coalesced"])
@pytest.mark.parametrize(("stage", "accumulate"), [(1, "bf16"), (2, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_offload_moves_what_deepspeed_copies(tmp_path: Path, stage: int, accumulate: str, coalesce: bool) -> None:
    """Copy by copy, in bytes of a whole model, over the passes of a gradient cache of 2 image and 4 text chunks."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    types = {} if accumulate == "bf16" else {"grad_accum_dtype": "fp32"}
    section = {"coalesce_gradient_reduction": coalesce}
    job = workload(tmp_path, zero_optimization=zero, data_types=types, megaclip=section)
    job = replace(job, local_batch=1024, text_micro_batch=256)
    image, text = (tower.total for tower in job.parameters)
    both, copied, wide = image + text, 0, 4 if accumulate == "fp32" else 2
    backward = [image, image, text, text, text, text]
    if not coalesce:
        backward[0] = backward[-1] = both  # so that all take part in the first and the last
    if stage == 3:
        copied += 2 * (sum([image, image, text, text, text, text]) + 2 * sum(backward))  # parameters up
        for pass_ in [both] if coalesce else backward:
            copied += 2 * wide * pass_  # down to be kept, and up, or up to be added to, and down
    else:
        copied += 2 * both  # the new working copy goes up
        if stage == 1 or (coalesce and accumulate == "bf16"):
            copied += 2 * 2 * both
        elif accumulate == "bf16":
            copied += 2 * backward[0]  # kept
            copied += sum(2 * 2 * pass_ for pass_ in backward[1:])  # added to
    copied += 4 * both  # float32, for the step
    assert offload_traffic(job) == pytest.approx(copied / 8)
    rates = replace(H200.rates, host_to_device=1e9, decoded=1e9)
    step, faster = (plan_time(job, describe(gpus=8, rates=each)) for each in (rates, H200.rates))
    assert step.offload == pytest.approx(copied / 8 / 1e9) and step.total - faster.total > 0.9 * step.offload
    assert plan_time(job, describe(gpu="cpu", gpus=8)).offload == 0


@pytest.mark.parametrize(
    ("settings", "megabytes"),
    [  # measured by tools/bench_comm.py on four H200s (docs/performance.md), bfloat16 features
        ({"exchange": "ring", "reduction": "feature"}, 58.9),
        ({"exchange": "ring", "reduction": "scalar"}, 37.9),
        ({"exchange": "all_gather", "reduction": "feature"}, 37.9),
        ({"exchange": "all_gather", "reduction": "scalar"}, 25.3),
        ({"exchange": "all_gather", "reduction": "feature", "loss": "fastclip_v3"}, 38.0),
        ({"exchange": "all_gather", "reduction": "feature", "loss": "fastclip_v2"}, 38.2),
        # float32 training: all but the scalars is 4 bytes instead of 2, or, with a payload, 2 again
        ({"exchange": "all_gather", "reduction": "scalar", "float32": True}, 50.5),
        ({"exchange": "all_gather", "reduction": "feature", "float32": True, "payload": "bf16"}, 25.3),
    ],
    ids=str,
)
def test_features_between_ranks_are_what_was_measured(tmp_path: Path, settings: dict, megabytes: float) -> None:
    section = dict(settings)
    changes = {"bf16": {"enabled": False}, "data_types": {}} if section.pop("float32", False) else {}
    job = workload(tmp_path, ranks=4, megaclip=section, **changes)
    rates = replace(H200.rates, link=1e6)
    assert plan_time(job, describe(gpus=4, rates=rates)).features == pytest.approx(megabytes, abs=0.06)


def test_a_ring_hides_behind_the_loss_between_hosts_only(tmp_path: Path) -> None:
    ring = replace(workload(tmp_path), exchange="ring")
    slow = {"link": "1GB", "network": "1GB", "rates": replace(H200.rates, decoded=1e9)}
    inside, between = (plan_time(ring, describe(gpus=8 // hosts, hosts=hosts, **slow)) for hosts in (1, 2))
    assert inside.features == between.features > inside.loss > 0
    assert inside.total == pytest.approx(between.total + inside.loss)
    gathering = plan_time(replace(ring, exchange="all_gather"), describe(gpus=4, hosts=2, **slow))
    assert not gathering.features_hidden and plan_time(ring, describe(gpu="cpu", gpus=8)).features_hidden


def test_a_step_store_on_disk_is_written_once_and_read_twice(tmp_path: Path) -> None:
    job = replace(workload(tmp_path), data_offload="disk")
    rates = replace(H200.rates, disk_write=1e9, decoded=1e9)
    pixels = 8 * 4096 * 3 * 224 * 224  # of all ranks of the host
    slow = plan_time(job, describe(gpus=8, rates=rates))
    assert slow.disk == pytest.approx(3 * pixels / 1e9) and slow.dominant == "data"
    assert slow.towers < slow.disk < slow.total < slow.disk + slow.towers  # the towers wait for it
    assert plan_time(replace(job, image_unlocked=0), describe(gpus=8, rates=rates)).disk == pytest.approx(
        2 / 3 * slow.disk
    )
    # Hidden on GPUs, not on CPUs, where nothing reads ahead.
    for gpu, added in (("h200", 0), ("cpu", 1)):
        fast = describe(gpu=gpu, gpus=8, rates=replace(rates, disk_write=1e12))
        step, in_memory = plan_time(job, fast), plan_time(replace(job, data_offload="cpu"), fast)
        assert 0 < step.disk < step.towers and in_memory.disk == 0
        assert step.total == pytest.approx(in_memory.total + added * step.disk, rel=1e-9)
    # "auto" goes to the disk where host memory ends, and is charged for it.
    auto = replace(job, data_offload="auto")
    assert plan_time(auto, describe(gpus=8, rates=rates)).disk == 0
    assert plan_time(auto, describe(gpus=8, rates=rates, host_memory="60GiB")).disk == slow.disk


def test_a_tower_runs_twice_and_images_are_kept_exactly_where_the_run_does_so(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1)
    outcomes = set()
    for image_unlocked, text_unlocked in itertools.product((None, 0, 1), repeat=2):
        with torch.device("meta"):
            model = build_model(job.model)
        if image_unlocked is not None:
            model.lock_image_tower(image_unlocked)
        if text_unlocked is not None:
            model.lock_text_tower(text_unlocked)
        trained = trained_towers(model)
        for image_chunks, text_chunks in itertools.product((1, 4), repeat=2):
            planned = replace(
                job,
                image_unlocked=image_unlocked,
                text_unlocked=text_unlocked,
                local_batch=64,
                image_micro_batch=64 // image_chunks,
                text_micro_batch=64 // text_chunks,
            )
            once = keeps_graph(trained, {Tower.IMAGE: image_chunks, Tower.TEXT: text_chunks})
            assert planned.cached != once
            assert planned.reads_images_twice == (not once and Tower.IMAGE in trained)
            phases = plan_memory(planned, H200).gpu_phases
            assert {name for name in phases if name.endswith("tower backward")} == {
                f"{tower.name.lower()} tower backward" for tower in trained
            }
            outcomes.add((len(trained), once))
    assert outcomes == {(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)}


def test_a_frozen_tower_in_chunks_keeps_no_graph(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, ranks=1), local_batch=512, text_micro_batch=128)
    cached, kept = plan_memory(job, H200), plan_memory(replace(job, text_unlocked=0), H200)
    both = plan_memory(replace(job, text_micro_batch=512), H200)
    assert (cached.data_store, kept.data_store, both.data_store) == ("cpu", "once", "once")
    image, text = image_tower(job.model), text_tower(job.model)
    pixels = 512 * image.input_numbers * 2
    assert kept.gpu_phases["loss"]["activations"] == image.saved_bytes(512, 2) + pixels
    assert both.gpu_phases["loss"]["activations"] == image.saved_bytes(512, 2) + text.saved_bytes(512, 2) + pixels
    assert kept.gpu_phases["text tower forward"]["activations"] == text.forward_peak(128, 2)
    # Asked for by name, host memory or disk hold the step's images even if they pass by once.
    asked = plan_memory(replace(job, text_unlocked=0, data_offload="cpu"), H200)
    assert asked.data_store == "cpu" and asked.cpu["step store"] == 8 * 512 * image.input_bytes


def test_zero_3_keeps_a_tower_whole_as_far_as_half_the_reuse_distance(tmp_path: Path) -> None:
    """Between the two passes a parameter waits for all that lie behind it twice: there, and back."""
    for reuse, kept in ((10_000_000, 5_000_000 + 1_000_000), (10**9, 87_849_216)):  # or all of ViT-B-32's image tower
        zero = {"stage": 3, "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 1_000_000}
        phases = plan_memory(workload(tmp_path, zero_optimization=zero), H200).gpu_phases
        assert phases["image tower forward"]["gathered parameters"] == pytest.approx(2 * kept, rel=0.01)


def test_the_image_towers_graph_waits_while_the_text_tower_is_back_propagated(tmp_path: Path) -> None:
    job = replace(workload(tmp_path), local_batch=512)
    whole, frozen = (plan_memory(each, H200).gpu_phases for each in (job, replace(job, image_unlocked=0)))
    waiting = [whole[name]["activations"] - frozen[name]["activations"] for name in ("loss", "text tower backward")]
    assert waiting[0] == waiting[1] > 512 * 12 * 50 * 768 * 2  # at least every block's input, 50 tokens of 768 in bf16


def test_embeddings_and_their_gradients_wait_in_host_memory_where_they_are_offloaded(tmp_path: Path) -> None:
    on_gpu, on_host = (
        plan_memory(workload(tmp_path, ranks=16, megaclip={"embeddings_offload": where}), describe(gpus=8, hosts=2))
        for where in (False, True)
    )
    assert "embeddings" not in on_gpu.cpu
    assert on_host.cpu["embeddings"] == 8 * 2 * 2 * 4096 * 512 * 2  # ranks, towers, gradients too, (b, D), bf16


def test_sizes_and_rates_are_read_or_refused(tmp_path: Path) -> None:
    assert parse_size("80GiB") == 80 * GIB and parse_size("141 GB") == 141e9 and parse_size("512") == 512
    for wrong in ("", "GiB", "80 apples", "1.2.3GB"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_size(wrong)
    with pytest.raises(ConfigError, match="unknown GPU"):
        describe(gpu="h2000")
    path = tmp_path / "rates.json"
    path.write_text(rates_json("a machine", asdict(H200.rates)))
    cpu = describe(gpu="cpu").rates
    assert Rates.read(path, cpu) == H200.rates
    one_rank = {name: rate for name, rate in asdict(H200.rates).items() if name not in ("link", "network")}
    path.write_text(rates_json("a machine", one_rank))
    assert Rates.read(path, cpu) == replace(H200.rates, link=cpu.link, network=cpu.network)
    for wrong in ("{}", rates_json("a machine", {"link": 1.0})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="--calibrate"):
            Rates.read(path, cpu)


def test_only_ranks_that_have_others_measure_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "seconds", lambda run: [2.0])
    monkeypatch.setattr(rates, "_WRITTEN_BYTES", 2**22)
    measured = rates.measure_rates(load_model_config("ViT-B-32"), 2, tmp_path)
    assert set(measured) == {field.name for field in fields(Rates)} - {"link", "network"}
