"""Which way of loading a continued run takes, and what it refuses before it loads anything."""

from pathlib import Path
from typing import Any

import pytest

from megaclip.config import parse_arguments
from megaclip.engine import resume
from megaclip.errors import CheckpointError

IDENTITY: dict[str, Any] = {
    "world_size": 2,
    "zero_stage": 2,
    "precision": "bf16",
    "zero_layout": {"parameter_alignment": None, "sub_group_size": None},
    "locked": {"image": None, "text": None},
    "global_batch": 32,
    "total_steps": 6,
    "data": {},
}


NEEDED = ["--deepspeed_config", "c.json", "--model", "ViT-B-32", "--train-data", "a.tar"]


class Loss:
    follows_length = None

    def load(self, parts: Any) -> None:
        pass


def way(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], *flags: str, follows_length: str | None = None
) -> list[str]:
    """How a checkpoint whose state is `saved` is loaded."""
    arguments = parse_arguments([*NEEDED, "--resume", "there", *flags])
    taken: list[str] = []
    monkeypatch.setattr(resume.store, "locate", lambda path: (path, "step_00000004"))
    monkeypatch.setattr(resume.store, "read_state", lambda *_: {"step": 4, "samples_consumed": 128, **saved})
    monkeypatch.setattr(resume.store, "read_loss_states", lambda *_: iter(()))
    monkeypatch.setattr(resume, "check_manifest", lambda *_: None)
    monkeypatch.setattr(resume.store, "load", lambda *_: taken.append("as it was"))
    monkeypatch.setattr(resume, "load_resharded", lambda *_: taken.append("by name"))
    engine: Any = None
    loss: Any = Loss()
    loss.follows_length = follows_length
    assert resume.resume(engine, loss, IDENTITY, arguments=arguments, checkpoints=Path("runs")) == (4, 128)
    return taken


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "as it was"),
        ({"world_size": 4}, "by name"),
        ({"zero_stage": 3}, "by name"),
        ({"precision": "float32"}, "by name"),  # DeepSpeed names the files by precision
        # Flat partitions of the same size in another order: loaded as they were, every value would be misplaced.
        ({"zero_layout": {"parameter_alignment": None, "sub_group_size": 1000}}, "by name"),
        ({"zero_layout": {"parameter_alignment": True, "sub_group_size": None}}, "by name"),
    ],
)
def test_what_is_divided_otherwise_is_loaded_by_name(monkeypatch, changes, expected):
    assert way(monkeypatch, IDENTITY | changes) == [expected]


def test_other_locks_and_states_that_say_too_little_are_refused(monkeypatch):
    with pytest.raises(CheckpointError, match=r"written with locked\.image 2, this run has None"):
        way(monkeypatch, IDENTITY | {"locked": {"image": 2, "text": None}})
    with pytest.raises(CheckpointError, match="does not say its locked: an earlier version wrote it"):
        way(monkeypatch, {key: value for key, value in IDENTITY.items() if key != "locked"})


CONST = ("--lr-scheduler", "const")


@pytest.mark.parametrize(
    ("was", "flags", "follows_length", "refused_for"),
    [
        (5, (*CONST, "--warmup", "5"), None, None),
        (5, CONST, None, None),  # a tenth is no step, in both
        (49, CONST, None, None),  # four, which are done
        (50, CONST, None, "--warmup, by default a tenth"),  # the fifth step was still warm-up, and would not be now
        (5, (), None, "--lr-scheduler cosine"),
        (5, ("--lr-scheduler", "const-cooldown", "--cooldown-steps", "1"), None, "--lr-scheduler const-cooldown"),
        (5, CONST, "gamma_epochs", "gamma_epochs"),
    ],
)
def test_a_run_may_change_its_length_where_nothing_follows_it(monkeypatch, was, flags, follows_length, refused_for):
    def go_on() -> list[str]:
        return way(monkeypatch, IDENTITY | {"total_steps": was}, *flags, follows_length=follows_length)

    if refused_for is None:
        assert go_on() == ["as it was"]
        return
    with pytest.raises(CheckpointError, match=refused_for) as refused:
        go_on()
    assert f"of {was} steps in all and this one has 6" in str(refused.value)
    assert f"--train-steps {was}" in str(refused.value) and "--pretrained" in str(refused.value)
