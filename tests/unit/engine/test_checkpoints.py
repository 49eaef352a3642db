"""The best checkpoint of a run: its record, how --keep-last treats it, and when a resumed run forgets it."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from megaclip.checkpoint import manifest
from megaclip.checkpoint.open_clip_weights import write_tensors
from megaclip.checkpoint.search import LOCKED_WEIGHTS, MODEL_CARD, all_tags
from megaclip.config import TrainArguments
from megaclip.engine.checkpoints import FILE, BestCheckpoint, main_score
from megaclip.engine.saved_model import locked_weights
from megaclip.errors import CheckpointError
from tests.unit.checkpoint.saved_checkpoints import save

TAGS = {step: f"step_{step:08d}" for step in range(1, 7)}


def best_of(run: Path, *, step: int = 0, identifier: str = "this run", **changes) -> BestCheckpoint:
    """Return the best checkpoint of a run that starts or resumes after `step` steps."""
    required = {"deepspeed_config": "zero1", "model": "ViT-B-32", "train_data": ["train"]}
    best = BestCheckpoint(run, TrainArguments(**{**required, "val_data": ["val"], **changes}))
    best.resume(step, identifier)
    return best


def save_and_evaluate(run: Path, best: BestCheckpoint, top1: dict[int, float], *, keep_last: int = 1) -> None:
    """Save and evaluate as a run does: a checkpoint is scored after it was saved. top1: scores by step."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    for step, score in top1.items():
        save(run / "checkpoints", step, keep_last=keep_last, best=best.tag, run="this run")
        best.evaluated(step, {"zero_shot_top1": score, "retrieval_r1_i2t": 0.5})


def test_the_best_checkpoint_outlives_keep_last_and_goes_when_a_better_one_exists(tmp_path):
    best = best_of(tmp_path)
    save_and_evaluate(tmp_path, best, {1: 0.2, 2: 0.4, 3: 0.3, 4: 0.4})
    assert all_tags(tmp_path / "checkpoints") == [TAGS[2], TAGS[4]]
    record = json.loads((tmp_path / FILE).read_text())
    assert (record["checkpoint"], record["main_score"], record["value"]) == (TAGS[2], "zero_shot_top1", 0.4)
    assert record["scores"] == {"zero_shot_top1": 0.4, "retrieval_r1_i2t": 0.5}
    save_and_evaluate(tmp_path, best, {5: 0.5, 6: 0.1})
    assert all_tags(tmp_path / "checkpoints") == [TAGS[5], TAGS[6]]


def test_a_step_without_a_checkpoint_and_a_score_that_is_not_finite_do_not_count(tmp_path):
    best = best_of(tmp_path)
    save_and_evaluate(tmp_path, best, {1: 0.2, 2: math.nan}, keep_last=9)
    best.evaluated(3, {"zero_shot_top1": 0.9})
    assert best.tag == TAGS[1]


def test_the_main_score_is_top1_or_the_mean_recall_of_both_directions():
    retrieval = {"retrieval_r1_i2t": 0.2, "retrieval_r1_t2i": 0.4, "retrieval_r5_i2t": 1.0}
    assert main_score({**retrieval, "zero_shot_top1": 0.1}) == ("zero_shot_top1", 0.1)
    assert main_score(retrieval) == ("mean of retrieval_r1_i2t and retrieval_r1_t2i", pytest.approx(0.3))


@pytest.mark.parametrize(
    ("start", "applies"),
    [
        ({"step": 3}, True),
        ({"step": 3, "val_data": []}, True),  # this run does not evaluate
        ({"step": 1}, False),
        ({"step": 3, "val_data": ["other"]}, False),
        ({"step": 3, "identifier": "another run"}, False),
    ],
)
def test_a_resumed_run_continues_with_the_record_if_it_applies(tmp_path, start, applies):
    save_and_evaluate(tmp_path, best_of(tmp_path), {1: 0.2, 2: 0.4, 3: 0.3})
    assert best_of(tmp_path, **start).tag == (TAGS[2] if applies else None)
    assert (tmp_path / FILE).exists() == applies


@pytest.mark.parametrize("content", ["", "[]", '{"checkpoint": "../step_00000001"}'])
def test_a_damaged_record_is_deleted(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert best_of(tmp_path).tag is None and not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("folder", "evaluated", "resumed", "words"),
    [
        ("run", {}, {}, "run OUT_DIR --tag step_00000001 --verify"),
        ("my run", {}, {}, "my run' OUT_DIR --tag step_00000001 --verify"),  # quoted for the shell
        ("run", {"eval_ema": True}, {"eval_ema": True}, "run OUT_DIR --tag step_00000001 --ema --verify"),
        # A run with --eval-ema may be resumed without evaluation data, and then has no --eval-ema.
        ("run", {"eval_ema": True}, {"val_data": []}, "run OUT_DIR --tag step_00000001 --ema --verify"),
        ("run", {"eval_ema": True}, {}, None),  # the recorded scores are those of other weights
        ("run", {"val_data": [], "val_fraction": 0.5, "eval_ema": True}, {"val_data": [], "val_fraction": 0.5}, None),
    ],
)
def test_the_report_names_the_command_that_exports_what_was_evaluated(
    tmp_path, caplog, folder, evaluated, resumed, words
):
    caplog.set_level(logging.INFO, "megaclip")
    best = best_of(tmp_path / folder, **evaluated)
    best.report()
    assert not caplog.records  # nothing was evaluated
    save_and_evaluate(tmp_path / folder, best, {1: 0.25})
    best_of(tmp_path / folder, step=1, **resumed).report()
    found = {line for line in caplog.messages if "best checkpoint: step_00000001 with zero_shot_top1 0.2500" in line}
    assert len(found) == (words is not None) and all(words in line and "megaclip export" in line for line in found)


@pytest.mark.parametrize("damaged", [LOCKED_WEIGHTS, manifest.MANIFEST])
def test_damaged_locked_weights_are_not_copied_to_a_resumed_run(tmp_path, damaged):
    card = tmp_path / MODEL_CARD
    card.mkdir()
    write_tensors(card / LOCKED_WEIGHTS, {"weight": torch.ones(1)})
    manifest.write(card)
    assert locked_weights(tmp_path / TAGS[1], tmp_path, ["weight"], bf16=True) == {"weight": 1.0}
    (card / damaged).write_bytes((card / damaged).read_bytes()[:-1] + b" ")
    with pytest.raises(CheckpointError, match=f"is damaged: {damaged}"):
        locked_weights(tmp_path / TAGS[1], tmp_path, ["weight"], bf16=True)
