"""Check that the features and settings of all ranks fit together, once per call of a loss.

If one rank has a shorter batch, another embedding size or another exchange, the other ranks wait in a collective
forever. So each call of a loss starts with a gather of four integers. If they differ, or if a rank has found a mistake
in its own features, every rank raises the same DataError, which is a ValueError. If PyTorch itself raises on a rank,
that rank raises PyTorch's error, and the others an error that names the rank.
"""

import itertools

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_integers, raise_on_all_ranks
from megaclip.comm.groups import RankGroup
from megaclip.errors import DataError
from megaclip.losses.settings import LossSettings
from megaclip.losses.way import EXCHANGES, PAYLOADS, REDUCTIONS
from megaclip.ops.types import FEATURE_DTYPES

_KINDS = list(itertools.product(FEATURE_DTYPES, (True, False)))
"""Accepted dtypes of features, each on the CPU and elsewhere: a collective cannot combine both."""
_WAYS = list(itertools.product(("auto", *EXCHANGES), ("auto", *REDUCTIONS), PAYLOADS))
"""Settings exchange, reduction and payload, on which the collectives of a call depend."""


def check_features(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    settings: LossSettings,
    ranks: RankGroup,
) -> None:
    """Raise DataError on all ranks unless all have features (b, D) of one shape and dtype and scalars of one element.

    The settings exchange, reduction and payload must be equal on all ranks too. Without an error the only communication
    is one gather of four integers, and none on one rank.
    """
    if ranks.size == 1:
        _check_own(image_features, text_features, logit_scale, logit_bias, f"on rank {ranks.rank}")
        return
    problem: Exception | None = None
    signature = [1, 0, 0, 0]
    try:
        _check_own(image_features, text_features, logit_scale, logit_bias, f"on rank {ranks.rank}")
        kind = _KINDS.index((image_features.dtype, image_features.device.type == "cpu"))
        way = _WAYS.index((settings.exchange, settings.reduction, settings.payload))
        signature = [0, *image_features.shape, kind * len(_WAYS) + way]
    except Exception as error:  # also one of PyTorch, which nested tensors raise; raised below, on all ranks
        problem = error
    signatures = gather_integers(signature, group=ranks)
    if any(failed for failed, *_ in signatures):
        with raise_on_all_ranks(group=ranks):
            if problem is not None:
                raise problem
    for rank, other in enumerate(signatures):
        if other == signatures[0]:
            continue
        first, second = (", ".join(_WAYS[last % len(_WAYS)]) for *_, last in (signatures[0], other))
        if first != second:
            raise DataError(
                f"exchange, reduction and payload of the loss are {first} on rank 0 and {second} on rank {rank}; "
                "construct the loss with the same settings on all ranks"
            )
        raise DataError(
            f"the features are {_description(signatures[0])} on rank 0 and {_description(other)} on rank {rank}; "
            "expected one shape and dtype on all ranks, on CPUs or on accelerators: give every rank the same local "
            "batch, and drop a shorter last one"
        )


def _check_own(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, where: str
) -> None:
    """Raise DataError unless the arguments of this rank fit together. where: names the rank in the message."""
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        if not isinstance(features, Tensor):
            raise DataError(f"{name} is a {type(features).__name__} {where}; expected a tensor (b, D)")
        if features.layout != torch.strided or features.is_meta:
            raise DataError(f"{name} is {features.layout} on {features.device} {where}; expected a dense tensor (b, D)")
    if image_features.dim() != 2 or image_features.shape != text_features.shape or 0 in image_features.shape:
        raise DataError(
            f"image_features and text_features have shapes {tuple(image_features.shape)} and "
            f"{tuple(text_features.shape)} {where}; expected one shape (b, D) with b >= 1 and D >= 1"
        )
    if image_features.dtype != text_features.dtype or image_features.device != text_features.device:
        raise DataError(
            f"image_features are {image_features.dtype} on {image_features.device} and text_features are "
            f"{text_features.dtype} on {text_features.device} {where}; expected one dtype on one device"
        )
    if image_features.dtype not in FEATURE_DTYPES:
        raise DataError(
            f"the features are {image_features.dtype} {where}; expected bfloat16, float16, float32, float64"
        )
    for name, scalar in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
        if scalar is None and name == "logit_bias":
            continue
        if not isinstance(scalar, Tensor):
            raise DataError(f"{name} is a {type(scalar).__name__} {where}; expected a number or a tensor () or (1,)")
        if scalar.numel() != 1:
            raise DataError(f"{name} has shape {tuple(scalar.shape)} {where}; expected one element, () or (1,)")


def _description(signature: list[int]) -> str:
    _, batch, embedding, kind_and_way = signature
    dtype, on_cpu = _KINDS[kind_and_way // len(_WAYS)]
    return f"({batch}, {embedding}) {dtype} ({'CPU' if on_cpu else 'accelerator'})"
