"""Base classes of the losses over the batch of all ranks: process group, settings, and call signature."""

import copy
import functools
import inspect
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megaclip.comm.groups import RankGroup, name_of, resolve
from megaclip.errors import config_error
from megaclip.losses.agreement import check_features
from megaclip.losses.compiled_operation import traced
from megaclip.losses.costs import LossCost
from megaclip.losses.id_order import in_order_of_ids
from megaclip.losses.settings import BatchLossSettings, StandaloneSettings
from megaclip.losses.small_batches import Recordings, is_small
from megaclip.losses.sums import DIFFERENTIABLE, FunctionOfSums, LossAndSums, LossInputs
from megaclip.losses.way import Way, make_way
from megaclip.ops.types import TileOptions, accumulation_dtype

_OPEN_CLIP_SETTINGS = {
    "local_loss",
    "gather_with_grad",
    "cache_labels",
    "rank",
    "world_size",
    "use_horovod",
    "dist_impl",
}


class BatchLoss(nn.Module):
    """Base class of the losses, with the process group and the validated settings, `self.settings`.

    group: the ranks that share the batch (a deepspeed.comm or torch.distributed group). None: all ranks of the job, or
    a group of one in a Python process without a launcher.
    settings: fields of the class `settings_model`; `megaclip.losses.settings` has their values, meanings and defaults.

    Raises ConfigError, a ValueError, for a wrong value, and TypeError for an unknown name. The TypeError explains what
    replaces the arguments of open_clip's constructors.
    """

    settings_model: type[StandaloneSettings] = StandaloneSettings
    settings: StandaloneSettings
    __signature__: inspect.Signature

    def __init__(self, *, group: Any = None, **settings: Any) -> None:
        super().__init__()
        if unknown := settings.keys() - self.settings_model.model_fields:
            raise TypeError(_unknown_settings_message(type(self).__name__, unknown))
        try:
            self.settings = self.settings_model(**settings)
        except ValidationError as error:
            raise config_error(error) from None
        self.group = group
        self.group_name, self.settings_json = name_of(group), self.settings.model_dump_json()  # for compiled graphs
        self.tiles = TileOptions(self.settings.precision, self.settings.implementation, self.settings.tile_budget_mib)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Make `help()` and `inspect.signature` list the settings in place of `**settings`."""
        super().__init_subclass__(**arguments)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        listed = {parameter.name: parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD}
        if len(listed) < len(own):
            fields, parameters = cls.settings_model.model_fields, inspect.signature(cls.settings_model).parameters
            for name in [name for name in fields if name not in listed]:
                listed[name] = parameters[name].replace(annotation=fields[name].annotation)
        cls.__signature__ = inspect.Signature(sorted(listed.values(), key=lambda parameter: parameter.kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchLoss":
        """Return a copy with the same process group. Weight averages copy the module that contains the loss."""
        handle = self.group.handle if isinstance(self.group, RankGroup) else self.group
        memo[id(handle)] = handle  # a process group cannot be copied
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied


class SummedLoss(BatchLoss):
    """Base class of `ClipLoss` and `SigLipLoss`, with the call signature of open_clip's losses.

    Such a loss can compute the sums of its backward pass together with its value. In this form it is one operation of a
    compiled graph (`compiled_operation`), and small batches on GPUs are recorded (`small_batches`).
    """

    settings_model = BatchLossSettings
    settings: BatchLossSettings
    cost: LossCost
    operation: Any
    """The operation of a compiled graph, from `compiled_operation.register_loss`."""

    def __init__(self, *, group: Any = None, **settings: Any) -> None:
        super().__init__(group=group, **settings)
        self._recordings = Recordings()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_ids: Tensor | None = None,
        negative_rows: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the mean loss of the whole batch, equal on all ranks: () float32, float64 for float64 features.

        image_features, text_features: (b, D) of unit length, bfloat16, float16, float32 or float64; one shape and dtype
            on all ranks. Row i of both is a pair: an image and its text, or a query and its document.
        logit_scale: the multiplier alpha, the exponential of the log scale: (), (1,) or a number.
        logit_bias: beta, added to the logits: (), (1,), a number, or None for 0. InfoNCE does not depend on it, because
            it cancels in a softmax: ClipLoss gives it a zero gradient.
        output_dict: return {"contrastive_loss": loss}, as open_clip's trainer expects.
        ids: (b,) int64 on the features' device, which the settings ids="mask" and ids="positive" require. Pairs with
            equal ids, on any rank, are no negatives of each other, or positives.
        negatives: (e, D), additional text features, such as hard negatives: negatives of the images of all ranks. e may
            differ between ranks, and may be 0, but all ranks or none must pass them. They are no rows of the loss.
        negative_ids: (e,) int64 ids of the negatives. One whose id is that of a pair is left out for this pair, with
            ids="mask" and with ids="positive".
        negative_rows: (e,) int64, the local row (0 to b - 1) that alone contrasts with each negative. None: all rows of
            all ranks do.
        weights: (b,) weight of each pair in the mean, which divides by B; no gradient. Only ClipLoss accepts them.

        Every rank must call it with the same arguments. Raises DataError, a ValueError, on all ranks if the arguments
        do not fit together, on one rank or between ranks.
        """
        features = image_features
        inputs = LossInputs(
            image_features,
            text_features,
            as_scalar(logit_scale, features),
            self.used_bias(logit_bias, features),
            *(negatives, ids, negative_ids, negative_rows, weights),
        )
        # A plain tuple, because torch 2.8's compiler cannot slice a named one.
        tensors = [tensor for tensor in tuple(inputs)[:DIFFERENTIABLE] if isinstance(tensor, Tensor)]
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if torch.compiler.is_compiling():
            loss = traced(self, inputs, gradients)
        else:
            evaluate = functools.partial(self.evaluate, ranks=resolve(self.group), gradients=gradients)
            loss = FunctionOfSums.apply(type(self).__name__, evaluate, *inputs)
        if inputs.logit_bias is None:
            loss = with_unused(loss, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def used_bias(self, logit_bias: Tensor | float | None, features: Tensor) -> Tensor | None:
        """Return logit_bias as a tensor, or None if this loss does not depend on it."""
        return as_scalar(0.0 if logit_bias is None else logit_bias, features)

    def evaluate(self, inputs: LossInputs, *, ranks: RankGroup, gradients: bool) -> LossAndSums:
        """Check the arguments, and return the loss and its sums, from a recording if these sizes repeat and are small.

        gradients: False if only the loss is used.
        """
        way = self.checked_way(inputs, ranks=ranks, gradients=gradients)
        plain = functools.partial(self.plain_sums, way=way, gradients=gradients)
        ordered = in_order_of_ids(inputs, self.settings.ids)
        if not gradients:
            return plain(ordered.inputs)
        recorded = self.records(inputs.x, way)
        return ordered.put_back(
            self._recordings.evaluate(plain, way, ordered.inputs) if recorded else plain(ordered.inputs)
        )

    def plain_sums(self, inputs: LossInputs, *, way: Way, gradients: bool) -> LossAndSums:
        """Compute the loss and the sums of its backward pass, of inputs in the order that masks need."""
        raise NotImplementedError

    def records(self, x: Tensor, way: Way) -> bool:
        """Return whether steps with features like x (b, D) are recorded if they repeat; equal on all ranks."""
        return self.settings.cuda_graphs and is_small(x, way)

    def checked_way(self, inputs: LossInputs, *, ranks: RankGroup, gradients: bool) -> Way:
        """Return the way of a step. Raises DataError on all ranks if the arguments do not fit together."""
        named: dict[str, Any] = {"settings": self.settings, "ranks": ranks}
        negatives = check_features(inputs, requires_grad=gradients, **named)
        sent = 0 if inputs.negative_rows is not None else negatives
        return make_way(inputs.x, tiles=self.tiles, cost=self.cost, negatives=sent, **named)


def as_scalar(value: Any, features: Tensor) -> Tensor:
    """Return a logit_scale or logit_bias as a tensor: a number becomes () in the dtype of sums, on the same device.

    Anything else is returned unchanged. `check_features` raises for it, on all ranks.
    """
    # The compiler traces the type of a number, but not its attributes.
    if isinstance(value, Tensor) or not (isinstance(value, (int, float)) or hasattr(value, "__float__")):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    if not isinstance(features, Tensor):  # `check_features` raises for it too
        return torch.tensor(number)
    return torch.full((), number, dtype=accumulation_dtype(features), device=features.device)


def working_scalar(scalar: Tensor, features: Tensor) -> Tensor:
    """Return a scalar as () on the features' device, in the dtype of sums."""
    return scalar.reshape(()).to(features.device, accumulation_dtype(features))


def with_unused(loss: Tensor, scalar: Tensor | float | None) -> Tensor:
    """Return the loss unchanged, with a zero gradient for a scalar without effect, such as ClipLoss's logit_bias."""
    return loss + (0.0 * scalar.sum()).to(loss) if isinstance(scalar, Tensor) else loss


def _unknown_settings_message(loss: str, names: set[str]) -> str:
    if names == {"ids"}:
        return (
            f"{loss}() does not take ids='mask' or 'positive': its estimates are means over all other samples of the "
            "dataset; use ClipLoss or SigLipLoss"
        )
    theirs = ", ".join(sorted(names & _OPEN_CLIP_SETTINGS))
    if not theirs:
        return f"{loss}() got an unexpected keyword argument {min(names)!r}"
    return (
        f"{loss}() takes none of open_clip's {theirs}: it always computes the exact loss of the whole batch of the "
        f"ranks of `group` (default: all ranks); write {loss}(), or select the data transfers with exchange= and "
        "reduction="
    )
