"""The loss of a run with what it needs besides features: sample ids, the epoch, an optimizer and state of its own.

InfoNCE and the sigmoid loss need none of that, and every method here is then nothing or next to nothing. The global
contrastive losses (`megaclip.losses.fastclip`) train a temperature of their own: the model's logit_scale receives a
zero gradient and is no part of the loss; the run writes `log_scale` into it before each checkpoint, so that what is
exported to open_clip carries log(1/tau) (of per-sample temperatures the mean over the last batch).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megaclip.config import MegaclipSection
from megaclip.engine.gradient_cache import ContrastiveLoss
from megaclip.errors import CheckpointError
from megaclip.losses import LOSSES, FastClipLoss
from megaclip.losses.settings import LossSettings


class RunLoss:
    """What `section` asks for, for a dataset of `samples` samples seen for `epochs` epochs."""

    def __init__(self, section: MegaclipSection, *, samples: int, epochs: float, device: torch.device) -> None:
        options: dict[str, Any] = section.model_dump(include=set(LossSettings.model_fields))
        if section.is_global:
            options |= section.fastclip.model_dump(exclude_none=True) | {"samples": samples}
            self._gamma_epochs_are_ours = section.fastclip.gamma_epochs is None
            options.setdefault("gamma_epochs", epochs / 2)  # FastCLIP, section 5: half of the epochs
        self._loss = LOSSES[section.loss](**options).to(device)
        self._global = self._loss if isinstance(self._loss, FastClipLoss) else None

    def bind(self, ids: Callable[[], torch.Tensor], epoch: float) -> ContrastiveLoss:
        """The loss as a function of features and scalars, for the samples `ids()` (b,) int64, in the order of the rows;
        asks for their state, which then travels while the towers run. epoch: epochs done, with their fraction."""
        if self._global is None:
            return self._loss
        loss, ticket = self._global, self._global.fetch(ids())

        def evaluate(
            image_features: torch.Tensor, text_features: torch.Tensor, scale: torch.Tensor, *bias: torch.Tensor
        ) -> torch.Tensor:
            value = loss(image_features, text_features, scale, ids=ticket, epoch=epoch)
            assert isinstance(value, torch.Tensor), "a dictionary was not asked for"
            return value + sum(0.0 * unused.sum() for unused in bias)  # no part of the loss; a zero gradient

        return evaluate

    def update(self, progress: float) -> None:
        """After the model's update: the loss's own. progress: fraction of the training done."""
        if self._global is not None:
            self._global.step(progress)

    @property
    def follows_length(self) -> str | None:
        """The setting of the loss that follows the number of the run's steps, if one does."""
        if self._global is None:
            return None
        if self._global.gamma_schedule == "cosine" and self._gamma_epochs_are_ours:
            return "megaclip.fastclip.gamma_epochs, by default half of the epochs,"
        if self._global.settings.temperature_schedule == "cosine":
            return 'megaclip.fastclip.temperature_schedule "cosine"'
        return None

    @property
    def log_scale(self) -> torch.Tensor | None:
        """The loss's own log(1/tau), (1,) float32; None when the model's logit_scale is trained."""
        return None if self._global is None else self._global.log_scale

    def checkpoint_state(self) -> dict[str, Any] | None:
        """This rank's part of the loss's state, if it has any."""
        return None if self._global is None else self._global.checkpoint_state()

    def load(self, parts: Iterable[dict[str, Any]]) -> None:
        """Go on from the parts of all ranks. Raises CheckpointError when the checkpoint is another loss's."""
        if self._global is not None:
            self._global.load_checkpoint_state(parts)
        elif next(iter(parts), None) is not None:
            raise CheckpointError("the checkpoint holds per-sample state of a global contrastive loss: set its loss")
