"""The loss of a run, with its inputs other than features (sample ids, the epoch) and its own update and state.

InfoNCE and the sigmoid loss require none of these, so for them most methods here do nothing. The global losses
(`megaclip.losses.fastclip`) own the temperature tau and do not use the model's `logit_scale`, which receives a zero
gradient. It only receives log(1/tau) before each checkpoint (`write_scale`), because exports read it there. With
per-sample temperatures that is the mean over the last batch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megaclip.config import MegaclipSection
from megaclip.errors import CheckpointError, ConfigError
from megaclip.losses import LOSSES, FastClipLoss
from megaclip.losses.settings import LossSettings
from megaclip.step.gradient_cache import ContrastiveLoss
from megaclip.zero.logit_scale import LogitScale
from megaclip.zero.weight_average import WeightAverage


class RunLoss:
    """The loss that `section` selects, in a run.

    samples: number of samples of the dataset. epochs, total_steps: length of the run. warmup: its number of warm-up
    steps. Raises ConfigError if the warm-up of the temperature is longer than the run.
    """

    def __init__(
        self,
        section: MegaclipSection,
        *,
        samples: int,
        epochs: float,
        total_steps: int,
        warmup: int,
        device: torch.device,
    ) -> None:
        self._total_steps = total_steps
        options: dict[str, Any] = section.model_dump(include=set(LossSettings.model_fields))
        if section.is_global:
            options |= section.fastclip.model_dump(exclude_none=True) | {"samples": samples}
            self._gamma_epochs_are_default = section.fastclip.gamma_epochs is None
            options.setdefault("gamma_epochs", epochs / 2)  # FastCLIP, section 5: half of the epochs
            options.setdefault("temperature_warmup", warmup)
            if options["temperature_warmup"] > total_steps:
                raise ConfigError(
                    f"megaclip.fastclip.temperature_warmup {options['temperature_warmup']} is longer than the run of "
                    f"{total_steps} steps; set it to {total_steps} or less"
                )
        else:
            options["ids"] = section.same_ids
            options["cuda_graphs"] = False  # the host launches the loss while the GPU still computes the towers
        self._uses_pair_ids = section.same_ids != "ignore"
        self._loss = LOSSES[section.loss](**options).to(device)
        self._global = self._loss if isinstance(self._loss, FastClipLoss) else None

    def bind(
        self, ids: Callable[[], torch.Tensor], epoch: float, pair_ids: Callable[[], torch.Tensor] | None = None
    ) -> ContrastiveLoss:
        """Return the loss as a function of features and scalars, and start to fetch the state of its samples.

        ids: returns the ids (b,) int64 of the samples, in the order of the features' rows. Only losses with per-sample
        state call it. They fetch the state while the towers run.
        epoch: number of completed epochs, as a fraction.
        pair_ids: returns the ids (b,) int64 of equal pairs, after the towers have run. megaclip.same_ids requires it.
        """
        if self._global is None:
            if not self._uses_pair_ids:
                return self._loss
            assert pair_ids is not None, "the loss requires ids"
            return lambda x, *others: self._loss(x, *others, ids=pair_ids().to(x.device))
        loss, ticket = self._global, self._global.state.fetch(ids())  # every rank of a run has equally many ids

        def evaluate(
            image_features: torch.Tensor, text_features: torch.Tensor, scale: torch.Tensor, *bias: torch.Tensor
        ) -> torch.Tensor:
            value = loss(image_features, text_features, scale, ids=ticket, epoch=epoch)
            assert isinstance(value, torch.Tensor), "the loss returns a dictionary only on request"
            return value + sum(0.0 * unused.sum() for unused in bias)  # not used by the loss: a zero gradient

        return evaluate

    def check(self) -> None:
        """Raise NonFiniteError, on every rank, if `update` would raise it. Call it after the loss's backward pass."""
        if self._global is not None:
            self._global.check_step()

    def update(self, step: int) -> None:
        """Update the loss's own parameters and state, after the model's update. step: number of earlier steps."""
        if self._global is not None:
            self._global.step(step, self._total_steps)

    @property
    def length_dependent_setting(self) -> str | None:
        """Setting of the loss whose effect depends on the run's number of steps, or None."""
        if self._global is None:
            return None
        if self._global.gamma_schedule == "cosine" and self._gamma_epochs_are_default:
            return "megaclip.fastclip.gamma_epochs, by default half of the epochs,"
        if self._global.settings.temperature_schedule == "cosine":
            return 'megaclip.fastclip.temperature_schedule "cosine"'
        return None

    def settled_scale(self, logit_scale: LogitScale) -> torch.Tensor:
        """Return log(1/tau), (1,) float32, after an update: the loss's own, or the model's, clamped to its bounds.

        Every rank must call it.
        """
        return logit_scale.clamp_() if self._global is None else self._global.log_scale

    def write_scale(self, logit_scale: LogitScale, average: WeightAverage) -> None:
        """Copy the loss's own log(1/tau) to the model and its average, before a checkpoint. Every rank must call it."""
        if self._global is not None:
            logit_scale.write(self._global.log_scale)
            average.write_log_scale(self._global.log_scale)

    def checkpoint_state(self) -> dict[str, Any] | None:
        """Return this rank's part of the loss's state, or None if the loss has no state."""
        return None if self._global is None else self._global.checkpoint_state()

    def load(self, parts: Iterable[dict[str, Any]]) -> None:
        """Load the state from the parts of all ranks. Raises CheckpointError if the checkpoint is of another loss."""
        if self._global is not None:
            self._global.load_checkpoint_state(parts)
        elif next(iter(parts), None) is not None:
            raise CheckpointError(
                "the checkpoint holds per-sample state of a global contrastive loss; set megaclip.loss to that loss"
            )
