"""Resume: which checkpoints are loaded, and which are refused before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaclip.config import parse_arguments
from megaclip.engine import resume
from megaclip.errors import CheckpointError, MegaclipError

IDENTITY: dict[str, Any] = {
    "world_size": 2,
    "tensor_parallel_size": 1,
    "zero_stage": 2,
    "precision": "bf16",
    "locked": {"image": None, "text": None},
    "global_batch": 32,
    "order_version": 2,
    "total_steps": 6,
    "data": {},
}
STATE = {"step": 4, "samples_consumed": 128, "image_decoder": "simplejpeg and torch"}
DECODING = SimpleNamespace(libraries="simplejpeg and torch")

LOADED = [Path("there") / "step_00000004"]
REQUIRED = ["--deepspeed_config", "c.json", "--model", "ViT-B-32", "--train-data", "a.tar"]


def load(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], *flags: str, loss_setting: str | None = None
) -> list[Path]:
    """Resume from a checkpoint whose state is `saved` and return the folders that were loaded."""
    arguments = parse_arguments([*REQUIRED, "--resume", "there", *flags])
    loaded: list[Any] = []
    monkeypatch.setattr(resume.search, "locate", lambda path: (path, "step_00000004"))
    monkeypatch.setattr(resume.search, "require_whole", lambda *_: None)
    monkeypatch.setattr(resume.store, "read_state", lambda *_: {**STATE, **saved})
    monkeypatch.setattr(resume.store, "read_loss_states", lambda *_: iter(()))
    monkeypatch.setattr(resume, "check_manifest", lambda *_: None)
    monkeypatch.setattr(resume, "load_checkpoint", lambda engine, folder: loaded.append(folder))
    loss = SimpleNamespace(length_dependent_setting=loss_setting, own=None)
    trainer: Any = SimpleNamespace(engine=None, loss=loss, arguments=arguments, decoding=DECODING)
    trainer.resumed = lambda *taken: loaded.append(taken)
    folder, _ = resume.resume(trainer, IDENTITY, Path("runs"))
    assert loaded[:1] == [folder] and loaded.pop() == (4, saved.get("log_scale_max", 0.0))
    return loaded


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"log_scale_max": 4.76},
        {"world_size": 4},
        {"zero_stage": 3},
        {"tensor_parallel_size": 2},
        {"precision": "float32"},
    ],
)
def test_another_partitioning_is_accepted(monkeypatch, changes):
    assert load(monkeypatch, IDENTITY | changes) == LOADED


def test_other_locks_and_incomplete_states_are_refused(monkeypatch):
    with pytest.raises(CheckpointError, match=r"written with locked\.image 2, and this run has None"):
        load(monkeypatch, IDENTITY | {"locked": {"image": 2, "text": None}})
    with pytest.raises(
        CheckpointError, match="does not record locked, because an earlier version of MegaCLIP wrote it"
    ):
        load(monkeypatch, {key: value for key, value in IDENTITY.items() if key != "locked"})


@pytest.mark.parametrize(
    ("was", "warned"), [(IDENTITY, ""), (IDENTITY | {"image_decoder": "Pillow"}, "by Pillow, and now by simplejpeg")]
)
def test_another_image_decoder_is_accepted_with_a_warning(monkeypatch, caplog, was, warned):
    with caplog.at_level("WARNING"):
        assert load(monkeypatch, was) == LOADED
    assert warned in caplog.text and bool(caplog.text) == bool(warned)


JUNK: list[Any] = [None, -1, 0.5, True, "x", [], {}, [[]], {"sources": 3}, {"sources": [{}], "weights": None}]


@pytest.mark.parametrize("key", ["step", "image_decoder", *IDENTITY])
def test_any_content_of_state_json_ends_in_one_readable_error(monkeypatch, key):
    """Any content of state.json must be accepted, or refused with an error for users, before anything is loaded."""
    monkeypatch.setattr(resume, "_find_checkpoint", lambda *_: (Path("runs"), "step_00000004"))
    identity = {**IDENTITY, "data": {"sources": [{"type": "tar", "files": [["a", 1, 1]]}], "weights": None}}
    loss = SimpleNamespace(length_dependent_setting=None, own=None)
    arguments = parse_arguments([*REQUIRED, "--resume", "there"])
    trainer: Any = SimpleNamespace(
        engine=None, loss=loss, arguments=arguments, decoding=DECODING, resumed=lambda *_: None
    )
    refused = 0
    for junk in JUNK:
        state = {**STATE, **identity, key: junk}
        monkeypatch.setattr(resume.store, "read_state", lambda *_, state=state: state)
        monkeypatch.setattr(resume, "load_checkpoint", lambda *_: None)
        monkeypatch.setattr(resume.store, "read_loss_states", lambda *_: iter(()))
        try:
            resume.resume(trainer, identity, Path("runs"))
        except MegaclipError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused >= len(JUNK) - 1 or key in (*resume._PARTITIONING, "image_decoder")  # these may differ in any way


CONST = ("--lr-scheduler", "const")


def test_a_host_that_cannot_read_the_state_gets_one_readable_error(monkeypatch):
    class Unreadable:
        def keys(self) -> Any:
            raise FileNotFoundError("no state.json")

    with pytest.raises(
        CheckpointError, match=r"cannot read state\.json of .* no state\.json; copy the whole checkpoint"
    ):
        load(monkeypatch, Unreadable())  # type: ignore[arg-type]  # no dict, so that reading it raises


@pytest.mark.parametrize(
    ("was", "flags", "loss_setting", "refused_for"),
    [
        (5, (*CONST, "--warmup", "5"), None, None),
        (5, CONST, None, None),  # a tenth of the steps is less than one step in both runs
        (49, CONST, None, None),  # four warm-up steps, all before the checkpoint
        (50, CONST, None, "the default of --warmup"),  # the fifth step was a warm-up step in the first run only
        (5, (), None, "--lr-scheduler cosine"),
        (5, ("--lr-scheduler", "const-cooldown", "--cooldown-steps", "1"), None, "--lr-scheduler const-cooldown"),
        (5, CONST, "gamma_epochs", "gamma_epochs"),
    ],
)
def test_the_length_may_change_if_no_setting_depends_on_it(monkeypatch, was, flags, loss_setting, refused_for):
    def resume_shorter_or_longer() -> list[Path]:
        return load(monkeypatch, IDENTITY | {"total_steps": was}, *flags, loss_setting=loss_setting)

    if refused_for is None:
        assert resume_shorter_or_longer() == LOADED
        return
    with pytest.raises(CheckpointError, match=refused_for) as refused:
        resume_shorter_or_longer()
    assert f"of {was} steps in all and this run has 6" in str(refused.value)
    assert f"--train-steps {was}" in str(refused.value) and "--pretrained" in str(refused.value)
