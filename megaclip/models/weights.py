"""Fit the weights of a file to a model: by MegaCLIP's names, at the model's image size and context length.

`fit_model` takes the weights of a whole open_clip model. `fit_tower` takes the weights of one tower, for
--pretrained-image and --pretrained-text. Nothing here reads files (`megaclip.checkpoint.open_clip_weights` does). No
tensor is converted or copied before its shape has been checked, because files may come from untrusted sources.
"""

import math
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

from megaclip.errors import CheckpointError
from megaclip.logging import get_logger
from megaclip.models.clip import ClipModel
from megaclip.models.config import TimmVisionConfig
from megaclip.models.dual_encoder import TOWER_PREFIXES, DualEncoder
from megaclip.models.layers import own_part, whole_shape
from megaclip.models.open_clip_keys import StateDict, from_open_clip
from megaclip.zero.parameters import gathered_shape

logger = get_logger(__name__)

_TRUNKS = {"image": "visual.trunk.", "text": "text.transformer."}
"""Prefix, in open_clip's towers, of parameters whose names come from timm or Hugging Face."""
_TRUNK_KINDS = {"image": "timm's trunk", "text": "Hugging Face's text model"}
"""Files that have no projection, and may have other parameters, such as a classifier."""
_HUGGING_FACE_ROOTS = ("", "roberta.", "bert.", "encoder.", "model.encoder.")
"""Prefixes of the encoder's parameters in Hugging Face's files."""
_SHARED_EMBEDDINGS = ("shared.weight", "model.shared.weight")
"""Names in Hugging Face's files of the token embeddings that encoder and decoder share."""


@dataclass(frozen=True)
class LoadReport:
    """Comparison of weights with a model, by MegaCLIP's parameter names."""

    loaded: tuple[str, ...]
    """Parameters that are in the model and in the weights with the same shape."""
    missing: tuple[str, ...]
    """Parameters that are in the model, but not in the weights."""
    unexpected: tuple[str, ...]
    """Parameters that are in the weights, but not in the model."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Parameters whose shapes differ: name, the model's shape, the shape in the weights."""

    @property
    def complete(self) -> bool:
        """True if the model and the weights have the same parameters with the same shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def advice(self) -> str:
        """Advice how to make the weights fit, for an error message."""
        if self.unexpected == ("logit_bias",) and not self.missing and not self.mismatched:
            return (
                "the weights have a logit_bias, as SigLIP's: add init_logit_bias to the model's JSON (SigLIP: -10, "
                "with init_logit_scale 2.303)"
            )
        found = (*self.loaded, *(name for name, *_ in self.mismatched))
        if self.missing and not any(name.startswith(TOWER_PREFIXES["image"]) for name in found):
            return "the file has no image tower of open_clip; --pretrained-image and --pretrained-text read one tower"
        return "use the model description that the weights were trained with, and name it with --model"

    def require_complete(self, problem: str, advice: str | None = None) -> None:
        """Raise CheckpointError, which begins with `problem`, unless `complete`. advice: replaces the report's own."""
        if not self.complete:
            raise CheckpointError(f"{problem}: {self}; {advice or self.advice}")

    def __str__(self) -> str:
        """Return one line: the number of parameters of each kind, and the first name of each kind of difference."""
        parts = [f"{len(self.loaded)} parameters loaded"]
        for kind, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            parts.append(f"{len(names)} {kind}" + (f" (first: {names[0]})" if names else ""))
        first = ""
        if self.mismatched:
            name, expected, got = self.mismatched[0]
            first = f" (first: {name}, model {list(expected)}, file {list(got)})"
        parts.append(f"{len(self.mismatched)} with a different shape{first}")
        return ", ".join(parts)


def compare_weights(model: DualEncoder, state_dict: StateDict, names: AbstractSet[str] | None = None) -> LoadReport:
    """Compare a state dict with a model. Nothing is loaded; `loaded` lists the names that can be loaded.

    names: parameters of the model that the state dict must have. None: all of them.
    """
    own = model.named_weights()
    shapes = {name: tuple(whole_shape(name, own[name], model.tensor)) for name in own if names is None or name in names}
    pairs = [(name, shapes[name], tuple(state_dict[name].shape)) for name in shapes if name in state_dict]
    return LoadReport(
        loaded=tuple(name for name, ours, theirs in pairs if ours == theirs),
        missing=tuple(name for name in shapes if name not in state_dict),
        unexpected=tuple(name for name in state_dict if name not in shapes),
        mismatched=tuple(pair for pair in pairs if pair[1] != pair[2]),
    )


def fit_model(model: DualEncoder, tensors: StateDict, source: str, *, kept_positions: int = 0) -> tuple[StateDict, str]:
    """Return the weights of a whole model by the names of `model`, and one line for the log.

    A missing `logit_bias` (CLIP's weights, used with the sigmoid loss) is set to the model's initial value; open_clip
    sets it to 0.

    tensors: by open_clip's names. source: name of the weights for errors. kept_positions: --keep-text-positions, the
    number of first text positions that a longer context keeps. 0: all are interpolated. Raises CheckpointError if the
    weights do not fit the model.
    """
    weights, config = _fit_positions(from_open_clip(tensors, model.config), model, kept_positions), model.config
    if config.init_logit_bias is not None and "logit_bias" not in weights:
        weights["logit_bias"] = torch.full((1,), float(config.init_logit_bias))
        logger.info("the weights have no logit_bias; it starts at init_logit_bias %g", config.init_logit_bias)
    report = compare_weights(model, weights)
    report.require_complete(f"{source} does not fit the model")
    require_finite(weights, source)
    return weights, str(report)


def fit_tower(
    model: DualEncoder, tower: str, tensors: StateDict, source: str, *, kept_positions: int = 0
) -> tuple[StateDict, str]:
    """Return the weights of one tower by the names of `model`, and one line for the log.

    The tensors can be those of a whole open_clip model, from which one tower is read, or only of open_clip's tower, as
    for its `pretrained_image_path`. For open_clip's towers they can also be those of the trunk as timm or Hugging Face
    saves it. Such a trunk has no projection to the embedding, so the projection keeps its initial values. If the
    classifier of timm's trunk is the projection (`timm_proj` null), it is loaded if it has the model's shape. All other
    parameters of the tower are required.

    tower: "image" or "text". tensors: by the names of the file. The rest is as for `fit_model`.
    """
    own, ignored = {name for name in model.named_weights() if name.startswith(TOWER_PREFIXES[tower])}, list[str]()
    kind, weights = max(_readings(tensors, model, tower), key=lambda reading: len(own & reading[1].keys()))
    weights, required = _fit_positions(weights, model, kept_positions), own
    if kind in _TRUNK_KINDS.values():
        classifier, report = _classifier(model) if tower == "image" else set(), compare_weights(model, weights, own)
        ignored = sorted(report.unexpected)
        if not classifier <= set(report.loaded):  # the file's classifier is that of another task, or it has none
            ignored += sorted(classifier & weights.keys())
        weights = {name: value for name, value in weights.items() if name not in ignored}
        is_own = tower == "image" and isinstance(model.config.vision_cfg, TimmVisionConfig)
        required = {name for name in own if is_own or name.startswith(_TRUNKS[tower])} - classifier | weights.keys()
    compare_weights(model, weights, required).require_complete(
        f"--pretrained-{tower} {source} does not fit the {tower} tower, read as {kind}",
        "use weights of the same tower and embedding size, or another --model",
    )
    require_finite(weights, f"--pretrained-{tower} {source}")
    line = f"{tower} tower: {len(weights)} parameters of {source}, {kind}"
    if missing := sorted(own - weights.keys()):
        line += f"; {', '.join(missing)} keep their initial values"
    if ignored:
        line += f"; parameters of the file that are not used: {len(ignored)} (first: {ignored[0]})"
    return weights, line


def require_finite(weights: StateDict, source: str) -> None:
    """Raise CheckpointError if weights, whose shapes were checked, hold NaN or infinite values."""
    bad = [name for name, value in weights.items() if not value.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"{source}: {len(bad)} of {len(weights)} parameters hold NaN or infinite values (first: {bad[0]}); use an "
            "earlier checkpoint of the training that wrote it"
        )


@torch.no_grad()
def copy_weights(model: DualEncoder, weights: StateDict) -> None:
    """Copy weights into `model`; call it before `deepspeed.initialize`.

    Parameters may be whole or partitioned by `deepspeed.zero.Init`. If they are partitioned, this is a collective:
    every rank must call it with the same weights. Parameters are gathered one at a time.

    weights: whole, by the model's names, some or all of them; values are converted to the model's dtypes.
    """
    own = model.named_weights()
    for name, value in weights.items():
        weight = own[name]
        partitioned = isinstance(weight, nn.Parameter)  # buffers are whole on every rank
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0) if partitioned else nullcontext():
            weight.copy_(own_part(name, value, model.tensor))


def _readings(tensors: StateDict, model: DualEncoder, tower: str) -> list[tuple[str, StateDict]]:
    """Return the ways to read a file, the most likely first: its content, and its parameters by MegaCLIP's names."""
    prefix, trunk = TOWER_PREFIXES[tower], _TRUNKS[tower]
    if any(name.startswith("visual.") for name in tensors):
        whole = from_open_clip(tensors, model.config)
        return [("one tower of a whole model", {name: whole[name] for name in whole if name.startswith(prefix)})]
    alone = {f"{prefix}{name.removeprefix(prefix)}": value for name, value in tensors.items()}
    readings = [("open_clip's tower alone", from_open_clip(alone, model.config))]
    shared_first = sorted(tensors.items(), key=lambda item: item[0] not in _SHARED_EMBEDDINGS)
    for root in _HUGGING_FACE_ROOTS if tower == "text" else ("",):
        own: StateDict = {}
        for name, value in shared_first:  # the encoder's own embeddings replace them
            if tower == "text" and name in _SHARED_EMBEDDINGS:
                name = f"{root}embed_tokens.weight"
            own[f"{trunk}{name.removeprefix(root)}" if name.startswith(root) else name] = value
        readings.append((_TRUNK_KINDS[tower], from_open_clip(own, model.config) if tower == "image" else own))
    return readings


def _classifier(model: DualEncoder) -> set[str]:
    """Return the names of the parameters of a timm trunk's classifier, which is then the projection."""
    if isinstance(model, ClipModel):
        return {name for name, _ in model.named_parameters() if name.startswith("visual.proj.")}
    trunk: Any = getattr(model.visual, "trunk", None)
    parts = () if trunk is None else trunk.get_classifier()  # one module, or several in a tuple
    found = {id(p) for part in (parts if isinstance(parts, tuple) else (parts,)) for p in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}


def _fit_positions(state_dict: StateDict, model: DualEncoder, kept_positions: int) -> StateDict:
    """Return weights whose position embeddings are interpolated to the model's image size and context length.

    In vision transformers the positions are those of tokens such as a class token and the patches, or of the patches.
    All other entries, and positions of another width, are returned unchanged.
    """
    adapted = dict(state_dict)
    name, parameter, grid = _image_positions(model)
    if _differs_in_length(adapted.get(name), parameter):
        table = adapted[name].float()
        prefix = gathered_shape(parameter)[-2] - math.prod(grid)  # tokens before the patches
        patches = table.shape[-2] - prefix
        if patches > 0 and (side := math.isqrt(patches)) ** 2 == patches:
            first_nC, patches_PC = table.flatten(0, -2).split([prefix, patches])
            patches_1Chw = patches_PC.T.reshape(1, -1, side, side)
            patches_1Chw = F.interpolate(patches_1Chw, grid, mode="bicubic", antialias=True)
            interpolated = torch.cat([first_nC, patches_1Chw[0].flatten(1).T])
            adapted[name] = interpolated.view(*table.shape[:-2], *interpolated.shape)
            logger.info("interpolated positions of %d x %d patches to %d x %d", side, side, *grid)
    name, positions = "text.positional_embedding", getattr(model.text, "positional_embedding", None)
    length = old = 0
    if _differs_in_length(adapted.get(name), positions):
        length, old = gathered_shape(positions)[0], len(adapted[name])
    if kept_positions and not kept_positions + 1 < old < length:
        raise CheckpointError(
            f"--keep-text-positions {kept_positions} requires weights of a text tower with more positions, and a model "
            f"with a longer context_length than theirs (positions to stretch: {old or 'none'}, context_length: "
            f"{length or 'theirs'}); leave it out, or set context_length in the model's JSON"
        )
    if old:
        unchanged = f", the first {kept_positions} unchanged" if kept_positions else ""
        logger.info("interpolated positions of %d tokens to %d%s", old, length, unchanged)
        table = adapted[name].float()
        if kept_positions:
            adapted[name] = stretched_positions(table, length, kept_positions)
        else:
            adapted[name] = F.interpolate(table.T[None], length, mode="linear")[0].T
    return adapted


def stretched_positions(positions_LC: torch.Tensor, length: int, kept: int) -> torch.Tensor:
    """Return text positions (length, C) whose first `kept` are unchanged, and the rest interpolated linearly.

    New position kept + k is at kept + k / ratio among the old ones, with ratio = (length - kept) / (L - kept). The last
    ones are extrapolated. 77 positions, 20 of them kept, become 248 at ratio 4 as in Zhang et al., "Long-CLIP:
    Unlocking the Long-Text Capability of CLIP", ECCV 2024, section 3.1.
    """
    old = len(positions_LC)
    place = torch.arange(length - kept, dtype=torch.float64) * (old - kept) / (length - kept) + kept
    below = place.long().clamp(max=old - 2)
    share = (place - below).to(positions_LC.dtype)[:, None]
    stretched = positions_LC[below] * (1 - share) + positions_LC[below + 1] * share
    return torch.cat([positions_LC[:kept], stretched])


def _image_positions(model: DualEncoder) -> tuple[str, Any, tuple[int, ...]]:
    """Return the positions of an image tower: their name, the parameter, and the number of patches along both sides.

    None instead of the parameter: the tower learns no positions.
    """
    visual: Any = model.visual
    trunk = getattr(visual, "trunk", None)
    name, parameter = "visual.positional_embedding", getattr(visual, "positional_embedding", None)
    if trunk is not None:
        name, parameter = "visual.trunk.pos_embed", getattr(trunk, "pos_embed", None)
    if not isinstance(parameter, nn.Parameter):
        return name, None, ()
    return name, parameter, tuple(visual.grid_size if trunk is None else trunk.patch_embed.grid_size)


def _differs_in_length(table: torch.Tensor | None, parameter: torch.Tensor | None) -> bool:
    """Return True if a table of positions (L, C), or timm's (1, L, C), differs from the model's parameter only in L.

    A table that is not contiguous is rejected: an expanded tensor may have a huge shape with little storage.
    """
    if table is None or parameter is None or not table.is_contiguous():
        return False
    *outer, length, width = gathered_shape(parameter)
    found = [*table.shape]
    return found[-2:-1] not in ([], [0], [1], [length]) and found == [*outer, *found[-2:-1], width]
