"""The length of a run in steps and epochs, and the steps at which it saves and evaluates.

Everything here is arithmetic on the size of the dataset, the batch size and the command line.
"""

from dataclasses import dataclass

from megaclip.config import TrainArguments

DEFAULT_EPOCHS = 32
"""Number of epochs when neither --train-steps nor --epochs is given."""


@dataclass(frozen=True)
class RunLength:
    """Length of a run over one dataset."""

    samples: int
    """Number of samples in the dataset, which is the length of an epoch."""
    global_batch: int
    """Number of samples per step, over all ranks."""
    total_steps: int
    """Number of optimizer steps of the whole run."""

    @classmethod
    def of(cls, arguments: TrainArguments, samples: int, global_batch: int) -> "RunLength":
        """Return the length that --train-steps or --epochs specifies."""
        epochs = arguments.epochs or DEFAULT_EPOCHS
        return cls(samples, global_batch, arguments.train_steps or _whole_steps(epochs, samples, global_batch))

    def steps_in(self, epochs: int) -> int:
        """Return the number of whole steps in this many epochs, at least 1."""
        return _whole_steps(epochs, self.samples, self.global_batch)

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs completed after this many steps, as a fraction."""
        return step * self.global_batch / self.samples

    def is_due(self, step: int, every_steps: int | None, every_epochs: int) -> bool:
        """Return whether a periodic action is due after `step` steps.

        every_steps: its period in steps. None: use `every_epochs`, its period in epochs, where 0 means never.
        """
        if every_steps is not None:
            return step % every_steps == 0
        if every_epochs == 0:
            return False
        period = every_epochs * self.samples
        return step * self.global_batch // period > (step - 1) * self.global_batch // period


def _whole_steps(epochs: int, samples: int, global_batch: int) -> int:
    return max(1, epochs * samples // global_batch)
