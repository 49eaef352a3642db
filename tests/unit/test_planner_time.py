"""The planner's step times: terms, overlap, bytes to ranks and disk, and the rates."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from megaclip.engine import machine_rates
from megaclip.errors import ConfigError
from megaclip.models import load_model_config
from megaclip.planner import describe, plan_time
from megaclip.planner.cluster import Rates, parse_size, rates_json
from megaclip.planner.towers import image_tower, text_tower
from tests.unit.planner_cases import GIB, H200, of_batch, workload
from tools.bench_peers import OPEN_CLIP_ACCUMULATING, peer_step_seconds


def test_each_tower_works_at_its_own_rate(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1)
    rates = replace(H200.rates, image_flops=1e14, text_flops=1e13)
    image, text = image_tower(job.model).forward_operations(), text_tower(job.model).forward_operations()
    step = plan_time(job, describe(gpus=1, rates=rates))
    assert step.towers == pytest.approx(4 * 4096 * (image / 1e14 + text / 1e13))
    assert peer_step_seconds(job, describe(gpus=1, rates=rates), OPEN_CLIP_ACCUMULATING) == pytest.approx(
        step.towers / 0.64, rel=0.01
    )


def test_time_has_one_more_forward_with_the_cache_and_the_loss_wins_at_a_huge_batch(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, ranks=1, megaclip={"data_offload": "cpu"}), workers=32)
    step, plain = plan_time(job, H200), plan_time(of_batch(job, 512), H200)
    assert step.towers / job.local_batch == pytest.approx(4 / 3 * plain.towers / 512)
    assert step.dominant == "towers" and plan_time(of_batch(job, 2**27), H200).dominant == "loss"
    locked = plan_time(replace(job, image_unlocked=0), H200)
    forward = 4096 * image_tower(job.model).forward_operations() / H200.rates.image_flops
    assert locked.towers == pytest.approx(step.towers - 3 * forward)


def test_offload_takes_time_on_gpus_only(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    job = workload(tmp_path, zero_optimization=zero)
    rates = replace(H200.rates, host_to_device=1e9, decoded=1e9)
    slow, fast = (plan_time(job, describe(gpus=8, rates=each)) for each in (rates, H200.rates))
    assert slow.offload > fast.offload and slow.total - fast.total > 0.9 * slow.offload
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
    assert slow.towers < slow.disk < slow.total < slow.disk + slow.towers  # the towers wait for it
    assert plan_time(replace(job, image_unlocked=0), describe(gpus=8, rates=rates)).disk == pytest.approx(
        2 / 3 * slow.disk
    )
    # Hidden on GPUs, not on CPUs, where nothing reads ahead.
    for gpu, added in (("h200", 0), ("cpu", 1)):
        fast = describe(gpu=gpu, gpus=8, rates=replace(rates, disk_write=1e12))
        step, in_memory = plan_time(job, fast), plan_time(job.with_megaclip(data_offload="cpu"), fast)
        assert 0 < step.disk < step.towers and in_memory.disk == 0
        assert step.total == pytest.approx(in_memory.total + added * step.disk, rel=1e-9)
    # "auto" goes to the disk where host memory ends, and is charged for it.
    auto = job.with_megaclip(data_offload="auto")
    assert plan_time(auto, describe(gpus=8, rates=rates)).disk == 0
    assert plan_time(auto, describe(gpus=8, rates=rates, host_memory="60GiB")).disk == slow.disk


def test_sizes_and_rates_are_read_or_refused(tmp_path: Path) -> None:
    assert parse_size("80GiB") == 80 * GIB and parse_size("141 GB") == 141e9 and parse_size("512") == 512
    for wrong in ("", "GiB", "80 apples", "1.2.3GB"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_size(wrong)
    with pytest.raises(ConfigError, match="is unknown"):
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
    monkeypatch.setattr(machine_rates, "seconds", lambda run: [2.0])
    monkeypatch.setattr(machine_rates, "_WRITTEN_BYTES", 2**22)
    measured = machine_rates.measure_rates(load_model_config("ViT-B-32"), 2, tmp_path)
    assert set(measured) == {field.name for field in fields(Rates)} - {"link", "network"}
