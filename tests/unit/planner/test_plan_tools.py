"""The tools around a plan: the sweep beside other codes, planned beside measured runs, and measured rates."""

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from megaclip.losses.costs import Sizes
from megaclip.models import load_model_config
from megaclip.planner import Rates, describe, plan_time
from megaclip.planner.phases import megaclip_loss_bytes
from tests.unit.planner.planner_cases import MIB, workload
from tools import measure_rates, plan_compare, plan_sweep
from tools.peers import (
    INF_CL,
    OPEN_CLIP_ACCUMULATING,
    PEERS,
    inf_cl_loss_bytes,
    open_clip_loss_bytes,
    peer_gpu_bytes,
    peer_step_seconds,
)

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}
RUNS = Path(__file__).parent / "h200_runs.json"

# tools/bench_loss.py on one and four H200s with bf16 features: MiB in addition to the features.
MEASURED_MIB = {
    (open_clip_loss_bytes, 8192, 512, 1): 528,
    (open_clip_loss_bytes, 32768, 1024, 1): 8320,
    (open_clip_loss_bytes, 32768, 512, 4): 33088,
    (inf_cl_loss_bytes, 8192, 512, 1): 161,
    (inf_cl_loss_bytes, 32768, 1024, 1): 1282,
    (inf_cl_loss_bytes, 32768, 512, 4): 1089,
}


def test_the_losses_of_other_codes_take_the_measured_bytes() -> None:
    for (formula, batch, embedding, ranks), measured in MEASURED_MIB.items():
        options = {"autocast": False} if formula is open_clip_loss_bytes else {}
        assert formula(Sizes(ranks, batch, embedding, feature_bytes=2), **options) / MIB == pytest.approx(
            measured, rel=0.025
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
        sizes = Sizes(ranks, batch * 1024 // ranks, 768, feature_bytes=4)
        # A GB of the paper is 1,000 MiB: its OpenCLIP column agrees with this to four digits.
        assert inf_cl_loss_bytes(sizes) / (1000 * MIB) == pytest.approx(inf_cl, abs=0.0101)
        if open_clip is not None:
            assert open_clip_loss_bytes(sizes) / (1000 * MIB) == pytest.approx(open_clip, rel=0.003)
        ours = megaclip_loss_bytes(replace(sizes, feature_bytes=2), "ring", "feature", 128)
        assert ours < inf_cl_loss_bytes(sizes)


def test_peers_take_the_published_and_measured_bytes(tmp_path: Path) -> None:
    accumulating = {"train_micro_batch_size_per_gpu": 128}
    job = workload(tmp_path, 8, "ViT-L-14", **accumulating)
    for batch, peak in ((32, 44.20), (64, 46.63), (128, 51.46), (256, 61.13)):  # Table 1, in brackets
        planned = peer_gpu_bytes(job.with_batch(batch * 128), INF_CL)
        assert planned / (1000 * MIB) == pytest.approx(peak, rel=0.01)
    # open_clip with --accum-freq, pure bf16, in the runs of h200_runs.json.
    for model, batch, chunk, peak in (("ViT-B-16", 4096, 512, 39120), ("ViT-B-32", 16384, 1024, 37761)):
        job = workload(tmp_path, 1, model, train_batch_size=batch, train_micro_batch_size_per_gpu=chunk)
        planned = peer_gpu_bytes(job, OPEN_CLIP_ACCUMULATING, autocast=False)
        assert planned / MIB == pytest.approx(peak, rel=0.03)


def test_steps_of_other_codes_have_the_time_of_their_towers(tmp_path: Path) -> None:
    job, one = workload(tmp_path, ranks=1, megaclip={"cut_captions": False}), describe(gpus=1)
    towers = plan_time(job, one).towers
    assert peer_step_seconds(job, one, OPEN_CLIP_ACCUMULATING) == pytest.approx(towers / 0.64, rel=0.01)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_sweep, "draw", lambda *arguments: None)
    return tmp_path


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [tool.__name__, *arguments])
    return tool.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "ds.json/picture.png"], "cannot write "),
        (["--out", "picture.png", "--model", "RN50"], "--model RN50 is run by open_clip's modules"),
        (["--out", "picture.png", "--gpu", "cpu"], "the sweep compares the memory of GPUs, and this plan is for CPUs"),
        (["--out", "picture.png", "--lock-text"], "--lock-text: the formulas of other codes are for training both"),
    ],
)
def test_a_sweep_that_cannot_be_drawn_is_one_error(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--deepspeed_config", "ds.json", "--model", "ViT-B-32", "--gpus", "1", *arguments]
    assert run(plan_sweep, monkeypatch, *command) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("content", "reason"), [("[]", "TypeError"), ('{"results": [{"method": "megaclip", "peak_mib": 1}]}', "KeyError")]
)
def test_a_file_of_another_tool_is_one_error(
    folder: Path, content: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.json").write_text(content)
    assert run(plan_compare, monkeypatch, "other.json") == 1
    error = capsys.readouterr().err
    assert f"error: 'other.json' was not written by tools/bench_train.py --json ({reason}" in error


def test_measured_runs_are_compared_with_plans_of_their_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--gpu and --rates must have an effect: not every measured run used an H200."""
    measured = json.loads(RUNS.read_text())["results"]
    row = next(row for row in measured if row["method"] == "megaclip" and row["step_s"] > 10)
    (folder / "one.json").write_text(json.dumps({"results": [row]}))
    third = {name: rate / 3 for name, rate in asdict(describe().rates).items()}
    (folder / "third.json").write_text(json.dumps({"machine": "a machine", "rates": third}))

    def seconds(*flags: str) -> float:
        assert run(plan_compare, monkeypatch, "one.json", *flags) == 0
        line = capsys.readouterr().out.splitlines()[1]
        return float(line[58:].replace(" GiB", "").split()[3])

    assert seconds("--rates", "third.json") == pytest.approx(3 * seconds(), rel=0.01)
    # An A100 has 0.32 of the product rate and 0.43 of the memory bandwidth.
    assert seconds() / 0.43 < seconds("--gpu", "a100") < seconds() / 0.32
    assert seconds("--gpu", "h200") == seconds()


@pytest.mark.parametrize(("text_chunk", "first"), [(None, 128), (512, 512)])
def test_a_sweep_begins_at_the_smallest_batch(
    folder: Path, text_chunk: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep must not begin at a larger batch, because open_clip may fit only below it."""
    section = {} if text_chunk is None else {"text_micro_batch_size": text_chunk}
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "train_batch_size": 8192, "megaclip": section}))
    arguments = ["--deepspeed_config", "ds.json", "--model", "ViT-L-14", "--gpus", "1", "--micro-batch", "128"]
    assert run(plan_sweep, monkeypatch, *arguments, "--gpu", "a800", "--out", "s.png", "--json", "s.json") == 0
    batches = {row["batch"] for row in json.loads((folder / "s.json").read_text())["results"]}
    assert batches == {first * 2**power for power in range(25) if first * 2**power <= 2**26}


def test_compiled_towers_change_no_figure_of_other_codes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and activations of other codes are ratios to plain towers. megaclip.compile must not change them."""
    arguments = ["--deepspeed_config", "ds.json", "--model", "ViT-L-14", "--out", "s.png", "--json", "s.json"]
    ours, others = [], []
    for compiled in (True, False):
        section = {"compile": compiled, "selective_recompute": compiled}
        more = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "megaclip": section}
        (folder / "ds.json").write_text(json.dumps(CONFIG | more))
        assert run(plan_sweep, monkeypatch, *arguments) == 0
        rows = json.loads((folder / "s.json").read_text())["results"]
        ours.append(sum(row["seconds"] for row in rows if row["method"] == "MegaCLIP"))
        others.append([row for row in rows if row["method"] in PEERS])
    assert ours[0] < ours[1] and others[0] == others[1] != []


def test_only_ranks_with_other_ranks_measure_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_rates, "seconds", lambda run: [2.0])
    monkeypatch.setattr(measure_rates, "_WRITTEN_BYTES", 2**22)
    measured = measure_rates.measure_rates(load_model_config("ViT-B-32"), 2, tmp_path)
    assert set(measured) == {field.name for field in fields(Rates)} - {"link", "network"}
