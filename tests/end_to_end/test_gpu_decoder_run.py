"""Runs with --image-decoder gpu and auto, with simplejpeg in place of nvJPEG, equal a run on the CPU bit for bit."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from megaclip.data import GpuDecoder
from megaclip.engine import image_decoding
from tests.end_to_end.training_runs import MODEL, Finished, flags, run_by_name, scalars, write_config
from tests.unit.data.test_gpu_decoder import decode

STEPS = 8
RUNS: dict[str, list[dict]] = {
    "cpu": [{"image_decoder": "cpu"}],
    "gpu": [{"image_decoder": "gpu", "stop_after_steps": 3}, {"image_decoder": "auto", "resume": "auto"}],
    "back": [{"image_decoder": "auto"}],
    "auto": [{"image_decoder": "auto", "stop_after_steps": 5}, {"image_decoder": "cpu", "resume": "auto"}],
}
"""Flags of each process of a run, by name. All read images twice in a step."""


def with_stand_in(patch: pytest.MonkeyPatch, _: str) -> None:
    """Decode in place of the GPU, with a line in the log for each call."""

    def noted(files):
        sys.stderr.write("decoded in place of the GPU\n")
        return decode(files)

    patch.setattr(image_decoding, "WAITED_STEPS", 2)
    patch.setattr(image_decoding, "WAITED_SHARE", -1.0)
    patch.setattr(image_decoding, "LARGEST_TIME", 0.0)
    patch.setattr(image_decoding, "open_gpu_decoder", functools.partial(GpuDecoder, decode=noted))


@pytest.fixture(scope="module")
def ends(tiny_run, tmp_path_factory) -> tuple[Path, dict[str, Finished]]:
    """Return the folder of the runs, and how each process ended on the first rank, by run and number."""
    logs = tmp_path_factory.mktemp("gpu_decoder")
    (logs / "model.json").write_text(json.dumps(MODEL | {"vision_cfg": MODEL["vision_cfg"] | {"image_size": 40}}))
    config = write_config(logs / "reread.json", megaclip={"data_offload": "reread"})
    common = {"model": logs / "model.json", "train_steps": STEPS, "save_every_steps": 99}
    commands = {
        f"{name} {number}": flags(tiny_run, config, logs, name=name, **common, **settings)
        for name, processes in RUNS.items()
        for number, settings in enumerate(processes)
    }
    return logs, {name: first for name, (first, _) in run_by_name(commands, with_stand_in).items()}


def test_losses_are_those_of_the_cpu_also_after_a_resume(ends):
    logs, processes = ends
    assert {end.exit_code for end in processes.values()} == {0}, processes
    expected = scalars(logs / "cpu")["train/loss"]
    assert len(expected) == STEPS
    assert [scalars(logs / name)["train/loss"] for name in ("gpu", "back", "auto")] == 3 * [expected]


def test_the_choice_is_logged_recorded_and_followed(ends):
    logs, processes = ends
    used = [name for name, end in processes.items() if "decoded in place of the GPU" in end.output]
    assert used == ["gpu 0", "gpu 1", "back 0", "auto 0"]
    _, first, second, back, auto, last = processes.values()
    assert "decoded and resized by nvJPEG and Triton" in first.output and "differ slightly" not in second.output
    assert re.search(r"auto: the first steps waited for samples for \d+% of their time; from now on nv", auto.output)
    assert re.search(r"s with nvJPEG and Triton and [\d.]+ s before; simplejpeg and torch decode", back.output)
    assert "by nvJPEG and Triton, and now by simplejpeg and torch: their pixels differ slightly" in last.output
    states = sorted(logs.glob("*/checkpoints/*/state.json"))
    recorded = [json.loads(path.read_text())["image_decoder"].split()[0] for path in states]
    assert recorded == ["nvJPEG", *3 * ["simplejpeg"], *2 * ["nvJPEG"]]  # auto, back, cpu, gpu
