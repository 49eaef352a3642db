"""Global losses: contrast every sample with the whole dataset.

The losses keep a running estimate of each sample's normaliser and update it with every batch. For a sample i with
s_ij = <x_i, y_j> (FastCLIP, Wei et al. 2024, arXiv:2407.01445, section 3; SogCLR, Yuan et al. 2022, arXiv:2202.12387;
iSogCLR, Qiu et al. 2023, arXiv:2305.11965):

    g1_i = 1/(B-1) sum_{j != i} exp((s_ij - s_ii)/tau)       of the batch; g2_i over columns
    u_i <- (1-gamma) u_i + gamma g_i                         FastCLIP, equation 1; a sample's first batch gives u = g
    gradient = 1/B sum_i c_i (grad g1_i/(eps+u1_i) + grad g2_i/(eps+u2_i))

g1 belongs to the image side (image i against all texts), g2 to the text side (text i against all images); u1 and u2
are their running estimates. gamma is the inner learning rate, c_i the factor of sample i in the table below, rho the
weight of the temperature in the objective, and eps a small constant that is added to u.

| variant     | c_i   | temperature          | estimates the gradient of                       | gamma    |
| sogclr      | tau   | constant             | tau mean(log(eps+g1) + log(eps+g2))             | constant |
| isogclr     | tau_i | learned, per sample  | mean(tau_i (log(eps+g) + rho)), both sides      | constant |
| fastclip_v0 | 1     | learned, global      | mean(log(eps+g1) + log(eps+g2))                 | cosine   |
| fastclip_v1 | tau   | constant             | as sogclr                                       | cosine   |
| fastclip_v2 | tau_i | learned, per sample  | as isogclr                                      | cosine   |
| fastclip_v3 | tau   | learned, global      | tau mean(log(eps+g1) + log(eps+g2)) + 2 rho tau | cosine   |

Losses with a temperature per sample have two per sample: one for the image side and one for the text side.

The state holds log u, and log g is computed as a log-sum-exp without the positive, so nothing overflows at any
temperature. Each rank needs the memory of one tile of logits and of n/W rows of state. n = 414 M samples need, in
float32:

| state                                   | all ranks | each of 64 ranks |
| log u (all variants), 2 columns         | 3.3 GB    | 52 MB            |
| isogclr, fastclip_v2, 9 columns         | 14.9 GB   | 233 MB           |

FastCLIP's published code stores 3.3 GB and, for v2, 16.6 GB on every rank.

The reduction contract is that of `megaclip.losses.clip`: the backward pass of each rank returns W times the gradients
of the local features, and the whole gradient of the global temperature.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip.comm.collectives import gather_integers, raise_on_all_ranks
from megaclip.comm.groups import resolve
from megaclip.devices import upload
from megaclip.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from megaclip.losses.agreement import check_features
from megaclip.losses.batch_loss import BatchLoss, with_unused
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.estimators import SampleState, Ticket, check_ids, mean_per_row
from megaclip.losses.global_contrastive import GlobalContrastive, Step
from megaclip.losses.settings import VARIANTS, StandaloneFastClipSettings
from megaclip.losses.sums import LossInputs
from megaclip.losses.temperature import (
    U_COLUMNS,
    GlobalTemperature,
    individual_columns,
    scheduled_rate,
    step_individual,
)
from megaclip.losses.way import make_way
from megaclip.ops.types import accumulation_dtype

_GAMMA_EPOCHS = 18.0  # default outside of a MegaCLIP run, as in ds_configs/fastclip_v3.json


def inner_rate(schedule: str, epoch: float, *, minimum: float, epochs: float) -> float:
    """Return gamma, the inner learning rate (FastCLIP, section 4).

    schedule: "constant" is 1 in the first epoch and then `minimum`. "cosine" is half a cosine from 1 to `minimum` over
    `epochs`.
    epoch: number of completed epochs. Whole numbers give the published per-epoch schedule, fractions a per-step
    schedule.
    """
    if epoch == 0 or (schedule == "constant" and epoch < 1):
        return 1.0
    if schedule == "constant" or epoch >= epochs:
        return minimum
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs)) * (1 - minimum) + minimum


class FastClipLoss(BatchLoss):
    """A global loss of the table above, with its temperature, its state and their updates.

    A step is `loss(image_features, text_features, ids=..., epoch=...)`, `backward()`, `step()`. Only `step()` changes
    the state and the temperature. The next call of the loss discards a step that was not finished by `step()`. With
    gradient accumulation, call `step()` after every backward pass. A factor of the loss, such as GradScaler's, a second
    backward pass and `zero_grad()` have no effect on the state and the temperature.

    `state_dict()` does not contain the samples' state. To resume, save `checkpoint_state()` of every rank, and pass all
    of them to `load_checkpoint_state()`.

    variant: a key of `VARIANTS`. samples: number n of samples of the dataset; sample ids are 0 to n-1.
    group: as in `BatchLoss`. state_dtype: dtype of the per-sample state. 16-bit dtypes are accepted only without
    per-sample temperatures.
    settings: fields of `megaclip.losses.settings.StandaloneFastClipSettings`, which documents them.

    Raises ConfigError, a ValueError, for a wrong value, and TypeError for an unknown name.
    """

    settings_model = StandaloneFastClipSettings
    settings: StandaloneFastClipSettings

    def __init__(
        self,
        variant: str = "fastclip_v3",
        *,
        samples: int,
        group: Any = None,
        state_dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        super().__init__(group=group, variant=variant, samples=samples, **settings)
        chosen, rule = self.settings, VARIANTS[variant]
        self.gamma_schedule = rule.gamma_schedule if chosen.gamma_schedule == "auto" else chosen.gamma_schedule
        self.gamma_epochs = chosen.gamma_epochs or _GAMMA_EPOCHS
        self.individual = rule.individual
        if not state_dtype.is_floating_point or (self.individual and state_dtype.itemsize < 4):
            raise ConfigError(
                f"state_dtype is {state_dtype}; expected torch.float32 or torch.float64, because other formats lose "
                f"small updates of the state of {variant}: set one of them"
            )
        self.temperature = GlobalTemperature(chosen, learnable=rule.temperature == "global")
        on_accelerator = chosen.state_device == "accelerator"
        self.state = SampleState(
            {**U_COLUMNS, **(individual_columns(chosen.temperature) if self.individual else {})},
            fetched=4 if self.individual else 2,
            samples=samples,
            group=group,
            dtype=state_dtype,
            device=get_accelerator().current_device_name() if on_accelerator else "cpu",
        )
        self._pending: Step | None = None

    def fetch(self, ids: Tensor) -> Ticket:
        """Start to fetch the state of the samples with these ids, (b,) int64. Pass the result to the loss as `ids`.

        Every rank must call it. Raises DataError, a ValueError, on all ranks for ids that do not fit.
        """
        ranks = resolve(self.group)
        with raise_on_all_ranks(group=ranks):
            check_ids(ids)
        counts = [count for (count,) in gather_integers([len(ids)], group=ranks)]
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise DataError(
                    f"rank 0 has {counts[0]} ids and rank {rank} has {count}; expected one number on all ranks: give "
                    "every rank the same local batch, and drop a shorter last one"
                )
        return self.state.fetch(ids)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        *,
        ids: Tensor | Ticket,
        epoch: float,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the batch's estimate of the objective, equal on all ranks: () float32, float64 for float64 features.

        image_features, text_features: (b, D) of unit length.
        logit_scale: the model's logit_scale. It has no effect and receives a zero gradient.
        ids: (b,) int64 ids of the samples, or the result of `fetch` for them.
        epoch: number of completed epochs, as a fraction.

        Every rank must call it. Raises DataError, a ValueError, on all ranks for ids, features or an epoch that do not
        fit. float16 features are refused, because gradients at a low temperature are below the smallest float16.
        """
        if torch.compiler.is_compiling():  # the following step() reads what this call stores
            from megaclip.losses.uncompiled import call  # slow to import

            options = {"ids": ids, "epoch": epoch, "output_dict": output_dict}
            return call(self.forward, image_features, text_features, logit_scale, **options)
        ranks = resolve(self.group)
        own_scale = self.temperature.log_scale.detach().exp()
        tensors = (image_features, text_features, self.temperature.log_scale)
        gradients = torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)
        call = {"requires_grad": gradients, "training": self.training, "epoch": epoch}
        inputs = LossInputs(image_features, text_features, own_scale)
        check_features(inputs, settings=self.settings, ranks=ranks, **call)
        if len(image_features) * ranks.size < 2:
            raise DataError("the batch of all ranks is 1 sample, which has no negatives; expected at least 2 samples")
        with raise_on_all_ranks(group=ranks):
            _check_arguments(image_features, ids, epoch)
        ticket = ids if isinstance(ids, Ticket) else self.state.fetch(ids)
        cost = LOSS_COSTS[self.settings.variant]
        way = make_way(image_features, ranks=ranks, settings=self.settings, tiles=self.tiles, cost=cost)
        gamma = inner_rate(
            self.gamma_schedule,
            math.floor(epoch) if self.settings.gamma_per == "epoch" else epoch,
            minimum=self.settings.gamma_min,
            epochs=self.gamma_epochs,
        )
        rows = upload(ticket.rows(), image_features.device).to(accumulation_dtype(image_features))
        step = Step(self.settings, ticket, rows, gamma, epoch)
        loss = GlobalContrastive.apply(image_features, text_features, self.temperature.log_scale, way, step)
        if self.training:
            self._pending = step
            self.temperature.log_scale.grad = None  # left by a step that was discarded after its backward pass
        loss = with_unused(loss, logit_scale)
        return {"contrastive_loss": loss} if output_dict else loss

    def step(self, steps_done: int | None = None, total_steps: int | None = None) -> None:
        """Write the samples' state back and update the temperature, after the backward pass. Every rank calls it.

        steps_done: number of earlier steps. total_steps: number of steps of the whole training. Only the "cosine"
        schedule of the temperature's learning rate requires them.

        Raises NonFiniteError, on all ranks, if an estimate or a gradient of a temperature is infinite or NaN on any
        rank. The state and the temperature are then unchanged. Raises RuntimeError without a finished backward pass in
        training mode, and ValueError for the schedule "cosine" without its arguments.
        """
        step = self._pending
        if step is None or not step.ran_backward:
            raise RuntimeError("no backward pass is finished; call loss(...).backward() in training mode before step()")
        log_scale = self.temperature.log_scale
        trains_scale = self.temperature.learnable and log_scale.requires_grad  # False: the caller has frozen it
        rate = scheduled_rate(self.settings, self.temperature, steps_done, total_steps)
        self.check_step()
        self._pending = None
        sent = [step.log_u] if step.temperature_gradient is None else [step.log_u, step.temperature_gradient]

        def merge(held: Tensor, received: Tensor, inverse: Tensor) -> Tensor:
            new = mean_per_row(received, inverse, len(held))
            if not self.individual:
                return new
            gradients = new[:, 2:]
            temperatures = step_individual(held[:, 2:], gradients, self.settings, learning_rate=rate, epoch=step.epoch)
            return torch.cat([new[:, :2], temperatures], dim=1)

        self.state.commit(step.ticket, torch.cat(sent, dim=1), merge)
        if trains_scale:
            log_scale.grad = step.scale_gradient  # log_scale's own is that of all backward passes, times their factors
            self.temperature.step(rate)
        elif self.individual:
            log_scale.copy_(step.mean_log_scale)

    def check_step(self) -> None:
        """Raise NonFiniteError, on all ranks, if `step()` would raise it. The pending step is then discarded.

        Every rank calls it after the backward pass. A trainer calls it before it updates the model. `step()` does not
        repeat the check.
        """
        step = self._pending
        if step is None or step.is_checked:
            return
        step.is_checked = True
        self._pending = None
        finite = step.log_u.isfinite().all() & step.d_loss.isfinite()
        gradient = step.temperature_gradient if self.individual else step.scale_gradient
        if gradient is not None:
            finite = finite & gradient.isfinite().all().to(finite.device)
        with raise_on_all_ranks(group=self.state.ranks):
            if not finite:
                raise NonFiniteError(
                    "an estimate u or the gradient of a temperature is infinite or NaN; step() has changed nothing: "
                    "skip this step, and check the features and the loss scale"
                )
        self._pending = step

    @property
    def log_scale(self) -> Tensor:
        """log(1/tau), (1,), for a model's logit_scale.

        With per-sample temperatures: the mean of -log tau_i over the last batch and both sides.
        """
        return self.temperature.log_scale.detach()

    def checkpoint_state(self) -> dict[str, Any]:
        """Return this rank's part of the state from which a run resumes exactly: tensors, numbers and strings.

        Later steps do not change it.
        """
        return {
            "variant": self.settings.variant,
            "temperature": {name: value.clone() for name, value in self.temperature.state_dict().items()},
            "samples": self.state.state_dict(),
        }

    def load_checkpoint_state(self, parts: Iterable[dict[str, Any]]) -> None:
        """Resume from the parts of all ranks that saved. The number of ranks may differ. Raises CheckpointError.

        A constant temperature is a setting, which may have changed. A learned one is loaded.
        """

        def samples() -> Iterator[dict[str, Any]]:
            for part in parts:
                if not isinstance(part, dict) or "variant" not in part:
                    raise CheckpointError(
                        f"a part of the loss's state is {str(part)[:40]!r}; expected what checkpoint_state() returned "
                        "on each rank that saved, in a list"
                    )
                if part["variant"] != self.settings.variant:
                    raise CheckpointError(
                        f"the checkpoint was written with the loss {part['variant']}, not {self.settings.variant}; "
                        "set the loss that wrote it"
                    )
                if VARIANTS[self.settings.variant].temperature != "constant":
                    self.temperature.load_state_dict(part["temperature"])
                yield part["samples"]

        self.state.load_state_dicts(samples())


def _check_arguments(features: Tensor, ids: Tensor | Ticket, epoch: float) -> None:
    """Raise DataError unless the dtype of the features, their ids and the epoch are accepted."""
    if features.dtype == torch.float16:
        raise DataError(
            "the features are torch.float16, in which gradients at a low temperature become 0; expected bfloat16, "
            "float32 or float64: convert them, for example with .float()"
        )
    if not 0 <= epoch < math.inf:
        raise DataError(f"epoch is {epoch}; expected the number of epochs done, 0 or more")
    check_ids(ids.ids if isinstance(ids, Ticket) else ids, len(features))
