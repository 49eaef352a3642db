"""How long a run is, in steps and in epochs, and what is due in which step: arithmetic on numbers known beforehand."""

from dataclasses import dataclass

from megaclip.config import TrainArguments

DEFAULT_EPOCHS = 32


@dataclass(frozen=True)
class RunLength:
    """The steps of a run over a dataset."""

    samples: int
    """Of the dataset: an epoch."""
    global_batch: int
    total_steps: int

    @classmethod
    def of(cls, arguments: TrainArguments, samples: int, global_batch: int) -> "RunLength":
        """What --train-steps or --epochs asks for."""
        epochs = arguments.epochs or DEFAULT_EPOCHS
        return cls(samples, global_batch, arguments.train_steps or _whole_steps(epochs, samples, global_batch))

    def steps_in(self, epochs: int) -> int:
        """Whole steps in so many epochs, at least 1."""
        return _whole_steps(epochs, self.samples, self.global_batch)

    def epoch_at(self, step: int) -> float:
        """Epochs done after this many steps, with their fraction."""
        return step * self.global_batch / self.samples

    def is_due(self, step: int, every_steps: int | None, every_epochs: int) -> bool:
        """Whether what happens every so many steps, or else epochs (0: never), is due after `step` steps."""
        if every_steps is not None:
            return step % every_steps == 0
        if every_epochs == 0:
            return False
        period = every_epochs * self.samples
        return step * self.global_batch // period > (step - 1) * self.global_batch // period


def _whole_steps(epochs: int, samples: int, global_batch: int) -> int:
    return max(1, epochs * samples // global_batch)
