"""Learning-rate schedules as plain functions of the step, with open_clip's three shapes.

Nothing is remembered between steps, so a resumed run needs only its step number.
"""

import math
from collections.abc import Callable

from megaclip.config import TrainArguments
from megaclip.engine.run_length import RunLength
from megaclip.errors import ConfigError
from megaclip.logging import get_logger

logger = get_logger(__name__)

Schedule = Callable[[int], float]
"""step (0-based, the one about to be taken) -> factor of the peak learning rate."""


LONGEST_DEFAULT_WARMUP = 10_000


def default_warmup(total_steps: int) -> int:
    """Steps of warm-up where none are asked for: open_clip's 10,000, at most a tenth of the run."""
    return min(LONGEST_DEFAULT_WARMUP, total_steps // 10)


def chosen_schedule(arguments: TrainArguments, length: RunLength, peak_rate: float) -> Schedule:
    """The schedule that the command line asks for. Raises ConfigError if its parts are longer than the run."""
    total_steps, warmup = length.total_steps, arguments.warmup
    if warmup is None:
        warmup = default_warmup(total_steps)
        if warmup < LONGEST_DEFAULT_WARMUP:
            logger.info("warm-up of %d steps, a tenth of the run's; --warmup changes it", warmup)
    if warmup > total_steps:
        raise ConfigError(f"--warmup {warmup} is longer than the run's {total_steps} steps")
    if arguments.lr_scheduler == "const":
        return constant(warmup)
    if arguments.lr_scheduler == "cosine":
        return cosine(warmup, total_steps)
    cooldown_steps = arguments.cooldown_steps or length.steps_in(arguments.epochs_cooldown or 1)
    if warmup + cooldown_steps > total_steps:
        raise ConfigError(
            f"a warm-up of {warmup} steps and a cooldown of {cooldown_steps} are longer together than the run's "
            f"{total_steps}"
        )
    end_factor = arguments.lr_cooldown_end / peak_rate
    return constant_with_cooldown(warmup, total_steps, cooldown_steps, arguments.lr_cooldown_power, end_factor)


def _warmed_up(warmup_steps: int, after: Schedule) -> Schedule:
    return lambda step: (step + 1) / warmup_steps if step < warmup_steps else after(step)


def constant(warmup_steps: int) -> Schedule:
    """Linear warm-up over `warmup_steps`, then 1."""
    return _warmed_up(warmup_steps, lambda step: 1.0)


def cosine(warmup_steps: int, total_steps: int) -> Schedule:
    """Linear warm-up, then half a cosine from 1 to 0 at `total_steps`."""
    decay_steps = max(1, total_steps - warmup_steps)
    return _warmed_up(
        warmup_steps, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup_steps) / decay_steps)))
    )


def constant_with_cooldown(
    warmup_steps: int, total_steps: int, cooldown_steps: int, power: float, end_factor: float
) -> Schedule:
    """Linear warm-up, 1, then over the last `cooldown_steps` a polynomial decay of degree `power` to `end_factor`."""
    start = total_steps - cooldown_steps

    def after(step: int) -> float:
        if step < start:
            return 1.0
        remaining = 1 - min(1.0, (step - start) / cooldown_steps)
        return end_factor + (1 - end_factor) * remaining**power

    return _warmed_up(warmup_steps, after)
