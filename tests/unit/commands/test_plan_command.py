"""`megaclip plan`: what it prints, flags that are wrong, and settings that a run would refuse."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megaclip.commands import plan, planned_run
from megaclip.errors import ConfigError
from megaclip.models import load_model_config
from megaclip.planner import Cluster, Workload
from megaclip.planner.cluster import GPUS

SHIPPED = Path(__file__).parents[3] / "ds_configs"
PAGE = SHIPPED.parent / "docs/planning.md"
CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `megaclip plan` in a folder with some files. Return the exit code, and the output or the error."""
    recompute = {"compile": False, "selective_recompute": True}
    contents = {"ds": CONFIG, "recompute": {**CONFIG, "megaclip": recompute}, "list": []}
    contents["last"] = load_model_config("ViT-B-32").replace(text_cfg={"pool_type": "last"}).to_open_clip()
    contents["even"] = load_model_config("demo-tiny").replace(text_cfg={"heads": 4}).to_open_clip()
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)

    def command(*flags: str, config: str | Path = "ds.json", model: str = "ViT-B-32") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["plan", "--deepspeed_config", str(config), "--model", model, *flags])
        try:
            return plan.main(), capsys.readouterr().out
        except ConfigError as error:
            return error.exit_code, str(error)

    return command


MISTAKES = """
ViT-B-32 --gpus 1 --gpu h2000 --rates list.json | --gpu 'h2000' is unknown; use one of a100-40gb, a100, a800
ViT-B-32 --gpus 1 --gpu H100 --rates list.json | --rates 'list.json' is not a file of tools/measure_rates.py
ViT-B-32 --gpus 1 --lock-image 100 | --lock-image with 100 unlocked groups trains every parameter of the image
ViT-B-32 --gpus 1 --lock-text 100 | --lock-text with 100 unlocked groups trains every parameter
ViT-B-32 --gpus 1 --epochs 2 | --epochs 2 requires --train-num-samples, without --train-steps; set it
ViT-B-32 --gpus 1 --set megaclip.los=clip | ds.json --set megaclip.los=clip: unknown key megaclip.los; did you me
ViT-B-32 --gpus 1 --batch 8 --set train_batch_size=8 | train_batch_size is set twice
ViT-B-32 --gpus 64 | --gpus 64 is the number per host; give the number of hosts too, for example --gpus 8
ViT-B-32 --gpus 1 --text-positions-saved 1 | --text-positions-saved 1.0 is not a share; use a number from 0 to
last.json --gpus 1 --text-positions-saved 0.25 | --text-positions-saved 0.25 has no effect: this run cuts no
ViT-B-32 --gpus 1 --deepspeed_config recompute.json | selective_recompute true requires torch.compile
ViT-bigG-14 --gpus 8 --tensor-parallel 3 | megaclip.tensor_parallel_size 3 does not divide the 16 attention
ViT-bigG-14 --gpus 8 --tensor-parallel 8 | megaclip.tensor_parallel_size 8 does not divide the 20 attention
"""


def test_a_mistake_is_one_line(run: Run) -> None:
    for row in MISTAKES.strip().splitlines():
        words, message = row.split(" | ")
        model, *flags = words.split()
        code, error = run(*flags, model=model)
        assert code == 78 and "\n" not in error and message in error, row


@pytest.mark.parametrize("flag", ["--batch=0", "--micro-batch=-8", "--gpus=x", "--hosts=1.5", "--workers=-1"])
def test_impossible_numbers_are_refused(run: Run, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--batch 0 must be refused like any other impossible number, and not be ignored."""
    with pytest.raises(SystemExit) as caught:
        run(flag)
    assert caught.value.code == 2
    name, value = flag.split("=")
    assert re.search(rf"argument {name}: '{value}' is not an integer of at least [01]", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("config", "model", "flags", "texts"),
    [
        (
            "tensor_parallel",
            "even.json",
            "--tensor-parallel 2 --gpu-memory 4GiB",
            ["M on each of 2 tensor-parallel ranks, ZeRO-1"],
        ),
        (
            "zero3",
            "demo-tiny",
            "--gpus 8 --batch 4096 --micro-batch 64 --gpu-memory 8GiB",
            ["this run fits\nZeRO-3: ZeRO-2 fits too and is planned at "],
        ),
        (
            "zero1",
            "demo-tiny",
            "--text-positions-saved 0.25 --gpu-memory 8GiB",
            ["captions: 18.0 of 24 token positions on average for the step's time, and for the memory of kept graphs"],
        ),
    ],
)
def test_a_plan_prints_its_figures_and_what_would_be_faster(
    run: Run, config: str, model: str, flags: str, texts: list[str]
) -> None:
    code, output = run(*flags.split(), config=SHIPPED / f"{config}.json", model=model)
    assert code == 0 and all(text in output for text in texts)


def plan_here(*flags: str) -> Cluster:
    """Return the cluster that `megaclip plan --here` plans for."""
    command = ["--here", "--deepspeed_config", str(SHIPPED / "zero3.json"), "--model", "ViT-B-32", *flags]
    arguments = plan.plan_parser().parse_args(command)
    return planned_run._cluster(arguments)


def test_hosts_like_this_one_are_planned_with_what_is_free_here() -> None:
    machine = plan_here("--gpus", "2", "--hosts", "3", "--network", "5GB")
    assert (machine.gpus_per_host, machine.hosts, machine.rates.network) == (2, 3, 5e9)
    total = psutil.virtual_memory().total
    assert 2**28 < machine.host_memory <= total and machine.rates.link == GPUS[machine.name][1].link


@pytest.mark.parametrize("flag", ["--gpu", "--gpu-memory", "--host-memory", "--disk"])
def test_flags_that_describe_another_machine_are_refused_with_here(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} describes another machine"):
        plan_here(flag, "h100" if flag == "--gpu" else "1GiB")


def test_settings_of_the_command_line_plan_what_a_file_with_them_plans(run: Run, tmp_path: Path) -> None:
    changed = {**CONFIG, "train_batch_size": 512, "megaclip": {"loss": "siglip", "keep_graphs": 0}}
    (tmp_path / "changed.json").write_text(json.dumps(changed))

    def planned(*flags: str) -> Workload:
        command = ["--model", "ViT-B-32", "--gpus", "2", *flags]
        return planned_run.described_run(plan.plan_parser().parse_args(command))[0]

    flags = ["--deepspeed_config=ds.json", "--set", "megaclip.loss=siglip", "megaclip.keep_graphs=0"]
    expected = planned("--deepspeed_config=changed.json")
    assert expected == planned(*flags, "--set=train_batch_size=512") == planned(*flags, "--batch", "512")
    assert expected != planned(*flags)


@pytest.mark.long
def test_the_plan_on_the_page_is_what_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for search in ("micro_batches", "_largest_batch", "faster_run"):  # the end, which takes seconds
        monkeypatch.setattr(planned_run, search, lambda *_: [])
    command, page = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1:3]
    flags = command.replace("\\\n", "").split("--model ViT-L-14")[1].split()
    _, output = run(*flags, config="zero1", model="ViT-L-14")
    assert page.startswith(output.partition("\ntrain_micro_batch_size_per_gpu")[0])


def test_a_plan_has_the_hours_of_the_run_and_a_row_per_micro_batch(run: Run) -> None:
    flags = ["--gpus=2", "--batch=8192", "--gpu-memory=24GiB", "--train-num-samples=100000", "--epochs=41"]
    flags += ["--samples-per-core=1e9"]  # otherwise all micro-batches wait for data equally long
    _, output = run(*flags, "--micro-batch=64", model="demo-tiny")
    seconds = float(re.search(r"^STEP +(\S+)", output, re.MULTILINE)[1])
    steps, hours = re.search(r"^RUN: (\d+) steps, 4,096,000 samples: (\S+) hours", output, re.MULTILINE).groups()
    assert int(steps) == 500 and float(hours) == pytest.approx(500 * seconds / 3600, abs=0.06)
    row = re.compile(r"^  ([\d,]+) +(\S+ [GM]iB) +(\S+)(?:   (.*))?$", re.MULTILINE)
    rows = row.findall(output.split("seconds per step\n")[1])
    sizes = [int(row[0].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True) and 64 in sizes and all(4096 % size == 0 for size in sizes)
    assert sum("fastest" in row[3] for row in rows) == 1
    for size, peak, row_seconds, marks in rows[::3]:  # each row is the plan with that --micro-batch
        code, output = run(*flags, f"--micro-batch={size.replace(',', '')}", model="demo-tiny")
        assert code == (2 if "does not fit" in marks else 0)
        assert re.search(rf"^PEAK per GPU +{peak}$", output, re.MULTILINE) and f"STEP {row_seconds:>53}" in output
        assert ("this run" in marks) == (size == "64")
