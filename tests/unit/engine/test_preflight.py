"""The plan before a run: an error on a GPU that is too small, a log line on a CPU, skipped on request."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaclip.config import MegaclipSection, TrainingConfig, load_training_config, parse_arguments
from megaclip.data import gpu_decoder
from megaclip.engine import preflight
from megaclip.errors import ConfigError
from megaclip.models import load_model_config
from megaclip.planner import constants, describe, plan_memory
from megaclip.zero import build


def raise_alone(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run check_fit for ViT-B-32 on one rank of a machine with this GPU memory. Return what was logged."""
    path = tmp_path / "ds.json"
    settings = {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 512,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 1},
    }
    path.write_text(json.dumps(settings))
    inputs = SimpleNamespace(
        config=load_training_config(path),
        model_config=load_model_config("ViT-B-32"),
        train=range(10_000),
        validation=None,
        labelled=None,
        suite=(),
        objective=None,
    )
    lines: list[str] = []

    def run(
        gpu_memory: str | None,
        *flags: str,
        host_memory: str = "900GiB",
        gpu: str = "h200",
        disk: str = "4TB",
        validation: int = 0,
    ) -> list[str]:
        machine = describe(gpu=gpu, gpus=1, gpu_memory=gpu_memory, host_memory=host_memory, disk=disk)
        inputs.validation = range(validation) or None
        monkeypatch.setattr(preflight, "this_machine", lambda world_size, folder: machine)
        command = ["--deepspeed_config", str(path), "--model", "ViT-B-32", "--train-data", "data", *flags]
        run.command = command
        preflight.check_fit(parse_arguments(command), inputs)
        return lines

    monkeypatch.setattr(preflight.dist, "get_world_size", lambda: 1)
    for level in ("info", "warning"):
        monkeypatch.setattr(
            preflight.logger, level, lambda text, *values, level=level: lines.append(level + " " + text % values)
        )
    run.inputs = inputs
    return run


def test_a_run_that_fits_logs_its_places_and_one_line_of_its_plan(start) -> None:
    graphs, images, embeddings, compilation, line = start("20GiB")
    assert graphs == (
        "info graphs of 1 of 8 image chunks and 0 of 8 text chunks are kept: a graph takes 6.8 GiB (image) or "
        "6.8 GiB (text), and the GPU has 18.0 GiB to use; planned peak 9.6 GiB"
    )
    assert compilation.startswith("info torch.compile: off: 78 steps of compiled towers save about ")
    assert images.startswith("info data offload: cpu: 588 MiB of images per rank; usable on this host: 720.0 GiB")
    assert embeddings == "info embeddings and their gradients are kept on the device of the towers"
    assert line.endswith("images are kept in host memory")
    assert line.startswith("info plan for a batch of 4096: ") and "per GPU (image tower forward)" in line


def test_recomputation_without_compiled_towers_is_refused(start, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    section = {"selective_recompute": True, "compile": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "megaclip": section}))
    start.inputs.config = load_training_config(path)
    for flags in ((), ("--no-plan",)):
        with pytest.raises(ConfigError, match=r"selective_recompute true requires torch\.compile"):
            start("20GiB", *flags)


def test_compilation_is_measured_for_long_runs_on_request(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bool] = []

    def trial(workload: Any, device: Any) -> tuple[bool, str]:
        measured.append(not measured)
        return measured[-1], "the figures"

    def compilation(*flags: str) -> str:
        return [line for line in start("139GiB", *flags) if "torch.compile" in line][-1]

    monkeypatch.setattr(preflight, "compiled_is_faster", trial)
    start.inputs.model_config = load_model_config("RN50")
    assert compilation("--epochs", "9999").startswith(
        'info torch.compile: off: megaclip.compile is "auto"; "measure" or'
    )
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "megaclip": {"compile": "measure"}}))
    start.inputs.config = load_training_config(path)
    assert compilation().startswith("info torch.compile: off: 78 steps of compiled towers save about ")
    assert measured == []
    assert compilation("--epochs", "9999") == "info torch.compile: on: the figures"
    assert compilation("--epochs", "9999") == "info torch.compile: off: the figures"
    assert measured == [True, False]


def test_the_error_of_a_run_that_cannot_fit_names_the_settings_to_change(start) -> None:
    with pytest.raises(ConfigError) as refused:
        start("10GiB")
    message = str(refused.value)
    assert "\n" not in message and "a GPU would need" in message and "has 8.0 GiB" in message
    assert '"train_micro_batch_size_per_gpu": 256' in message and '"activation_checkpointing": {}' in message


def test_decoding_on_the_gpu_is_planned_there(start) -> None:
    """The pixels of a group of files, the rows of their crops that are resized first, and the results."""
    rows, results = gpu_decoder.GROUP_BYTES * 224 // 480, gpu_decoder.GROUP_FILES * 3 * 224**2
    assert gpu_decoder.GROUP_BYTES + rows + results < constants.GPU_DECODER
    start("20GiB")
    command = [*start.command, "--image-decoder"]
    found = [
        plan_memory(preflight.workload_of(parse_arguments([*command, where]), start.inputs, 1), describe(gpus=1))
        for where in ("cpu", "gpu", "auto")
    ]
    assert [plan.gpu_states.get("image decoder") for plan in found] == [None, *2 * [constants.GPU_DECODER]]


def test_the_check_can_be_skipped(start) -> None:
    graphs, images, embeddings, _ = start("10GiB", "--no-plan")
    assert graphs.startswith("info graphs of 0 of 8 image chunks and 0 of 8 text chunks are kept: ")
    assert images.startswith("info data offload: cpu") and "embeddings" in embeddings


def test_a_run_on_a_cpu_is_only_warned(start) -> None:
    *_, warning, line = start(None, host_memory="4GiB", gpu="cpu")
    assert warning.startswith("warning this run does not fit: a host would need") and line.startswith("info plan for")


@pytest.mark.parametrize(("gpu", "gpu_memory"), [("h200", "20GiB"), ("cpu", None)])
def test_images_that_fit_nowhere_are_refused(start, gpu: str, gpu_memory: str | None) -> None:
    with pytest.raises(ConfigError, match=r"of disk and has 80 MiB to use.*--data-offload-dir.*\"reread\""):
        start(gpu_memory, host_memory="1GiB", disk="100MiB", gpu=gpu)


class Remote:
    """Data in an object store: 100 shards of 100 MB."""

    def __len__(self) -> int:
        return 10_000

    def remote_shards(self, cache: Path) -> dict[int, Any]:
        return dict.fromkeys(range(100), SimpleNamespace(size=10**8))


def test_images_are_planned_beside_the_shard_cache_on_their_disk(start, tmp_path: Path) -> None:
    """588 MiB of images fit on a disk of 11 GB, and not beside a cache of 10 GB, unless it holds half of it already."""
    start.inputs.train = Remote()
    flags = ("--shard-cache", str(tmp_path / "cache"), "--logs", str(tmp_path))
    machine = {"host_memory": "1GiB", "disk": "10.5GB"}
    fits, *_ = (line for line in start(None, "--shard-cache-gb", "9", *flags, gpu="cpu", **machine) if "cache" in line)
    assert fits.startswith("info --shard-cache may take 8.4 GiB more on the disk of")
    with pytest.raises(ConfigError, match="of disk and has 381 MiB to use"):
        start(None, "--shard-cache-gb", "90", *flags, gpu="cpu", **machine)
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "a.shard").open("wb") as file:
        file.truncate(5 * 10**9)
    assert "info --shard-cache may take 4.7 GiB more" in "\n".join(
        start(None, "--shard-cache-gb", "90", *flags, gpu="cpu", **machine)
    )


def test_the_rates_are_those_of_the_gpu_with_the_name() -> None:
    presets = {
        "NVIDIA A100-SXM4-40GB": "a100-40gb",  # not "a100", whose memory is a third faster
        "NVIDIA A100 80GB PCIe": "a100",
        "NVIDIA A800-SXM4-80GB": "a800",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H20": "h20",
        "NVIDIA L40S": "l40s",  # not "l4"
        "NVIDIA RTX A6000": "a6000",
        "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx-4090",
        "NVIDIA RTX 6000 Ada Generation": "h200",  # not listed: the default
    }
    assert {device: preflight._preset(device) for device in presets} == presets


def test_this_machine_has_memory_and_a_disk(tmp_path: Path) -> None:
    machine = preflight.this_machine(2, tmp_path / "not" / "there")
    assert machine.gpu_memory == 0 and machine.gpus == 2
    assert machine.host_memory > 2**28 and machine.disk > 0


def test_the_launcher_sets_how_many_ranks_share_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        with monkeypatch.context() as launched:
            launched.setenv(launcher, "2")
            machine = preflight.this_machine(6, tmp_path)
        assert (machine.gpus_per_host, machine.hosts) == (2, 3)


def test_settings_that_do_not_pay_are_logged(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "faster_run", lambda workload, cluster: "ZeRO-2 fits too")
    assert "warning ZeRO-2 fits too" in start("20GiB")


REQUIRED = {"gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


@pytest.mark.parametrize(
    ("zero", "section", "message"),
    [
        ({}, {"implementation": "triton"}, r"megaclip.implementation is 'triton', but .* not on cpu; set it to 'auto'"),
        ({"stage": 3, "zero_quantized_gradients": True}, {}, r"zero_quantized_gradients requires a GPU"),
    ],
)
def test_settings_for_gpus_are_one_error_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, zero: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    """The error must be raised before the first step."""
    monkeypatch.setattr(build, "raise_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(build, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    settings = {**REQUIRED, "zero_optimization": zero}
    config = TrainingConfig(Path("ds.json"), settings, MegaclipSection(**section))
    with pytest.raises(ConfigError, match=message):
        build.build_engine(config, arguments=None, model_config=None)


@pytest.mark.parametrize(
    ("own", "group"), [("0::/\n", ""), ("1:cpu:/x\n0::/job/step\n", "job"), ("0::/job/step\n", "job/step")]
)
def test_the_limit_of_a_control_group_counts(own, group, monkeypatch, tmp_path):
    """A job without a namespace of its own has its limit below the root."""
    monkeypatch.setattr(preflight, "_CGROUPS", tmp_path)
    monkeypatch.setattr(preflight, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    tmp_path = tmp_path / group
    tmp_path.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=20000))
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("6000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 2500\n")
    assert preflight.free_host_memory() == 10000 - 6000 + 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.free_host_memory() == 20000
