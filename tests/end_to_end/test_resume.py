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
from tests.end_to_end.conftest import TRAINING_SCENES
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_by_name, run_here, run_in_ranks, scalars
from tests.tolerances import WRITTEN, assert_close

STEPS = 6
STEPS_PER_EPOCH = 4  # less than STEPS, so that the resumed part ends in the second epoch
SAVE_EVERY = 2
KILLED_AFTER, STOPPED_AFTER, SIGNALLED_AFTER = 3, 3, 5
STOP_SIGNAL = signal.SIGTERM
SCHEDULE = {"train_steps": STEPS, "warmup": 2, "save_every_steps": SAVE_EVERY, "keep_last": 9}
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
        "megaclip": {"loss": "fastclip_v3", "fastclip": {"temperature_learning_rate": 0.01, "gamma_epochs": 2}},
    },
}
SIGNALLED = "group [1]/signalled"
"""Name of a run in a subfolder of --logs, with characters that shells and glob patterns interpret."""
FLAGS: dict[str, dict[str, Any]] = {
    "zero1": {
        "force_patch_dropout": 0.5,
        "aug_scale": [0.5, 1.0],
        "shard_order": "sequential",
        "logit_scale_max": 12,  # below the initial value
    },
    "zero3": {"force_patch_dropout": 0.5},
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
    - `killed` is killed with SIGKILL, and `resumed` continues it, with evaluations.
    - At ZeRO-1, `stopped` ends early by --stop-after-steps, `signalled` continues it until a signal to one rank, and
      `taken up` continues to the end.
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
    evaluation = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16, "eval_every_steps": 2}
    commands = {"never": command("never"), "resumed": command("killed", resume="auto", **evaluation)}
    if name == "zero1":
        commands |= {
            "stopped": command(SIGNALLED, stop_after_steps=STOPPED_AFTER),
            "signalled": command(SIGNALLED, resume="auto"),
            "taken up": command(SIGNALLED, resume="auto"),
        }
    sent = {"signalled": Sent(STOP_SIGNAL, SIGNALLED_AFTER, ranks=(1,))}
    per_rank = run_ranks(record_all, WORLD_SIZE, commands, str(logs), sent)
    recorded = {name: [results[name] for results in per_rank] for name in commands}
    for name, ranks in recorded.items():
        expected = 128 + sent[name].signal if name in sent else 0
        assert [rank.end.exit_code for rank in ranks] == [expected] * WORLD_SIZE, f"{name}: {ranks[0].end.output}"
    return Runs(config, logs, recorded)


PARTS = {
    "resumed": (SAVE_EVERY, STEPS),
    "stopped": (0, STOPPED_AFTER),
    "signalled": (STOPPED_AFTER, SIGNALLED_AFTER),
    "taken up": (SIGNALLED_AFTER, STEPS),
}
"""Name of a run that is a part of a whole -> the steps that are done when it starts and ends."""


def test_a_resumed_run_takes_the_same_samples(runs):
    for name in runs.recorded.keys() - {"never"}:
        start, end = PARTS[name]
        for rank, (never, part) in enumerate(zip(runs.recorded["never"], runs.recorded[name], strict=True)):
            assert len(never.ids) == STEPS
            assert part.ids == never.ids[start:end], name
            assert part.epochs == never.epochs[start:end] == [step / STEPS_PER_EPOCH for step in range(start, end)]
            assert f"at step {start}" in part.end.output or rank or not start


def test_resumed_runs_have_the_same_losses_and_weights_to_the_last_bit(runs):
    """Bits are equal on the same machine, with the same instruction set and number of threads."""
    steps, weights = whole(runs, "never")
    assert len(set(steps["train/loss"].values())) == STEPS
    for folder in ["killed", *[SIGNALLED] * ("signalled" in runs.recorded)]:
        again, restored = whole(runs, folder)
        for scalar in ("loss", "logit_scale", "learning_rate", "gradient_norm"):
            expected = steps[f"train/{scalar}"]
            assert sorted(expected) == list(range(1, STEPS + 1)) and again[f"train/{scalar}"] == expected, folder
        assert weights.keys() == restored.keys()
        assert all(torch.equal(weights[key], restored[key]) for key in weights), folder


def whole(runs, folder):
    """Return the scalars of all steps of a run, and its last weights."""
    return scalars(runs.logs / folder), consolidated_weights(runs.logs / folder / "checkpoints", f"step_{STEPS:08d}")


def test_the_learning_rate_warms_up_and_falls_by_half_a_cosine(runs):
    falling = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    expected = [0.002 * factor for factor in (1 / 2, 1, *falling)]
    assert_close(list(scalars(runs.logs / "never")["train/learning_rate"].values()), expected, WRITTEN)


@pytest.mark.parametrize("runs", ["zero3"], indirect=True)
def test_the_state_of_fastclip_is_complete_and_continues_with_its_bits(runs, tiny_run):
    """The exported logit scale is the temperature of the loss. A run with another loss does not resume."""
    values = [
        [state["samples"]["values"] for state in loss_states(runs, folder, STEPS)] for folder in ("never", "killed")
    ]
    assert all(torch.equal(*(part.nan_to_num() for part in of_rank)) for of_rank in zip(*values, strict=True))
    assert sum(int((~part[:, 0].isnan()).sum()) for part in values[0]) == TRAINING_SCENES  # every scene was used
    own = loss_states(runs, "never", 4)[0]["temperature"]["log_scale"].item()
    assert abs(own + math.log(0.07)) > 0.01  # the temperature has changed
    exported = consolidated_weights(runs.logs / "never" / "checkpoints", "step_00000004")["logit_scale"]
    assert_close(exported.item(), own, WRITTEN)
    shown = scalars(runs.logs / "never")["train/logit_scale"]
    assert_close(shown[5], math.exp(own), WRITTEN.magnified(own))  # exp magnifies the rounding of its argument

    of_clip = {"name": "clip", "resume": runs.logs / "never" / "checkpoints", "train_steps": STEPS}
    (ends,) = run_in_ranks([flags(tiny_run, tiny_run / "zero3.json", runs.logs, **of_clip)])
    assert [end.exit_code for end in ends] == [78] * WORLD_SIZE
    assert "holds per-sample state of a global contrastive loss" in ends[0].errors[0]


def loss_states(runs: Runs, folder: str, step: int) -> list[dict[str, Any]]:
    """Return the states of the loss in a checkpoint, by rank."""
    checkpoint = runs.logs / folder / "checkpoints" / f"step_{step:08d}"
    return [torch.load(checkpoint / f"loss_rank_{rank:05d}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_the_logit_scale_stays_below_its_maximum(runs):
    """The scale of a step is the one that its loss used."""
    shown = scalars(runs.logs / "never")["train/logit_scale"]
    first, *later = shown.values()
    assert first > 12 > max(later[1:])
    bound = WRITTEN.magnified(math.log(12))  # exp magnifies the rounding of its argument
    assert_close(shown[2], 12.0, bound)
    saved = consolidated_weights(runs.logs / "never" / "checkpoints", "step_00000004")["logit_scale"]
    assert_close(saved.exp().item(), shown[5], bound)


def test_every_chunk_has_its_own_seed_in_both_passes(runs):
    never = runs.recorded["never"]
    counts = Counter(seed for rank in never for seed in rank.seeds)
    assert len(counts) == STEPS * WORLD_SIZE * len(Tower) * 2  # chunks
    stage = json.loads(runs.config.read_text())["zero_optimization"]["stage"]
    # At ZeRO-3, some passes also encode blank rows with the other tower, with a separate seed.
    assert set(counts.values()) == ({2, 3} if stage == 3 else {2})
    for name in runs.recorded.keys() - {"never"}:
        start, end = PARTS[name]
        for whole, part in zip(never, runs.recorded[name], strict=True):
            per_step = len(whole.seeds) // STEPS
            assert part.seeds == whole.seeds[start * per_step : end * per_step], name


def test_every_sample_is_used_once_per_epoch(runs):
    taken = [sorted(i for rank in runs.recorded["never"] for i in rank.ids[step]) for step in range(STEPS)]
    assert sorted(i for step in taken[:STEPS_PER_EPOCH] for i in step) == list(range(TRAINING_SCENES))
    ids = runs.recorded["never"][0].ids
    assert ids[STEPS_PER_EPOCH:] != ids[: STEPS - STEPS_PER_EPOCH]  # the second epoch has another order


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_a_signal_to_one_rank_stops_all_after_the_step(runs):
    first, second = runs.recorded["signalled"]
    assert len(first.ids) == len(second.ids) == SIGNALLED_AFTER - STOPPED_AFTER
    assert (
        f"stopped by SIGTERM after step {SIGNALLED_AFTER}; resume with --name '{SIGNALLED}' --resume auto"
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


def dies_in_evaluation(patch: pytest.MonkeyPatch, name: str) -> None:
    if name == "again":
        patch.setattr(Run, "_evaluate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("runs", ["zero1"], indirect=True)
def test_a_run_killed_in_its_last_evaluation_only_evaluates_when_resumed(runs, tiny_run):
    """A run saves its last checkpoint before it evaluates.

    The killed run was resumed from an earlier step of a whole run, whose metrics.json has the scores of the abandoned
    branch. They must not make the killed run look complete.
    """
    run = runs.logs / "back"

    def command(**changes: Any) -> list[str]:
        data = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16}
        schedule = {**SCHEDULE, "train_steps": 2, "warmup": 1, "save_every_steps": 1}
        return flags(tiny_run, runs.config, runs.logs, name="back", **schedule, **data, **changes)

    earlier = command(resume=run / "checkpoints" / "step_00000001")
    with pytest.raises(RankFailure, match=f"exit code -{signal.SIGKILL}"):
        run_by_name({"whole": command(), "again": earlier}, dies_in_evaluation)
    assert len(list((run / "checkpoints").glob("step_00000002*"))) == 2, "of both branches"
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002" and not (run / "metrics.json").exists()
    (ends,) = run_in_ranks([command(resume="auto")])
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
    assert "evaluation at step 2: " in ends[0].output and "training steps" not in ends[0].output
    scores = json.loads((run / "metrics.json").read_text())
    assert scores["steps"] == 2 and 0 <= scores["retrieval_r1_i2t"] <= 1 and "samples_per_s" not in scores
