"""Every user mistake ends in one error line and a non-zero exit code on every rank, without a traceback or a hang.

One launch of the harness tests all mistakes, one after the other. One mistake also runs under the deepspeed launcher.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip.checkpoint.model_directory import export_checkpoint
from megaclip.guards.lock import RunLock
from megaclip.models import ModelConfig, build_model
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, copy_shard, flags, launch, run_in_ranks


@dataclass(frozen=True)
class Mistake:
    """One mistake: how its run differs from a correct run, and text that the error must contain.

    In texts, TINY is replaced by the folder of the tiny run, and MADE by the folder of the fixture `made`.
    """

    expected: list[str]
    changes: dict[str, Any] = field(default_factory=dict)
    config_changes: dict[str, Any] = field(default_factory=dict)
    config: str = "zero1.json"

    def command(self, number: int, tiny: Path, made: Path) -> list[str]:
        config = json.loads((tiny / self.config).read_text()) | self.config_changes
        path = made / f"ds_config_{number}.json"
        path.write_text(json.dumps(config))
        changes = {"deepspeed_config": path, "logs": made / f"runs_{number}", **self.changes}
        places = {"TINY": str(tiny), "MADE": str(made)}
        for name, value in changes.items():
            for word, place in places.items():
                changes[name] = value = value.replace(word, place) if isinstance(value, str) else value
        return flags(tiny, **changes)


RESUMING = {"logs": "MADE/runs", "resume": "auto"}
MISTAKES = {
    "missing data": Mistake(["nowhere/0.tar"], {"train_data": "MADE/nowhere/0.tar"}),
    "missing validation data": Mistake(["nowhere"], {"val_data": "MADE/nowhere"}),
    "a corrupt shard": Mistake(["bad", "corrupt.tar"], {"train_data": "MADE/corrupt.tar"}),
    "a batch larger than the data": Mistake(["batch of 32", "has 20"], {"train_data": "MADE/short.tar"}),
    "an unknown model": Mistake(["ViT-B-3", "ViT-B-32"], {"model": "ViT-B-3"}),
    "a model JSON that is none": Mistake(["list.json"], {"model": "MADE/list.json"}),
    "patches larger than the image": Mistake(["patch_size"], {"model": "MADE/large_patches.json"}),
    "a missing tokenizer": Mistake(["nowhere.model"], {"tokenizer": "MADE/nowhere.model"}),
    "weights of another model": Mistake(["other.pt"], {"pretrained": "MADE/other.pt"}),
    "weights that are none": Mistake(["noise.tar"], {"pretrained": "MADE/noise.tar"}),
    "damaged weights": Mistake(["open_clip_model.safetensors has 7 bytes"], {"pretrained": "MADE/exported"}),
    "missing weights": Mistake(["nowhere.pt"], {"pretrained": "MADE/nowhere.pt"}),
    "a wrong key": Mistake(
        ["unknown key megaclip.exchnage", "did you mean 'exchange'?"], config_changes={"megaclip": {"exchnage": "ring"}}
    ),
    "a value that DeepSpeed refuses": Mistake(
        ["allgather_bucket_size"], config_changes={"zero_optimization": {"stage": 1, "allgather_bucket_size": -1}}
    ),
    "a value that the optimizer refuses": Mistake(
        ["optimizer.params.betas", "less than 1"],
        config_changes={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [2, 3]}}},
    ),
    "no config": Mistake(["nowhere.json"], {"deepspeed_config": "MADE/nowhere.json"}),
    "a batch that the ranks do not divide": Mistake(
        ["train_batch_size 31", "2 ranks"], config_changes={"train_batch_size": 31}
    ),
    "an unknown flag": Mistake(["--train-steppes", "--train-steps"], {"train_steppes": 3}),
    "a warm-up longer than the run": Mistake(["--warmup 9", "2 steps"], {"warmup": 9}),
    "a file in the folder's place": Mistake(["cannot write", "noise.tar"], {"logs": "MADE/noise.tar"}),
    "an unwritable folder": Mistake(["cannot write", "/proc"], {"logs": "/proc"}),
    "nothing to resume": Mistake(["no checkpoint at", "nowhere"], {"resume": "MADE/nowhere"}),
    "a run that exists": Mistake(["holds a run already", "--resume auto"], {"logs": "MADE/runs"}),
    "fewer data on resume": Mistake(
        ["4 as number of files", "now it is 3"], {**RESUMING, "train_data": "TINY/train/0000[0-2].tar"}
    ),
    "a changed shard on resume": Mistake(["00003.tar"], {**RESUMING, "train_data": "MADE/train/*.tar"}),
    "another seed on resume": Mistake(["seed 0", "has 1"], {**RESUMING, "seed": 1}),
    "another model on resume": Mistake(["model.embed_dim", "has 48"], {**RESUMING, "model": "MADE/other.json"}),
    "another optimizer on resume": Mistake(
        ["optimizer 'AdamW'", "has 'SGD'"],
        RESUMING,
        config_changes={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ),
    "resumed with a tower locked": Mistake(
        ["written with locked.image None, and this run has 0"], {"resume": "MADE/runs/run", "lock_image": []}
    ),
    "resumed from a missing run": Mistake(["no checkpoint at", "nowhere"], RESUMING | {"resume": "MADE/nowhere"}),
    "a folder in use": Mistake(["in use by another run: host", "process", "since"], {"logs": "MADE/locked"}),
    "a damaged checkpoint": Mistake(
        ["is damaged", "rank_1_mp_rank_00_optim_states.pt has 7 bytes"], {"resume": "MADE/damaged/run"}
    ),
}
A_RESTART_MAY_SUCCEED = {"a corrupt shard", "a folder in use"}
"""Mistakes that end with exit code 1. All others are found before training, and end with 78."""
LAUNCHED = "a corrupt shard"


@pytest.fixture(scope="module")
def made(tiny_run, tmp_path_factory) -> Path:
    """Folder of damaged inputs, and of MADE/runs/run, a correct run with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    shard = tiny_run / "train" / "00000.tar"
    copy_shard(
        shard, folder / "corrupt.tar", lambda _, extension, data: data if extension == "txt" else bytes(len(data))
    )
    copy_shard(shard, folder / "short.tar", lambda number, _, data: data if number < 20 else None)
    shutil.copytree(tiny_run / "train", folder / "train")
    shutil.copy(folder / "short.tar", folder / "train" / "00003.tar")
    (folder / "noise.tar").write_bytes(b"no tar, no weights " * 100)
    (folder / "list.json").write_text("[]")
    model = json.loads((tiny_run / "model.json").read_text())
    (folder / "large_patches.json").write_text(
        json.dumps({**model, "vision_cfg": {"image_size": 24, "patch_size": 48}})
    )
    (folder / "other.json").write_text(json.dumps({**model, "embed_dim": 48}))
    other = ModelConfig.from_dict({**model, "embed_dim": 48})
    torch.save(build_model(other).state_dict(), folder / "other.pt")
    worked = run_in_ranks([flags(tiny_run, tiny_run / "zero1.json", folder / "runs")])[0]
    assert [end.exit_code for end in worked] == [0] * WORLD_SIZE, worked[0].output
    export_checkpoint(folder / "runs" / "run", folder / "exported", None)
    (folder / "exported" / "open_clip_model.safetensors").write_bytes(b"cut off")
    shutil.copytree(folder / "runs", folder / "damaged")
    next((folder / "damaged").glob("run/checkpoints/step_*/*rank_1*")).write_bytes(b"cut off")
    return folder


@pytest.fixture(scope="module")
def locked(made) -> Iterator[None]:
    """Hold the lock on the run MADE/locked in this process."""
    folder = made / "locked" / "run"
    folder.mkdir(parents=True)
    lock = RunLock(folder)
    lock.take()
    yield
    lock.release()


@pytest.fixture(scope="module")
def ends(tiny_run, made, locked) -> dict[str, list[Finished]]:
    """Exit code and output of each rank, by the name of the mistake."""
    commands = [mistake.command(number, tiny_run, made) for number, mistake in enumerate(MISTAKES.values())]
    return dict(zip(MISTAKES, run_in_ranks(commands), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_line_and_a_failure_on_every_rank(ends, name):
    first, *others = ends[name]
    assert [end.exit_code for end in ends[name]] == [1 if name in A_RESTART_MAY_SUCCEED else 78] * WORLD_SIZE
    assert len(first.errors) == 1, first.output
    for words in MISTAKES[name].expected:
        assert words in first.errors[0]
    message = first.errors[0].partition("ERROR ")[2]
    assert [[line.partition("ERROR ")[2] for line in end.errors] for end in others] == [[message]] * len(others)
    for end in ends[name]:
        assert "Traceback" not in end.output


def test_a_refused_run_does_not_change_its_folder(ends, made):
    """MADE/damaged was copied before the mistakes ran. One of its files is damaged on purpose."""
    run, copy = made / "runs" / "run", made / "damaged" / "run"
    for name in ("settings.json", "checkpoints/latest", "checkpoints/model/open_clip_config.json"):
        assert (run / name).read_bytes() == (copy / name).read_bytes(), name


def test_the_launcher_ends_with_the_same_error_line(ends, made, tiny_run):
    command = MISTAKES[LAUNCHED].command(list(MISTAKES).index(LAUNCHED), tiny_run, made)
    done = launch(command)
    assert done.exit_code != 0
    assert done.errors == ends[LAUNCHED][0].errors
    assert "Traceback" not in done.output
