"""The planner's step times: terms, overlap, bytes to ranks and disk, and the rates."""

import json
import math
import statistics
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megaclip.errors import ConfigError
from megaclip.models import load_model_config
from megaclip.planner import describe, plan_memory, plan_time
from megaclip.planner.cluster import Rates, parse_size
from megaclip.planner.report import data_text, time_table
from megaclip.planner.text_chunks import assumed_length, planned_pieces
from megaclip.planner.towers import tower_work
from tests.unit.planner.planner_cases import GIB, H200, of_batch, workload


def test_towers_run_twice_with_the_cache_and_forward_again_with_checkpointing(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1, megaclip={"cut_captions": False})
    image, text = (work.seconds(H200) for work in tower_work(job))
    forward, backward = image.forward + text.forward, image.backward + text.backward
    one = describe(gpus=1)
    step = plan_time(job, one)
    assert step.towers == pytest.approx(4096 * (2 * forward + backward))
    assert plan_time(replace(job, checkpointing="gpu"), one).towers == pytest.approx(4096 * (3 * forward + backward))
    assert plan_time(of_batch(job, 512), one).towers == pytest.approx(512 * (forward + backward))
    locked = plan_time(replace(job, image_unlocked=0), one)
    assert locked.towers == pytest.approx(4096 * (2 * forward + backward - image.forward - image.backward))
    cached = plan_time(replace(job, image_unlocked=0, cached_images=True), one)
    assert cached.towers == pytest.approx(4096 * (2 * text.forward + text.backward))
    assert cached.decoding < locked.decoding / 50 and cached.copies == pytest.approx(locked.copies * 2 * 512 / 150_528)


def test_the_loss_dominates_at_a_huge_batch(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, ranks=1, megaclip={"data_offload": "cpu"}), workers=32)
    assert plan_time(job, H200).dominant == "towers" and plan_time(of_batch(job, 2**27), H200).dominant == "loss"


def test_without_loader_processes_decoding_takes_time_of_the_step(tmp_path: Path) -> None:
    """Without a loader process, nothing decodes samples while the step runs."""
    cluster = describe(gpus=1)
    job = workload(tmp_path, ranks=1, megaclip={"data_offload": "cpu"})
    alone, one, many = (plan_time(replace(job, workers=workers), cluster) for workers in (0, 1, 10**6))
    seconds = job.local_batch / cluster.rates.decoded
    assert alone.decoding == one.decoding == seconds
    assert alone.total == pytest.approx(many.total + seconds) and one.total == max(many.total, seconds)
    assert "decoding " in time_table(alone, cluster) and "other processes" not in time_table(alone, cluster)
    assert "decoding (other processes)" in time_table(one, cluster)


def test_a_step_is_bound_by_the_cores_and_the_measured_rate_of_the_loader(tmp_path: Path) -> None:
    """Eight ranks with 16 loader processes each on 32 cores: four cores per rank."""
    job = replace(workload(tmp_path, ranks=8, megaclip={"data_offload": "cpu"}), workers=16)
    described = describe(gpus=8)
    cluster = replace(described, cores=32, rates=replace(described.rates, decoded=100.0))
    step = plan_time(job, cluster)
    assert step.samples_per_s_of_data == pytest.approx(32 * 100) and step.dominant == "data"
    needed = math.ceil(plan_time(job, replace(described, cores=10**9)).samples_per_s_without_data / 8 / 100)
    assert data_text(step, job, cluster) == (
        "bound by data above 3,200 samples/s: 100 per second and core, 4 cores per GPU; "
        f"{needed} per GPU would keep up with the rest of the step"
    )
    enough = plan_time(replace(job, workers=needed), replace(cluster, cores=8 * needed))
    assert enough.total == pytest.approx(job.batch.global_batch / enough.samples_per_s_without_data)


@pytest.mark.parametrize(
    ("model", "ranks", "measured_ms"),
    [("ViT-B-16", 1, 6.0), ("ViT-B-16", 2, 3.6), ("ViT-B-32", 2, 4.8), ("ViT-L-14", 2, 6.4)],
)
def test_the_grouped_update_takes_about_what_was_measured_on_h200s(
    tmp_path: Path, model: str, ranks: int, measured_ms: float
) -> None:
    planned = plan_time(workload(tmp_path, ranks, model), describe(gpus=ranks)).update
    assert 1e3 * planned == pytest.approx(measured_ms, rel=0.25)


def test_the_update_takes_launches_and_bytes_for_a_ranks_parameters(tmp_path: Path) -> None:
    job = workload(tmp_path, 1, "ViT-B-16")
    tensors, parameters = sum(len(tower.trainable) for tower in job.parameters), job.trained
    assert tensors == 397
    machines = {ranks: describe(gpus=ranks, rates=replace(H200.rates, memory=1e12)) for ranks in (1, 8)}
    for stage, ranks, launches, moved in ((1, 8, 2.1e-3, 56), (2, 1, 2.1e-3, 56), (3, 8, tensors * 0.11e-3, 104)):
        job = workload(tmp_path, ranks, "ViT-B-16", zero_optimization={"stage": stage}, data_types={})
        expected = launches + parameters / ranks * moved / 1e12
        assert plan_time(job, machines[ranks]).update == pytest.approx(expected)
    offloads = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    offloading = workload(tmp_path, 8, "ViT-B-16", zero_optimization=offloads)
    assert plan_time(offloading, H200).update == pytest.approx(parameters / 8 * 28 / 32e9)


def test_a_tower_waits_for_the_hooks_of_zero_3_that_take_longer(tmp_path: Path) -> None:
    """Two forward passes and a backward pass of 8 chunks call the hooks of 24 image blocks and 12 text blocks."""
    job = workload(tmp_path, 1, "ViT-L-14", zero_optimization={"stage": 3}).with_batch(text_micro_batch=512)
    step = plan_time(job, describe(gpus=1))
    image, text = (work.seconds(H200) for work in tower_work(job))
    images, texts = (4096 * (2 * seconds.forward + seconds.backward) for seconds in (image, text))
    image_hooks, text_hooks = 8 * 3 * 24 * 3.85e-3, 8 * 3 * 12 * 3.85e-3
    assert images > image_hooks and texts < text_hooks
    assert step.host == pytest.approx(image_hooks + text_hooks)
    assert step.host_wait == pytest.approx(text_hooks - texts)
    assert step.total == pytest.approx(step.towers + step.host_wait + step.loss + step.update)


def test_cut_captions_save_the_text_towers_time_and_no_planned_memory(tmp_path: Path) -> None:
    """The eight chunks of the assumed captions are cut at 77, 32, 32, 32, 24, 24, 16 and 16 tokens."""
    job = workload(tmp_path, ranks=1)
    padded = job.with_megaclip(cut_captions=False)
    half = replace(job, text_positions_saved=0.5)
    last = replace(job, model=job.model.replace(text_cfg={"pool_type": "last"}))
    one_chunk = job.with_batch(text_micro_batch=4096)  # in pieces cut at 77, 32, 32 and 24 tokens
    tokens = [each.text_positions for each in (job, padded, half, last, one_chunk)]
    assert tokens == [(77 + 3 * 32 + 2 * 24 + 2 * 16) / 8, 77, 77 / 2, 77, 77 / 8 + 32 / 8 + 32 / 4 + 24 / 2]
    assert replace(half, megaclip=padded.megaclip).text_positions == 77
    _, text = tower_work(job)
    assert text.passes[0].attention == text.costs.forward.attention  # cut or not, a caption is one tile
    seconds = [plan_time(each, describe(gpus=1)).towers for each in (job, padded, half, last)]
    assert seconds[0] < seconds[2] < 0.95 * seconds[1] and seconds[3] == pytest.approx(seconds[1], rel=0.005)
    for other in (half, padded):
        assert plan_memory(other, H200).gpu_phases == plan_memory(job, H200).gpu_phases


def test_the_assumed_captions_have_8_to_32_tokens_with_a_tail_to_77() -> None:
    lengths = [assumed_length((row + 0.5) / 9000) for row in range(9000)]
    counts = Counter(lengths)
    assert [counts[length] for length in range(8, 33)] == [324] * 25  # 90 % of 9,000 over 25 lengths
    assert [counts[length] for length in range(33, 78)] == [20] * 45
    assert len(counts) == 25 + 45 and statistics.mean(lengths) == pytest.approx(23.5)


def test_the_shapes_of_many_chunks_are_those_of_sorted_captions() -> None:
    """The expected shapes come from 1,007 chunks of 9 captions, which the test sorts and cuts one by one."""
    lengths = sorted((assumed_length((row + 1) / 9063) for row in range(9063)), reverse=True)
    cut = Counter(min(8 * math.ceil(longest / 8), 77) for longest in lengths[::9])
    planned = planned_pieces(9, 1007, load_model_config("ViT-B-16").text_cfg, tensor_ranks=1)
    assert planned == {((9, length),): count for length, count in cut.items()}


def test_offload_takes_time_on_gpus_only(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    job = workload(tmp_path, zero_optimization=zero)
    rates = replace(H200.rates, host_to_device=1e9, decoded=1e9)
    slow, fast = (plan_time(job, describe(gpus=8, rates=each)) for each in (rates, replace(H200.rates, decoded=1e9)))
    assert slow.offload > fast.offload and slow.total - fast.total > 0.9 * slow.offload
    assert plan_time(job, describe(gpu="cpu", gpus=8)).offload == 0


@pytest.mark.parametrize(
    ("settings", "megabytes"),
    # Measured by tools/bench_comm.py on four H200s (docs/performance.md) with bfloat16 features. At that time InfoNCE
    # sent a dot with every gradient of a feature: 4 bytes per sample and hop, and once more in a ring.
    [
        ({"exchange": "ring", "reduction": "feature"}, 58.9 - 4 * 4096 * 4 / 1e6),
        ({"exchange": "all_gather", "reduction": "scalar"}, 25.3),
        ({"exchange": "all_gather", "reduction": "feature", "loss": "fastclip_v2"}, 38.2),
        # float32 training: all values except the scalars have 4 bytes instead of 2, or 2 with a payload
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
    ring = workload(tmp_path, megaclip={"exchange": "ring", "reduction": "feature"})
    slow = {"link": "1GB", "network": "1GB", "rates": replace(H200.rates, decoded=1e9)}
    inside, between = (plan_time(ring, describe(gpus=8 // hosts, hosts=hosts, **slow)) for hosts in (1, 2))
    assert inside.features == between.features > inside.loss > 0
    assert inside.total == pytest.approx(between.total + inside.loss)
    gathering = plan_time(ring.with_megaclip(exchange="all_gather"), describe(gpus=4, hosts=2, **slow))
    assert not gathering.features_hidden and plan_time(ring, describe(gpu="cpu", gpus=8)).features_hidden


def test_a_step_store_on_disk_is_written_once_and_read_twice(tmp_path: Path) -> None:
    job = workload(tmp_path, megaclip={"data_offload": "disk"})
    rates = replace(H200.rates, disk_write=1e9, decoded=1e9)
    pixels = 8 * 4096 * 3 * 224 * 224  # of all ranks of the host
    slow = plan_time(job, describe(gpus=8, rates=rates))
    assert slow.disk == pytest.approx(3 * pixels / 1e9) and slow.dominant == "data"
    assert slow.towers < slow.disk < slow.total < slow.disk + slow.towers  # the towers wait for the disk
    assert plan_time(replace(job, image_unlocked=0), describe(gpus=8, rates=rates)).disk == pytest.approx(
        2 / 3 * slow.disk
    )
    # Hidden on GPUs, but not on CPUs, where nothing is read ahead.
    for gpu, added in (("h200", 0), ("cpu", 1)):
        fast = describe(gpu=gpu, gpus=8, rates=replace(rates, disk_write=1e12))
        step, in_memory = plan_time(job, fast), plan_time(job.with_megaclip(data_offload="cpu"), fast)
        assert 0 < step.disk < step.towers and in_memory.disk == 0
        assert step.total == pytest.approx(in_memory.total + added * step.disk, rel=1e-9)
    # Without enough host memory "auto" selects the disk, and the plan includes its time.
    auto = job.with_megaclip(data_offload="auto")
    assert plan_time(auto, describe(gpus=8, rates=rates)).disk == 0
    assert plan_time(auto, describe(gpus=8, rates=rates, host_memory="57GiB")).disk == slow.disk


def rates_json(rates: dict[str, float]) -> str:
    return json.dumps({"machine": "a machine", "rates": rates})


def test_sizes_and_rates_are_read_or_refused(tmp_path: Path) -> None:
    assert parse_size("80GiB", "--disk") == 80 * GIB and parse_size("141 GB", "--disk") == 141e9
    assert parse_size("24gb", "--disk") == 24e9 and parse_size("0.5TB/s", "--disk") == 5e11
    # "24" without a unit must not be taken as 24 bytes.
    wrong_sizes = (
        "",
        "GiB",
        "24",
        "24e9",
        "80 apples",
        "1.2.3GB",
        "0GB",
        "-1GB",
        "infGB",
        "\u0663GB",
        "9" * 400 + "TB",
    )
    for wrong in wrong_sizes:
        with pytest.raises(ConfigError, match=r"--gpu-memory .* is not a size with its unit; write for example 80GiB"):
            describe(gpu_memory=wrong)
    with pytest.raises(ConfigError, match="--network '200Gb/s' is a number of bits; write an eighth of it with a B"):
        describe(network="200Gb/s")  # must not be taken as 200 GB/s
    with pytest.raises(ConfigError, match="is unknown"):
        describe(gpu="h2000")
    with pytest.raises(ConfigError, match="--gpu-memory '8GiB' has no effect with --gpu 'cpu'"):
        describe(gpu="cpu", gpu_memory="8GiB")
    path = tmp_path / "rates.json"
    path.write_text(rates_json(asdict(H200.rates)))
    cpu = describe(gpu="cpu").rates
    assert Rates.read(path, cpu) == H200.rates
    one_rank = {name: rate for name, rate in asdict(H200.rates).items() if name not in ("link", "network")}
    path.write_text(rates_json(one_rank))
    assert Rates.read(path, cpu) == replace(H200.rates, link=cpu.link, network=cpu.network)
    for wrong in ("{}", rates_json({"link": 1.0})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"tools/measure_rates\.py"):
            Rates.read(path, cpu)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"product_flops": 0}, r"rates\.json': product_flops is 0\.0; write a number above 0 per second$"),
        ({"memory": -1e12}, "memory is -1000000000000.0; write"),
        ({"decoded": math.nan}, "decoded is nan; write"),
        ({"network": math.inf}, "network is inf; write"),
        ({"netwrok": 5e9}, r"has the unknown rate 'netwrok'; did you mean 'network'\?$"),
        ({"decoded": {}}, "is not a file of tools/measure_rates.py"),
        ({"decoded": 10**400}, "is not a file of tools/measure_rates.py"),
    ],
)
def test_rates_that_no_plan_can_use_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(rates_json(asdict(H200.rates) | change))
    with pytest.raises(ConfigError, match=message):
        Rates.read(path, H200.rates)
