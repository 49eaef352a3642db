"""Read weights and copy them into a model in one call, as `megaclip.zero.build.build_engine` does in two."""

from pathlib import Path

from megaclip.checkpoint.open_clip_weights import pretrained_weights
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.models import DualEncoder
from megaclip.models.open_clip_keys import StateDict
from megaclip.models.weights import copy_weights, fit_tower


def load_pretrained(model: DualEncoder, path_or_dir: str | Path) -> StateDict:
    weights = pretrained_weights(model, path_or_dir)
    copy_weights(model, weights)
    return weights


def load_pretrained_tower(model: DualEncoder, tower: str, path_or_dir: str | Path) -> str:
    weights, line = fit_tower(model, tower, read_tensors(path_or_dir), str(path_or_dir))
    copy_weights(model, weights)
    return line
