"""Check that the features and settings of all ranks fit together, once per call of a loss.

If one rank has a shorter batch, another embedding size or another exchange, the other ranks wait in a collective
forever. So each call of a loss starts with a gather of four integers. If they differ, or if a rank has found a mistake
in its own features, every rank raises the same DataError, which is a ValueError. If PyTorch itself raises on a rank,
that rank raises PyTorch's error, and the others an error that names the rank.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_integers, gather_objects, raise_on_all_ranks
from megaclip.comm.groups import RankGroup
from megaclip.errors import DataError
from megaclip.losses.settings import LossSettings
from megaclip.losses.sums import LossInputs
from megaclip.ops.types import FEATURE_DTYPES, accumulation_dtype


def check_features(inputs: LossInputs, *, settings: LossSettings, ranks: RankGroup, **call: Any) -> int:
    """Raise DataError on all ranks unless all have features (b, D) of one shape and dtype and scalars of one element.

    Return the largest number of negatives of a rank. call: other arguments of this call, by name. These must be equal
    on all ranks too: the settings, except those of the tiles of a rank, which inputs after logit_bias are given, and
    the call. Without an error the only communication is one gather of four integers, and none on one rank.
    """
    meaning = getattr(settings, "ids", "ignore")
    problem: Exception | None = None
    common, features = settings.model_dump(exclude={"implementation", "tile_budget_mib"}) | call, ""
    signature = [-1, 0, 0, 0]
    try:
        where = f"on rank {ranks.rank}"
        _check_own(inputs, where)
        _check_further(inputs, meaning, where)
        further = zip(inputs._fields[4:], inputs[4:], strict=True)
        given = [f" with {name}" for name, tensor in further if tensor is not None]
        kind = "CPU" if inputs.x.device.type == "cpu" else "accelerator"  # a collective cannot combine both
        features = f"{tuple(inputs.x.shape)} {inputs.x.dtype} ({kind}){''.join(given)}"
        digest = int.from_bytes(hashlib.sha256(f"{common} {features}".encode()).digest()[:7], "big")
        signature = [0 if inputs.negatives is None else len(inputs.negatives), *inputs.x.shape, digest]
    except Exception as error:  # also one of PyTorch, which nested tensors raise; raised below, on all ranks
        if ranks.size == 1:
            raise
        problem = error
    if ranks.size == 1:
        return signature[0]
    signatures = gather_integers(signature, group=ranks)
    if any(count < 0 for count, *_ in signatures):
        with raise_on_all_ranks(group=ranks):
            if problem is not None:
                raise problem
    if any(other[1:] != signature[1:] for other in signatures):
        first, *others = gather_objects((common, features), group=ranks)
        rank, other = next((rank, other) for rank, other in enumerate(others, start=1) if other != first)
        for name, value in first[0].items():
            if other[0].get(name) != value:
                raise DataError(
                    f"{name} of the loss is {value!r} on rank 0 and {other[0].get(name)!r} on rank {rank}; construct "
                    "and call the loss in the same way on all ranks"
                )
        raise DataError(
            f"the features are {first[1]} on rank 0 and {other[1]} on rank {rank}; expected one shape and dtype on "
            "all ranks, on CPUs or on accelerators, and the same arguments: give every rank the same local batch, and "
            "drop a shorter last one"
        )
    return max(count for count, *_ in signatures)


def _check_own(inputs: LossInputs, where: str) -> None:
    """Raise DataError unless features and scalars of this rank fit together. where: names the rank in the message."""
    image_features, text_features, logit_scale, logit_bias = inputs[:4]
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
    scalars = {"logit_scale": logit_scale} | ({} if logit_bias is None else {"logit_bias": logit_bias})
    for name, scalar in scalars.items():
        if not isinstance(scalar, Tensor):
            raise DataError(f"{name} is a {type(scalar).__name__} {where}; expected a number or a tensor () or (1,)")
        if scalar.numel() != 1:
            raise DataError(f"{name} has shape {tuple(scalar.shape)} {where}; expected one element, () or (1,)")


def _check_further(inputs: LossInputs, meaning: str, where: str) -> None:
    """Raise DataError unless the inputs after logit_bias of this rank fit its features x (b, D)."""
    x, negatives, ids, rows = inputs.x, inputs.negatives, inputs.ids, inputs.negative_rows
    if (ids is None) != (meaning == "ignore"):
        raise DataError(
            f"ids are {'missing' if ids is None else 'given'} {where}, and the setting ids of the loss is {meaning!r}; "
            "pass ids if the setting is 'mask' or 'positive', and only then"
        )
    for name, required in (("negative_ids", negatives), ("negative_rows", negatives), ("negative_ids", ids)):
        if required is None and getattr(inputs, name) is not None:
            missing = "negatives" if negatives is None else "ids"
            raise DataError(f"{name} are given without {missing} {where}; pass both")
    count = len(negatives) if isinstance(negatives, Tensor) and negatives.dim() else 0
    expected = {
        "negatives": ((count, x.shape[1]), x.dtype),
        "ids": ((len(x),), torch.int64),
        "negative_ids": ((count,), torch.int64),
        "negative_rows": ((count,), torch.int64),
        "weights": ((len(x),), accumulation_dtype(x)),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(inputs, name)
        if tensor is None or (
            isinstance(tensor, Tensor)
            and (tensor.shape, tensor.dtype, tensor.device) == (torch.Size(shape), dtype, x.device)
        ):
            continue
        got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor)
        raise DataError(f"{name} are {got} {where}; expected {shape} {dtype} on {x.device}")
    if rows is not None and count and not 0 <= int(rows.min()) <= int(rows.max()) < len(x):
        raise DataError(
            f"negative_rows are {int(rows.min())} to {int(rows.max())} {where}; expected local rows, 0 to {len(x) - 1}"
        )
