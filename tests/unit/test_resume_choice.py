"""Which way of loading a continued run takes, and what it refuses before it loads anything."""

from pathlib import Path
from typing import Any

import pytest

from megaclip.engine import resume
from megaclip.errors import CheckpointError

IDENTITY: dict[str, Any] = {
    "world_size": 2,
    "zero_stage": 2,
    "precision": "bf16",
    "zero_layout": {"round_robin_gradients": None, "sub_group_size": None},
    "locked": {"image": None, "text": None},
    "global_batch": 32,
    "data": {},
}


class Loss:
    def load(self, parts: Any) -> None:
        pass


def way(monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any]) -> list[str]:
    """How a checkpoint whose state is `saved` is loaded."""
    taken: list[str] = []
    monkeypatch.setattr(resume.store, "locate", lambda path: (path, "step_00000004"))
    monkeypatch.setattr(resume.store, "read_state", lambda *_: {"step": 4, "samples_consumed": 128, **saved})
    monkeypatch.setattr(resume.store, "read_loss_states", lambda *_: iter(()))
    monkeypatch.setattr(resume, "check_manifest", lambda *_: None)
    monkeypatch.setattr(resume.store, "load", lambda *_: taken.append("as it was"))
    monkeypatch.setattr(resume, "load_resharded", lambda *_, ranks: taken.append(f"by name, of {ranks}"))
    engine: Any = None
    loss: Any = Loss()
    assert resume.resume(engine, loss, IDENTITY, wanted="there", checkpoints=Path("runs")) == (4, 128)
    return taken


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "as it was"),
        ({"world_size": 4}, "by name, of 4"),
        ({"zero_stage": 3}, "by name, of 2"),
        ({"precision": "float32"}, "by name, of 2"),  # DeepSpeed names the files by precision
        # Flat partitions of the same size in another order: loaded as they were, every value would be misplaced.
        ({"zero_layout": {"round_robin_gradients": True, "sub_group_size": None}}, "by name, of 2"),
    ],
)
def test_what_is_divided_otherwise_is_loaded_by_name(monkeypatch, changes, expected):
    assert way(monkeypatch, IDENTITY | changes) == [expected]


def test_other_locks_and_states_that_say_too_little_are_refused(monkeypatch):
    with pytest.raises(CheckpointError, match=r"written with locked\.image 2, this run has None"):
        way(monkeypatch, IDENTITY | {"locked": {"image": 2, "text": None}})
    with pytest.raises(CheckpointError, match="does not say its locked: an earlier version wrote it"):
        way(monkeypatch, {key: value for key, value in IDENTITY.items() if key != "locked"})
