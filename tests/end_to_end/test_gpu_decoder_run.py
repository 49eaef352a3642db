"""Runs with --image-decoder gpu and auto, with simplejpeg in place of nvJPEG, equal a run on the CPU bit for bit."""

import functools
import json
import re
from pathlib import Path

import pytest

from megaclip.data import GpuDecoder
from megaclip.engine import image_decoding
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import DS_CONFIG, MODEL, WORLD_SIZE, Finished, flags, run_here, scalars
from tests.unit.data.test_gpu_decoder import decode

STEPS = 8
RUNS: dict[str, list[dict]] = {
    "cpu": [{"image_decoder": "cpu"}],
    "gpu": [{"image_decoder": "gpu", "stop_after_steps": 3}, {"image_decoder": "auto", "resume": "auto"}],
    "back": [{"image_decoder": "auto"}],
    "auto": [{"image_decoder": "auto", "stop_after_steps": 5}, {"image_decoder": "cpu", "resume": "auto"}],
}
"""Flags of each process of a run, by name. All read images twice in a step."""


def with_stand_in(commands: list[list[str]], store: str) -> list[tuple[Finished, int]]:
    """Return the end of each process, and the number of files that were decoded in place of the GPU."""
    ends = []
    for number, command in enumerate(commands):
        decoded = []

        def noted(files, decoded=decoded):
            decoded.extend(files)
            return decode(files)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_decoding, "WAITED_STEPS", 2)
            patch.setattr(image_decoding, "WAITED_SHARE", -1.0)
            patch.setattr(image_decoding, "LARGEST_TIME", 0.0)
            patch.setattr(image_decoding, "open_gpu_decoder", functools.partial(GpuDecoder, decode=noted))
            ends.append((run_here(command, Path(f"{store} {number}")), len(decoded)))
    return ends


@pytest.fixture(scope="module")
def ends(tiny_run, tmp_path_factory) -> tuple[Path, list[tuple[Finished, int]]]:
    logs = tmp_path_factory.mktemp("gpu_decoder")
    (logs / "model.json").write_text(json.dumps(MODEL | {"vision_cfg": MODEL["vision_cfg"] | {"image_size": 40}}))
    section = {"megaclip": DS_CONFIG["megaclip"] | {"data_offload": "reread"}, "zero_optimization": {"stage": 1}}
    (logs / "reread.json").write_text(json.dumps(DS_CONFIG | section))
    common = {"model": logs / "model.json", "train_steps": STEPS}
    commands = [
        flags(tiny_run, logs / "reread.json", logs, name=name, **common, **settings)
        for name, processes in RUNS.items()
        for settings in processes
    ]
    first, _ = run_ranks(with_stand_in, WORLD_SIZE, commands, str(logs / "store"))
    return logs, first


def test_losses_are_those_of_the_cpu_also_after_a_resume(ends):
    logs, processes = ends
    assert [end.exit_code for end, _ in processes] == [0] * 6, [end.output[-2000:] for end, _ in processes]
    expected = scalars(logs / "cpu")["train/loss"]
    assert len(expected) == STEPS
    assert [scalars(logs / name)["train/loss"] for name in ("gpu", "back", "auto")] == 3 * [expected]


def test_the_choice_is_logged_recorded_and_followed(ends):
    logs, ((_, cpu), (first, at_gpu), (second, resumed), (back, tried), (auto, chosen), (last, none)) = ends
    assert cpu == none == 0 and min(at_gpu, resumed, tried, chosen) > 0
    assert "decoded and resized by nvJPEG and Triton" in first.output and "differ slightly" not in second.output
    assert re.search(r"auto: the first steps waited for samples for \d+% of their time; from now on nv", auto.output)
    assert re.search(r"s with nvJPEG and Triton and [\d.]+ s before; simplejpeg and torch decode", back.output)
    assert "by nvJPEG and Triton, and now by simplejpeg and torch: their pixels differ slightly" in last.output
    states = sorted(logs.glob("*/checkpoints/*/state.json"))
    recorded = [json.loads(path.read_text())["image_decoder"].split()[0] for path in states]
    assert recorded == ["nvJPEG", *3 * ["simplejpeg"], *2 * ["nvJPEG"]]  # auto, back, cpu, gpu
