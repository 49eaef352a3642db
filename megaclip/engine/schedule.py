"""The length of a run, the steps at which it saves and evaluates, and the learning rate of each step.

Everything here is arithmetic on the size of the dataset, the batch size and the command line, and keeps no state. So a
resumed run needs only its step number. The learning rates are open_clip's: constant, cosine, and constant with a
cooldown. The cosine can end above 0, as in FastCLIP's published code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megaclip.config import TrainArguments
from megaclip.config.command_line import DEFAULT_EPOCHS, LONGEST_DEFAULT_WARMUP
from megaclip.errors import ConfigError
from megaclip.logging import format_count, get_logger

logger = get_logger(__name__)

Schedule = Callable[[int], float]
"""Function of the step (0-based, the step about to be taken) that returns the factor of the peak learning rate."""


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
        return cls(samples, global_batch, arguments.train_steps or whole_steps(epochs, samples, global_batch))

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


def whole_steps(epochs: int, samples: int, global_batch: int) -> int:
    """Return the number of whole steps in this many epochs, at least 1."""
    return max(1, epochs * samples // global_batch)


def default_warmup(total_steps: int) -> int:
    """Return the number of warm-up steps when --warmup is not given, at most a tenth of the run."""
    return min(LONGEST_DEFAULT_WARMUP, total_steps // 10)


def chosen_warmup(arguments: TrainArguments, length: RunLength) -> int:
    """Return the number of warm-up steps of a run. Raises ConfigError if the run is shorter."""
    total_steps, warmup = length.total_steps, arguments.warmup
    if warmup is None:
        return default_warmup(total_steps)
    if warmup > total_steps:
        raise ConfigError(
            f"--warmup {warmup} is longer than the run of {format_count(total_steps, 'step')}; set --warmup "
            f"{total_steps} or less"
        )
    return warmup


def chosen_schedule(arguments: TrainArguments, length: RunLength, peak_rate: float) -> Schedule:
    """Return the schedule that the command line specifies.

    Raises:
        ConfigError: the warm-up is longer than the run, warm-up and cooldown together are longer than the run, or the
            last learning rate is above the peak.
    """
    total_steps, warmup = length.total_steps, chosen_warmup(arguments, length)
    if arguments.warmup is None and warmup < LONGEST_DEFAULT_WARMUP:
        logger.info("warm-up of %d steps, a tenth of the run; change it with --warmup", warmup)
    if arguments.lr_scheduler == "const":
        return _with_decay(warmup, math.inf, math.inf, 1.0, lambda progress: 1.0)
    if arguments.lr_scheduler == "cosine":
        _check_last_rate("--lr-min", arguments.lr_min, peak_rate)
        end_factor = arguments.lr_min / peak_rate
        return _with_decay(
            warmup, warmup, total_steps, end_factor, lambda progress: 0.5 * (1 + math.cos(math.pi * progress))
        )
    cooldown_epochs = arguments.epochs_cooldown or 1
    cooldown_steps = arguments.cooldown_steps or whole_steps(cooldown_epochs, length.samples, length.global_batch)
    if warmup + cooldown_steps > total_steps:
        raise ConfigError(
            f"a warm-up of {warmup} steps and a cooldown of {cooldown_steps} steps are together longer than the run of "
            f"{total_steps} steps; reduce --warmup, or --cooldown-steps or --epochs-cooldown"
        )
    _check_last_rate("--lr-cooldown-end", arguments.lr_cooldown_end, peak_rate)
    end_factor = arguments.lr_cooldown_end / peak_rate
    start, power = total_steps - cooldown_steps, arguments.lr_cooldown_power
    return _with_decay(warmup, start, total_steps, end_factor, lambda progress: (1 - progress) ** power)


def _check_last_rate(flag: str, rate: float, peak_rate: float) -> None:
    if rate > peak_rate:
        raise ConfigError(
            f"{flag} {rate} is above the peak learning rate optimizer.params.lr, {peak_rate}; set {flag} {peak_rate} "
            "or less"
        )


def _with_decay(
    warmup_steps: int, start: float, end: float, end_factor: float, decay: Callable[[float], float]
) -> Schedule:
    """Return a linear warm-up, then 1 until step `start`, then `decay` of the progress to `end`, above `end_factor`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if step < start:
            return 1.0
        return end_factor + (1 - end_factor) * decay(min(1.0, (step - start) / max(1, end - start)))

    return factor
