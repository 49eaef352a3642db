"""A stopped or killed run that is resumed has the samples, losses and weights of a run that never stopped.

Losses and weights are equal bit by bit. All runs use one machine, with the same instruction set and number of threads,
because other processors add in another order. The runs use ranks of the harness. tests/drills kills whole jobs with
data workers.
"""

import json
import math
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.engine.metrics import Metrics
from megaclip.engine.run import Run
from megaclip.engine.run_loss import RunLoss
from megaclip.step.batch import Tower
from megaclip.step.gradient_cache import RandomState
from tests.distributed.harness import RankFailure, run_ranks
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_by_name, run_here, run_in_ranks, scalars
from tests.tolerances import WRITTEN, assert_close

STEPS = 10
STEPS_PER_EPOCH = 8  # less than STEPS, so that the resumed part ends in the second epoch
SAVE_EVERY = 4
KILLED_AFTER = 7
STOP_SIGNAL, STOPPED_AFTER = signal.SIGTERM, 5
SCHEDULE = {"train_steps": STEPS, "warmup": 3, "save_every_steps": SAVE_EVERY, "keep_last": 9}
CONFIGS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero3": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
}
SIGNALLED = "group [1]/signalled"
"""Name of a run in a subfolder of --logs, with characters that shells and glob patterns interpret."""
FLAGS: dict[str, dict[str, Any]] = {
    "zero1": {"force_patch_dropout": 0.5, "aug_scale": [0.5, 1.0], "shard_order": "sequential"},
    "zero3": {"force_patch_dropout": 0.5, "logit_scale_max": 12},  # below the initial value
}


@dataclass
class Recorded:
    """One rank's record of a run."""

    end: Finished
    ids: list[list[int]]
    """Sample ids of each step, in order."""
    epochs: list[float]
    """Epoch that the loss received at each step."""
    seeds: list[int]
    """Seed of torch's generator for every chunk, of both towers in both passes."""


@dataclass
class Runs:
    """Folder of the runs of one configuration, and the records of each rank, by run."""

    config: Path
    logs: Path
    recorded: dict[str, list[Recorded]]


@dataclass
class Sent:
    """Signal that some of the ranks receive after a step."""

    signal: signal.Signals
    after: int
    ranks: tuple[int, ...]


def record(command: list[str], store: str, sent: Sent | None = None) -> Recorded:
    """Call `main(command)` in this rank and record its steps. sent: signal that the rank sends to itself."""
    ids: list[list[int]] = []
    epochs: list[float] = []
    seeds: list[int] = []
    bind, reseed, show_step = RunLoss.bind, RandomState.reseed, Metrics.record_step

    def noting(loss: RunLoss, taken: Any, epoch: float, *others: Any) -> Any:
        ids.append(taken().tolist())
        epochs.append(epoch)
        return bind(loss, taken, epoch, *others)

    def reseeding(state: RandomState, tower: Tower, chunk: int) -> None:
        reseed(state, tower, chunk)
        seeds.append(torch.initial_seed())

    def sending(metrics: Metrics, step: int, *arguments: Any) -> None:
        show_step(metrics, step, *arguments)
        if sent and step == sent.after and int(os.environ["RANK"]) in sent.ranks:
            os.kill(os.getpid(), sent.signal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLoss, "bind", noting)
        patch.setattr(RandomState, "reseed", reseeding)
        patch.setattr(Metrics, "record_step", sending)
        return Recorded(run_here(command, Path(store)), ids, epochs, seeds)


def record_all(commands: dict[str, list[str]], stores: str, sent: dict[str, Sent]) -> dict[str, Recorded]:
    return {name: record(command, f"{stores}/store_{name}", sent.get(name)) for name, command in commands.items()}


@pytest.fixture(scope="module", params=CONFIGS)
def runs(request, tiny_run, tmp_path_factory) -> Runs:
    """Train every run of one configuration.

    - `never` runs without a stop.
    - `killed` is killed with SIGKILL, and `resumed` continues it.
    - `path` continues from a checkpoint of `never`, with evaluations.
    - `stopped` ends early by --stop-after-steps, and `continued` continues it.
    - `signalled` is stopped by a signal to one rank, and `taken up` continues it.
    """
    name = request.param
    logs = tmp_path_factory.mktemp(name)
    config = logs / "ds_config.json"
    config.write_text(json.dumps(json.loads((tiny_run / "zero1.json").read_text()) | CONFIGS[name]))

    def command(run: str, **changes: Any) -> list[str]:
        return flags(tiny_run, config, logs, name=run, **SCHEDULE, **FLAGS[name], **changes)

    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as killed:
        kill = Sent(signal.SIGKILL, KILLED_AFTER, ranks=(0, 1))
        run_ranks(record, WORLD_SIZE, command("killed"), str(logs / "unused"), kill)
    assert str(killed.value).count(f"exit code -{signal.SIGKILL}") == WORLD_SIZE
    evaluation = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16, "eval_every_steps": 1}
    commands = {
        "never": command("never"),
        "resumed": command("killed", resume="auto"),
        "path": command("path", resume=logs / "never" / "checkpoints" / "step_00000008", **evaluation),
        "stopped": command("stopped", stop_after_steps=3),
        "continued": command("stopped", resume="auto"),
        "signalled": command(SIGNALLED),
        "taken up": command(SIGNALLED, resume="auto"),
    }
    sent = {"signalled": Sent(STOP_SIGNAL, STOPPED_AFTER, ranks=(1,))}
    per_rank = run_ranks(record_all, WORLD_SIZE, commands, str(logs), sent)
    recorded = {name: [results[name] for results in per_rank] for name in commands}
    for name, ranks in recorded.items():
        expected = 128 + sent[name].signal if name in sent else 0
        assert [rank.end.exit_code for rank in ranks] == [expected] * WORLD_SIZE, f"{name}: {ranks[0].end.output}"
    return Runs(config, logs, recorded)


CONTINUED = {
    "resumed": ("killed", SAVE_EVERY),
    "path": ("path", 8),
    "continued": ("stopped", 3),
    "taken up": (SIGNALLED, STOPPED_AFTER),
}
"""Name of the resumed run -> its folder, and the number of steps done when it resumes."""


@pytest.mark.parametrize("name", CONTINUED)
def test_a_resumed_run_takes_the_same_samples(runs, name):
    done = CONTINUED[name][1]
    for never, continued in zip(runs.recorded["never"], runs.recorded[name], strict=True):
        assert len(never.ids) == STEPS
        assert continued.ids == never.ids[done:]
        assert continued.epochs == never.epochs[done:] == [step / STEPS_PER_EPOCH for step in range(done, STEPS)]
        assert f"at step {done}" in continued.end.output or continued is not runs.recorded[name][0]


@pytest.mark.parametrize("name", CONTINUED)
def test_a_resumed_run_has_the_same_losses_to_the_last_bit(runs, name):
    """Bits are equal on the same machine, with the same instruction set and number of threads."""
    folder, done = CONTINUED[name]
    never, continued = scalars(runs.logs / "never"), scalars(runs.logs / folder)
    for scalar in ("loss", "logit_scale", "learning_rate", "gradient_norm"):
        expected = never[f"train/{scalar}"]
        assert sorted(expected) == list(range(1, STEPS + 1))
        if name == "path":  # its own folder, which has only the resumed steps
            expected = {step: value for step, value in expected.items() if step > done}
        assert continued[f"train/{scalar}"] == expected
    assert len(set(never["train/loss"].values())) == STEPS


@pytest.mark.parametrize("name", CONTINUED)
def test_a_resumed_run_has_the_same_weights_to_the_last_bit(runs, name):
    """Bits are equal on the same machine, with the same instruction set and number of threads."""
    tag = f"step_{STEPS:08d}"
    never = consolidated_weights(runs.logs / "never" / "checkpoints", tag)
    continued = consolidated_weights(runs.logs / CONTINUED[name][0] / "checkpoints", tag)
    assert never.keys() == continued.keys()
    assert all(torch.equal(never[key], continued[key]) for key in never)


def test_the_learning_rate_warms_up_and_falls_by_half_a_cosine(runs):
    falling = [0.5 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    expected = [0.002 * factor for factor in (1 / 3, 2 / 3, 1, *falling)]
    assert_close(list(scalars(runs.logs / "never")["train/learning_rate"].values()), expected, WRITTEN)


@pytest.mark.parametrize("runs", ["zero3"], indirect=True)
def test_the_logit_scale_stays_below_its_maximum(runs):
    shown = scalars(runs.logs / "never")["train/logit_scale"]
    assert shown[1] == max(shown.values())
    bound = WRITTEN.magnified(math.log(12))  # exp magnifies the rounding of its argument
    assert_close(shown[1], 12.0, bound)
    saved = consolidated_weights(runs.logs / "never" / "checkpoints", "step_00000004")["logit_scale"]
    assert_close(saved.exp().item(), shown[4], bound)


@pytest.mark.parametrize("name", CONTINUED)
def test_every_chunk_has_its_own_seed_in_both_passes(runs, name):
    never = runs.recorded["never"]
    counts = Counter(seed for rank in never for seed in rank.seeds)
    assert len(counts) == STEPS * WORLD_SIZE * len(Tower) * 2  # chunks
    stage = json.loads(runs.config.read_text())["zero_optimization"]["stage"]
    # At ZeRO-3, some passes also encode blank rows with the other tower, with a separate seed.
    assert set(counts.values()) == ({2, 3} if stage == 3 else {2})
    for whole, continued in zip(never, runs.recorded[name], strict=True):
        per_step = len(whole.seeds) // STEPS
        assert continued.seeds == whole.seeds[CONTINUED[name][1] * per_step :]


def test_every_sample_is_used_once_per_epoch(runs):
    taken = [sorted(i for rank in runs.recorded["never"] for i in rank.ids[step]) for step in range(STEPS)]
    assert sorted(i for step in taken[:STEPS_PER_EPOCH] for i in step) == list(range(256))
    assert taken[STEPS_PER_EPOCH:] != taken[: STEPS - STEPS_PER_EPOCH]  # the second epoch has another order


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_a_signal_to_one_rank_stops_all_after_the_step(runs):
    first, second = runs.recorded["signalled"]
    assert len(first.ids) == len(second.ids) == STOPPED_AFTER
    assert (
        f"stopped by SIGTERM after step {STOPPED_AFTER}; resume with --name '{SIGNALLED}' --resume auto"
        in first.end.output
    )


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_resuming_a_finished_run_changes_nothing(runs, tiny_run):
    run = runs.logs / "never"
    kept = {path: path.read_bytes() for path in (run / "metrics.json", *run.glob("checkpoints/*/*.*"))}
    command = flags(tiny_run, runs.config, runs.logs, name="never", resume="auto", **SCHEDULE, **FLAGS["zero1"])
    (ends,) = run_in_ranks([command])
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
    assert f"nothing left to train: {run} has all {STEPS} steps" in ends[0].output
    assert json.loads(kept[run / "metrics.json"])["steps"] == STEPS
    assert kept == {path: path.read_bytes() for path in kept}


def dies_in_evaluation(patch: pytest.MonkeyPatch, _: str) -> None:
    patch.setattr(Run, "_evaluate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_runs_killed_in_their_last_evaluation_only_evaluate_when_resumed(runs, tiny_run):
    """A run saves its last checkpoint before it evaluates.

    The run "back" is resumed from an earlier step. Its metrics.json has the scores of the abandoned branch, which must
    not make the resumed run look complete.
    """

    def command(name: str, **changes: Any) -> list[str]:
        data = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16}
        schedule = {**SCHEDULE, "train_steps": 2, "warmup": 1, "save_every_steps": 1}
        return flags(tiny_run, runs.config, runs.logs, name=name, **schedule, **data, **changes)

    (ends,) = run_in_ranks([command("back")])
    assert json.loads((runs.logs / "back" / "metrics.json").read_text())["steps"] == 2, ends[0].output
    back = command("back", resume=runs.logs / "back" / "checkpoints" / "step_00000001")
    for name, line in (("unscored", command("unscored")), ("back", back)):
        with pytest.raises(RankFailure):
            run_by_name({name: line}, dies_in_evaluation)
        run = runs.logs / name
        assert (run / "checkpoints" / "latest").read_text() == "step_00000002" and not (run / "metrics.json").exists()
    for name, ends in run_by_name({name: command(name, resume="auto") for name in ("unscored", "back")}, None).items():
        assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
        assert "evaluation at step 2: " in ends[0].output
        scores = json.loads((runs.logs / name / "metrics.json").read_text())
        assert scores["steps"] == 2 and 0 <= scores["retrieval_r1_i2t"] <= 1 and "samples_per_s" not in scores
