"""Exponential moving average of the trained weights (`megaclip.ema_decay`).

After each successful update, average = decay * average + (1 - decay) * weights. It starts from the weights before the
first update (Polyak and Juditsky 1992; timm's ModelEma). The weights are the float32 masters, including the clamped
logit scale. At every ZeRO stage each rank averages its own part of the masters, on the device that holds them: the GPU,
or host memory with offload_optimizer.

The averages are entries of the optimizer's state, beside its moments. So DeepSpeed saves and loads them, and
`megaclip.checkpoint` converts them for any number of ranks. Running statistics of batch norms, which are averages
already, are not averaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint.saved_states import EMA
from megaclip.errors import DataError
from megaclip.logging import get_logger, log_once
from megaclip.zero.masters import flat_groups, publish_masters

logger = get_logger(__name__)

_EXCHANGED_AT_ONCE = 1 << 24
"""Number of elements of a master and its average that are swapped at a time. It bounds the additional memory."""


class WeightAverage:
    """One rank's part of the moving averages."""

    def __init__(self, engine: DeepSpeedEngine, decay: float | None) -> None:
        """decay: None for no average. Averages of a loaded checkpoint are then removed from the optimizer's state."""
        self._engine = engine
        self._optimizer = engine.basic_optimizer
        self._decay = decay
        groups = list(flat_groups(engine)) if decay is not None else []
        self._masters = [group.flat for group in groups]
        self._of_scale = [{slot.name for slot in group.slots} == {"logit_scale"} for group in groups]
        # Optimizers initialise a state that is empty, in their first step. So the averages are added to it after that
        # step.
        self._pending = [master.detach().clone() for master in self._masters]
        if decay is not None:
            logger.info("weights: moving average with decay %g, saved in checkpoints", decay)

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average, after a successful update."""
        if self._decay is None:
            return
        state = self._optimizer.state
        for index, master in enumerate(self._masters):
            # SGD without momentum never has a state. Other optimizers have none for parameters without a gradient.
            if EMA not in state[master] and (state[master] or isinstance(self._optimizer, torch.optim.SGD)):
                state[master][EMA] = self._pending[index]
                self._pending[index] = torch.empty(0)
        torch._foreach_lerp_(self._averages(), [master.detach() for master in self._masters], 1 - self._decay)

    @torch.no_grad()
    def loaded(self, step: int) -> None:
        """Take the averages of a checkpoint that the engine has loaded. step: its number of steps."""
        if self._decay is None:
            for values in self._optimizer.state.values():
                values.pop(EMA, None)
            return
        missing = 0
        for index, master in enumerate(self._masters):
            if EMA in self._optimizer.state.get(master, {}):
                self._pending[index] = torch.empty(0)
            else:
                self._pending[index] = master.detach().clone()
                missing += 1
        if missing == len(self._masters) and step:
            text = f"the checkpoint has no moving average; the average starts from the weights of step {step}"
            log_once(logger.warning, text)

    @torch.no_grad()
    def write_log_scale(self, value: torch.Tensor) -> None:
        """Set the average of `logit_scale` to a loss's own scale, (1,), before a checkpoint."""
        for average, is_scale in zip(self._averages(), self._of_scale, strict=True):
            if is_scale:
                average.fill_(value.item())

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Use the averages as the model's weights in the body of the `with` statement. All ranks must enter it.

        Masters and averages are swapped and swapped back, so both have the same bits afterwards. After a DataError they
        are swapped back too, because all ranks raise it and the run then saves. After any other error they are not,
        because it may have occurred on one rank only, and the run does not save.
        """
        self._exchange()
        try:
            yield
        except DataError:
            self._exchange()
            raise
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for master, average in zip(self._masters, self._averages(), strict=True):
            parts = (whole.detach().view(-1).split(_EXCHANGED_AT_ONCE) for whole in (master, average))
            for one, other in zip(*parts, strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
        publish_masters(self._engine)

    def _averages(self) -> list[torch.Tensor]:
        """Return the averages in the order of the masters."""
        states = [self._optimizer.state.get(master, {}) for master in self._masters]
        return [state.get(EMA, pending) for state, pending in zip(states, self._pending, strict=True)]
