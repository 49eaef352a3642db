"""The loss of a run, with its inputs other than features (sample ids, the epoch) and its own update and state.

InfoNCE and the sigmoid loss require none of these. The global losses (`megaclip.losses.fastclip`) own the temperature
tau and do not use the model's `logit_scale`, which receives a zero gradient.
"""

from collections.abc import Callable
from typing import Any

import torch

from megaclip.config import MegaclipSection
from megaclip.engine.schedule import RunLength
from megaclip.errors import ConfigError
from megaclip.losses import LOSSES, FastClipLoss
from megaclip.losses.settings import LossSettings
from megaclip.step.gradient_cache import ContrastiveLoss


class RunLoss:
    """The loss that `section` selects, in a run.

    warmup: the run's number of warm-up steps. Raises ConfigError if the warm-up of the temperature is longer than the
    run.
    """

    def __init__(self, section: MegaclipSection, length: RunLength, warmup: int, device: torch.device) -> None:
        options: dict[str, Any] = section.model_dump(include=set(LossSettings.model_fields))
        if section.is_global:
            options |= section.fastclip.model_dump(exclude_none=True) | {"samples": length.samples}
            self._gamma_epochs_are_default = section.fastclip.gamma_epochs is None
            half = length.epoch_at(length.total_steps) / 2  # FastCLIP, section 5: half of the epochs
            options = {"gamma_epochs": half, "temperature_warmup": warmup} | options
            if options["temperature_warmup"] > length.total_steps:
                raise ConfigError(
                    f"megaclip.fastclip.temperature_warmup {options['temperature_warmup']} is longer than the run of "
                    f"{length.total_steps} steps; set it to {length.total_steps} or less"
                )
        else:
            options["ids"] = section.same_ids
            options["cuda_graphs"] = False  # the host launches the loss while the GPU still computes the towers
        self._uses_pair_ids = section.same_ids != "ignore"
        self._loss = LOSSES[section.loss](**options).to(device)
        self.own = self._loss if isinstance(self._loss, FastClipLoss) else None
        """The loss if it is global: it has a temperature, per-sample state and an update of its own."""

    def bind(
        self, ids: Callable[[], torch.Tensor], epoch: float, pair_ids: Callable[[], torch.Tensor] | None = None
    ) -> ContrastiveLoss:
        """Return the loss as a function of features and scalars, and start to fetch the state of its samples.

        ids: returns the ids (b,) int64 of the samples, in the order of the features' rows. Only losses with per-sample
        state call it. They fetch the state while the towers run.
        epoch: number of completed epochs, as a fraction.
        pair_ids: returns the ids (b,) int64 of equal pairs, after the towers have run. megaclip.same_ids requires it.
        """
        if self.own is None:
            if not self._uses_pair_ids:
                return self._loss
            assert pair_ids is not None, "the loss requires ids"
            return lambda x, *others: self._loss(x, *others, ids=pair_ids().to(x.device))
        loss, ticket = self.own, self.own.state.fetch(ids())  # every rank of a run has equally many ids

        def evaluate(
            image_features: torch.Tensor, text_features: torch.Tensor, scale: torch.Tensor, *bias: torch.Tensor
        ) -> torch.Tensor:
            value = loss(image_features, text_features, scale, ids=ticket, epoch=epoch)
            assert isinstance(value, torch.Tensor), "the loss returns a dictionary only on request"
            return value + sum(0.0 * unused.sum() for unused in bias)  # not used by the loss: a zero gradient

        return evaluate

    @property
    def length_dependent_setting(self) -> str | None:
        """Setting of the loss whose effect depends on the run's number of steps, or None."""
        if self.own is None:
            return None
        if self.own.gamma_schedule == "cosine" and self._gamma_epochs_are_default:
            return "megaclip.fastclip.gamma_epochs, by default half of the epochs,"
        if self.own.settings.temperature_schedule == "cosine":
            return 'megaclip.fastclip.temperature_schedule "cosine"'
        return None
