"""The best checkpoint of a run, by the main score of its evaluations.

The main score is `zero_shot_top1` if the run evaluates zero-shot classification, else the mean of `retrieval_r1_i2t`
and `retrieval_r1_t2i`. Only evaluations at a step that has a checkpoint count. The record is `best_checkpoint.json` in
the run's folder. `checkpoint.store.save` keeps the checkpoint that it names, whatever --keep-last is.
"""

import contextlib
import math
import shlex
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from megaclip.checkpoint.durable import read_text
from megaclip.checkpoint.search import TAG_PATTERN, run_of, step_of, tag_of
from megaclip.config import TrainArguments
from megaclip.files import write_atomically
from megaclip.logging import get_logger

logger = get_logger(__name__)

FILE = "best_checkpoint.json"
_RETRIEVAL = ("retrieval_r1_i2t", "retrieval_r1_t2i")


class _Data(BaseModel):
    """Flags of the command line that specify the evaluation. Scores are compared only if these flags are equal."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    val_data: list[str]
    group_captions: bool
    zeroshot_data: str | None
    eval_ema: bool = False


class _Record(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    checkpoint: str = Field(pattern=f"^{TAG_PATTERN}$")
    """Name of the checkpoint, such as "step_00000100"."""
    main_score: str
    """Name of the score that ranks checkpoints."""
    value: float
    scores: dict[str, float]
    """All finite scores of the evaluation, by name."""
    data: _Data


def main_score(scores: dict[str, float]) -> tuple[str, float]:
    """Return name and value of the score that ranks checkpoints. Higher is better."""
    if "zero_shot_top1" in scores:
        return "zero_shot_top1", scores["zero_shot_top1"]
    return "mean of " + " and ".join(_RETRIEVAL), sum(scores[name] for name in _RETRIEVAL) / len(_RETRIEVAL)


class BestCheckpoint:
    """The best checkpoint of the run in a folder. Only the first rank uses it."""

    def __init__(self, folder: Path, arguments: TrainArguments) -> None:
        """
        Args:
            folder: the run's folder.
            arguments: the command line; its evaluation data are recorded.
        """
        self._folder = folder
        self._file = folder / FILE
        self._data = _Data.model_validate(arguments.model_dump(include=set(_Data.model_fields)))
        self._run = ""
        self._record: _Record | None = None

    @property
    def tag(self) -> str | None:
        """Name of the best checkpoint. None: no evaluation has counted yet."""
        return None if self._record is None else self._record.checkpoint

    def resume(self, step: int, run: str) -> None:
        """Read the record of an earlier process of this run. Delete the file if it no longer applies.

        The record no longer applies if its checkpoint is missing or belongs to another run. Nor does it apply if the
        run resumes from an earlier step or evaluates on other data.

        Args:
            step: number of steps that are done.
            run: identifier that the run's checkpoints record.
        """
        self._run = run
        record = None
        with contextlib.suppress(OSError, ValueError):
            record = _Record.model_validate_json(read_text(self._file))
        if record is not None and self._applies(record, step):
            self._record = record
        elif self._file.exists():
            self._file.unlink()
            logger.info("%s no longer applies to this run and was deleted", self._file)

    def _applies(self, record: _Record, step: int) -> bool:
        same_data = record.data == self._data or not (self._data.val_data or self._data.zeroshot_data)
        return self._is_saved(record.checkpoint) and step_of(record.checkpoint) <= step and same_data

    def _is_saved(self, tag: str) -> bool:
        """Return whether this run has written checkpoint `tag` completely."""
        return run_of(self._folder / "checkpoints", tag) == self._run

    def evaluated(self, step: int, scores: dict[str, float]) -> None:
        """Write the record if `step` has a checkpoint and its score is higher than all earlier scores.

        Raises:
            OSError: the file cannot be written.
        """
        name, score = main_score(scores)
        tag = tag_of(step)
        if not math.isfinite(score) or not self._is_saved(tag):
            return
        if self._record is None or score > self._record.value:
            finite = {key: value for key, value in scores.items() if math.isfinite(value)}
            self._record = _Record(checkpoint=tag, main_score=name, value=score, scores=finite, data=self._data)
            write_atomically(self._file, self._record.model_dump_json(indent=1))

    def report(self) -> None:
        """Log the best checkpoint and the command that exports it."""
        if self._record is not None:
            logger.info(
                "best checkpoint: %s with %s %.4f. To export it: megaclip export %s OUT_DIR --tag %s%s --verify",
                self._record.checkpoint,
                self._record.main_score,
                self._record.value,
                shlex.quote(str(self._folder)),
                self._record.checkpoint,
                " --ema" * self._record.data.eval_ema,
            )
