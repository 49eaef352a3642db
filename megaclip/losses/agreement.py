"""Do the features of all ranks fit together? Asked before every exchange, so that a mistake is an error and not a hang.

A rank whose last batch is shorter, or whose towers disagree, would leave its peers waiting in a collective. Each step
therefore starts with one exchange of a few integers; if they differ, or a rank found a fault in its own features, every
rank raises the same ValueError.
"""

from torch import Tensor

from megaclip.comm.collectives import gather_integers, gather_objects
from megaclip.comm.groups import RankGroup
from megaclip.ops.tiles import FEATURE_DTYPES


def check_features(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    ranks: RankGroup,
) -> None:
    """Raise ValueError on all ranks unless all have features (b, D) of one shape and dtype and single scalars."""
    problem = _local_problem(image_features, text_features, logit_scale, logit_bias)
    signature = [1, 0, 0, 0] if problem else [0, *image_features.shape, FEATURE_DTYPES.index(image_features.dtype)]
    signatures = gather_integers(signature, group=ranks)
    if any(failed for failed, *_ in signatures):
        _raise_first(gather_objects(problem, group=ranks))
    for rank, other in enumerate(signatures):
        if other != signatures[0]:
            raise ValueError(
                f"expected features of one shape and dtype on all ranks, got {_describe(signatures[0])} on rank 0 and "
                f"{_describe(other)} on rank {rank}: give every rank the same local batch (drop the last, shorter one)"
            )


def _local_problem(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None
) -> str | None:
    """What is wrong with this rank's own arguments, for its user; None when nothing is."""
    if image_features.dim() != 2 or image_features.shape != text_features.shape or not len(image_features):
        return (
            "expected image_features and text_features of one shape (b, D) with b >= 1, "
            f"got {tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if image_features.dtype != text_features.dtype or image_features.device != text_features.device:
        return (
            "expected image_features and text_features of one dtype on one device, got "
            f"{image_features.dtype} on {image_features.device} and {text_features.dtype} on {text_features.device}"
        )
    if image_features.dtype not in FEATURE_DTYPES:
        return f"expected bfloat16, float16, float32 or float64 features, got {image_features.dtype}"
    for name, scalar in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
        if scalar is not None and scalar.numel() != 1:
            return f"expected one {name}, () or (1,), got shape {tuple(scalar.shape)}"
    return None


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ValueError(problem if len(problems) == 1 else f"rank {rank}: {problem}")


def _describe(signature: list[int]) -> str:
    _, batch, embedding, dtype = signature
    return f"({batch}, {embedding}) {FEATURE_DTYPES[dtype]}"
