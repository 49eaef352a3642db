"""Copy open_clip's weights into a model in one call, as `megaclip.zero.build.build_engine` does in two."""

from pathlib import Path

from megaclip.checkpoint.open_clip_weights import LoadReport, copy_weights, pretrained_weights
from megaclip.checkpoint.tower_weights import pretrained_tower_weights
from megaclip.models import DualEncoder


def load_pretrained(model: DualEncoder, path_or_dir: str | Path) -> LoadReport:
    weights, report = pretrained_weights(model, path_or_dir)
    copy_weights(model, weights)
    return report


def load_pretrained_tower(model: DualEncoder, tower: str, path_or_dir: str | Path) -> str:
    weights, line = pretrained_tower_weights(model, tower, path_or_dir)
    copy_weights(model, weights)
    return line
