"""Checkpoints that one process saves through the store. A stand-in for the engine writes two small files."""

from pathlib import Path
from typing import Any

from megaclip.checkpoint import store


class Killed(BaseException):
    """Exception that simulates the end of the process. The store must not catch it."""


class Engine:
    """Engine that writes two files, as DeepSpeed would; both hold `label`."""

    def __init__(self, label: str, dies: bool = False) -> None:
        self.label = label
        self.dies = dies
        self.checkpoint_engine: Any = None
        self.module = None

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool, exclude_frozen_parameters: bool) -> None:
        assert not save_latest, "DeepSpeed's own `latest` is not atomic"
        (Path(folder) / tag).mkdir(parents=True, exist_ok=True)
        self.checkpoint_engine.save({"label": self.label}, str(Path(folder) / tag / "model.pt"))
        if self.dies:
            raise Killed
        self.checkpoint_engine.save({"label": self.label}, str(Path(folder) / tag / "optimizer.pt"))


def save(
    folder: Path, step: int, label: str = "", *, dies: bool = False, keep_last: int = 2, run: str = "", **options: Any
) -> str:
    engine: Any = Engine(label, dies)
    return store.save(engine, store.Target(folder, step, {"step": step, "label": label}, keep_last, run=run, **options))
