"""`megaclip plan`: flags without effect, files that are not results, and outputs that cannot be written."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megaclip.commands import plan
from megaclip.planner import describe
from megaclip.planner.cluster import rates_json
from megaclip.planner.peers import PEERS

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "row.json").write_text('{"results": [{"method": "megaclip", "peak_mib": 1}]}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "figures.json"], "--json has no effect without --sweep; add --sweep PICTURE.png, or leave --json"),
        (["--sweep", "ds.json/picture.png"], "cannot write "),
        (["--sweep", "picture.png", "--model", "RN50"], "open_clip's modules run RN50; leave --sweep out"),
        (["--gpu", "h2000", "--rates", "list.json"], "--gpu 'h2000' is unknown; use one of a100-40gb, a100, a800"),
        (["--gpu", "H100", "--rates", "list.json"], "--rates 'list.json' is not a file of `megaclip plan --calibrate`"),
        (["--gpu", "cpu", "--sweep", "picture.png"], "--sweep compares the memory of GPUs, and this plan is for CPUs"),
        (["--lock-text", "--sweep", "picture.png"], "training both towers; leave --lock-text or --sweep out"),
        (["--lock-image", "100"], "--lock-image with 100 unlocked groups trains every parameter of the image tower"),
        (["--model", "RN50", "--lock-text", "100"], "--lock-text with 100 unlocked groups trains every parameter"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "--deepspeed_config", "ds.json", "--model", "ViT-B-32", "--gpus", "1", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert plan.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "list.json"], "'list.json' was not written by tools/bench_train.py --json (TypeError"),
        (["--compare", "row.json"], "'row.json' was not written by tools/bench_train.py --json (KeyError"),
        (["--compare", "row.json", "--here"], "--here has no effect with --compare, which uses --disk, --gpu, "),
        (["--compare", "row.json", "--batch", "64"], "--batch has no effect with --compare"),
        (["--compare", "row.json", "--deepspeed_config", "ds.json"], "--deepspeed-config has no effect with --compare"),
        (["--compare", "row.json", "--sweep", "picture.png"], "--sweep has no effect with --compare"),
        (
            ["--calibrate", "rates.json", "--gpu", "a100"],
            "--gpu has no effect with --calibrate, which uses --micro-batch, --model; leave it out",
        ),
    ],
)
def test_a_flag_without_effect_is_refused(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only `megaclip plan` itself uses all flags."""
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    assert plan.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("flags", [[], ["--sweep", "picture.png"]])
def test_a_plan_refuses_recomputation_that_the_run_refuses(
    folder: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "ds.json").read_text())
    section = {"compile": False, "selective_recompute": True}
    (folder / "recompute.json").write_text(json.dumps({**config, "megaclip": section}))
    command = ["plan", "--deepspeed_config", "recompute.json", "--model", "ViT-B-32", "--gpus", "1", *flags]
    monkeypatch.setattr(sys, "argv", command)
    assert plan.main() == 1
    assert "selective_recompute true requires torch.compile" in capsys.readouterr().err


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    assert plan.main() == 0
    return capsys.readouterr().out


def test_measured_runs_are_compared_with_plans_of_their_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--gpu and --rates must have an effect: not every measured run used an H200."""
    measured = json.loads((Path(__file__).parents[1] / "planner" / "h200_runs.json").read_text())["results"]
    row = next(row for row in measured if row["method"] == "megaclip" and row["step_s"] > 10)
    (folder / "one.json").write_text(json.dumps({"results": [row]}))
    third = {name: rate / 3 for name, rate in asdict(describe().rates).items()}
    (folder / "third.json").write_text(rates_json("a machine", third))

    def seconds(*flags: str) -> float:
        line = run(monkeypatch, capsys, "--compare", "one.json", *flags).splitlines()[1]
        return float(line[58:].replace(" GiB", "").split()[3])

    assert seconds("--rates", "third.json") == pytest.approx(3 * seconds(), rel=0.01)
    # An A100 has 0.32 of the product rate and 0.43 of the memory bandwidth.
    assert seconds() / 0.43 < seconds("--gpu", "a100") < seconds() / 0.32
    assert seconds("--gpu", "h200") == seconds()


@pytest.mark.parametrize(("text_chunk", "first"), [(None, 128), (512, 512)])
def test_a_sweep_begins_at_the_smallest_batch(
    folder: Path,
    text_chunk: int | None,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sweep must not begin at a larger batch, because open_clip may fit only below it."""
    section = {} if text_chunk is None else {"text_micro_batch_size": text_chunk}
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "train_batch_size": 8192, "megaclip": section}))
    monkeypatch.setattr(plan, "draw", lambda *arguments: None)
    arguments = ["--deepspeed_config", "ds.json", "--model", "ViT-L-14", "--gpus", "1", "--micro-batch", "128"]
    run(monkeypatch, capsys, *arguments, "--gpu", "a800", "--sweep", "s.png", "--json", "s.json")
    batches = {row["batch"] for row in json.loads((folder / "s.json").read_text())["results"]}
    assert batches == {first * 2**power for power in range(25) if first * 2**power <= 2**26}


def test_compiled_towers_change_no_figure_of_other_codes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times and activations of other codes are ratios to plain towers. megaclip.compile must not change them."""
    monkeypatch.setattr(plan, "draw", lambda *arguments: None)
    arguments = ["--deepspeed_config", "ds.json", "--model", "ViT-L-14", "--sweep", "s.png", "--json", "s.json"]
    ours, others = [], []
    for compiled in (True, False):
        section = {"compile": compiled, "selective_recompute": compiled}
        more = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "megaclip": section}
        (folder / "ds.json").write_text(json.dumps(CONFIG | more))
        run(monkeypatch, capsys, *arguments)
        rows = json.loads((folder / "s.json").read_text())["results"]
        ours.append(sum(row["seconds"] for row in rows if row["method"] == "MegaCLIP"))
        others.append([row for row in rows if row["method"] in PEERS])
    assert ours[0] < ours[1] and others[0] == others[1] != []
