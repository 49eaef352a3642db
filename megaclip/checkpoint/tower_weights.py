"""Weights of one tower, for --pretrained-image and --pretrained-text.

A file can contain a whole open_clip model, from which one tower is read, or only open_clip's tower, as for its
`pretrained_image_path`. For open_clip's towers it can also contain the trunk as timm or Hugging Face saves it. Such a
trunk has no projection to the embedding, so the projection keeps its initial values. If the classifier of timm's trunk
is the projection (`timm_proj` null), it is loaded if it has the model's shape. All other parameters of the tower must
be in the file.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.open_clip_weights import adapt_positions, compare_weights, read_tensors
from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder
from megaclip.models.dual_encoder import TOWER_PREFIXES
from megaclip.models.open_clip_keys import StateDict, from_open_clip

_TRUNKS = {"image": "visual.trunk.", "text": "text.transformer."}
"""Prefix, in open_clip's towers, of parameters whose names come from timm or Hugging Face."""
_HUGGING_FACE_ROOTS = ("", "roberta.", "bert.", "encoder.", "model.encoder.")
"""Prefixes of the encoder's parameters in Hugging Face's files."""
_SHARED_EMBEDDINGS = ("shared.weight", "model.shared.weight")
"""Names in Hugging Face's files of the token embeddings that encoder and decoder share."""


@dataclass(frozen=True)
class _Reading:
    """One way to read a file: its parameters of the tower under MegaCLIP's names."""

    kind: str
    """Content of the file, for the log and for errors."""
    weights: StateDict
    is_trunk: bool
    """True if the file has no projection, and may have other parameters, such as a classifier."""
    ignored: tuple[str, ...] = ()
    """Names in the file that are not read."""


def pretrained_tower_weights(model: DualEncoder, tower: str, path_or_dir: str | Path) -> tuple[StateDict, str]:
    """Read the weights of one tower; return them by the names of `model`, and one line for the log.

    Args:
        model: not changed.
        tower: "image" or "text".
        path_or_dir: a weights file, or a directory that holds one.

    Raises:
        CheckpointError: the file cannot be read, is damaged or does not fit the tower.
    """
    require_whole(Path(path_or_dir))
    reading, missing = _best_reading(model, tower, path_or_dir)
    line = f"{tower} tower: {len(reading.weights)} parameters of {path_or_dir}, {reading.kind}"
    if missing:
        line += f"; {', '.join(missing)} keep their initial values"
    if reading.ignored:
        line += f"; {len(reading.ignored)} parameters of the file are not used (first: {reading.ignored[0]})"
    return reading.weights, line


def _best_reading(model: DualEncoder, tower: str, path_or_dir: str | Path) -> tuple[_Reading, list[str]]:
    """Return the reading with the most parameters of the tower, and the tower's parameters that are missing in it."""
    tensors, prefix = read_tensors(path_or_dir, model.config), TOWER_PREFIXES[tower]
    expected = {name for name in model.named_weights() if name.startswith(prefix)}
    readings = [_adapted(reading, model) for reading in _readings(tensors, model, tower)]
    reading = max(readings, key=lambda one: len(expected & one.weights.keys()))
    report, inside = compare_weights(model, reading.weights), expected
    if reading.is_trunk:
        classifier = _classifier(model) if tower == "image" else set()
        inside = {name for name in expected if name.startswith(_TRUNKS[tower])} - classifier
        unused = reading.weights.keys() - expected
        if not classifier <= set(report.loaded):  # the file's classifier is that of another task, or it has none
            unused |= classifier & reading.weights.keys()
        keep = {name: value for name, value in reading.weights.items() if name not in unused}
        reading = replace(reading, weights=keep, ignored=(*reading.ignored, *sorted(unused)))
        report = compare_weights(model, keep)
    missing = sorted(inside - reading.weights.keys())
    unknown = sorted(reading.weights.keys() - expected)
    if not expected & reading.weights.keys() or missing or unknown or report.mismatched:
        problems = [f"{len(expected & reading.weights.keys())} of {len(inside)} parameters found"]
        problems += [f"{len(missing)} missing (first: {missing[0]})"] if missing else []
        problems += [f"{len(unknown)} unexpected (first: {unknown[0]})"] if unknown else []
        if report.mismatched:
            name, ours, theirs = report.mismatched[0]
            problems.append(
                f"{len(report.mismatched)} with a different shape (first: {name}, model {list(ours)}, file "
                f"{list(theirs)})"
            )
        raise CheckpointError(
            f"--pretrained-{tower} {path_or_dir} does not fit the {tower} tower, read as {reading.kind}: "
            f"{', '.join(problems)}; use weights of the same tower and embedding size, or another --model"
        )
    return reading, sorted(expected - reading.weights.keys())


def _classifier(model: DualEncoder) -> set[str]:
    """Return the names of the parameters of a timm trunk's classifier, which is then the projection."""
    trunk: Any = getattr(model.visual, "trunk", None)
    if trunk is None:
        return set()
    parts = trunk.get_classifier()  # one module, or several in a tuple
    found = {id(p) for part in (parts if isinstance(parts, tuple) else (parts,)) for p in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}


def _readings(tensors: StateDict, model: DualEncoder, tower: str) -> list[_Reading]:
    """Return the ways to read a file, the most likely first."""
    prefix, trunk = TOWER_PREFIXES[tower], _TRUNKS[tower]
    whole = from_open_clip(tensors, model.config)
    if any(name.startswith("visual.") for name in tensors):
        own = {name: value for name, value in whole.items() if name.startswith(prefix)}
        return [_Reading("one tower of a whole model", own, False)]
    alone = from_open_clip(
        {f"{prefix}{name.removeprefix(prefix)}": value for name, value in tensors.items()}, model.config
    )
    readings = [_Reading("open_clip's tower alone", alone, False)]
    for root in _HUGGING_FACE_ROOTS if tower == "text" else ("",):
        own = {f"{trunk}{name.removeprefix(root)}": v for name, v in tensors.items() if name.startswith(root)}
        rest = tuple(name for name in tensors if not name.startswith(root))
        embeddings = f"{trunk}embed_tokens.weight"
        for shared in _SHARED_EMBEDDINGS:
            if shared in tensors and tower == "text":
                own.setdefault(embeddings, tensors[shared])
        kind = "timm's trunk" if tower == "image" else "Hugging Face's text model"
        readings.append(_Reading(kind, own, True, tuple(name for name in rest if name not in _SHARED_EMBEDDINGS)))
    return readings


def _adapted(reading: _Reading, model: DualEncoder) -> _Reading:
    """Return the reading with positions interpolated to the model's image size and context length."""
    return replace(reading, weights=adapt_positions(reading.weights, model))
