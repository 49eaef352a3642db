"""Find a model's description, and choose the implementation that runs it.

`load_model_config("ViT-B-32")` reads the preset of that name, or open_clip's description of that name if there is no
preset. A path reads that JSON file instead: either a bare model description, a model card
(`open_clip_config.json`), which holds the description under "model_cfg", or the config.json of a model of transformers.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from megaclip.errors import ConfigError, closest
from megaclip.models.config import CARD_NAME, ModelConfig, list_models, presets, reason_not_own
from megaclip.models.dual_encoder import ModelDescription
from megaclip.models.open_clip_config import OpenClipConfig, open_clip_descriptions, reason_refused
from megaclip.models.transformers_config import card_path, read_card

Towers = Literal["auto", "own", "open_clip"]
"""Implementation of the towers: MegaCLIP's, open_clip's, or MegaCLIP's if they support the description."""

TOWERS_KEY = "towers"
"""Key of a model card with the implementation whose parameter names the weights have, if it is open_clip's."""


def load_model_config(name_or_path: str | Path, towers: Towers = "auto") -> ModelDescription:
    """Read a preset or one of open_clip's descriptions by name, or a model JSON, model card or directory by path.

    Raises ConfigError if there is none, or if it describes a model that cannot be trained.
    """
    name = str(name_or_path)
    return describe(read_card(model_file(name))["model_cfg"], name, towers)


def model_file(name: str) -> Any:
    """Return the file of a preset, of one of open_clip's descriptions, or of a path. Raises ConfigError."""
    if name in list_models():
        path: Any = presets() / f"{name}.json"
    else:
        path = open_clip_descriptions().get(name, Path(name))
    if os.path.isdir(path):  # False if the name is too long for a file, such as the text of a JSON
        card = card_path(path)
        if card is None:
            raise ConfigError(
                f"model {name!r} is a directory without {CARD_NAME}; give one that `megaclip export` or `megaclip "
                "import` has written, or a CLIP or SigLIP of transformers"
            )
        path = card
    if not os.path.isfile(path):
        nearest = closest(name, {*list_models(), *open_clip_descriptions()}, cutoff=0.0)
        raise ConfigError(
            f"unknown model {name!r}; expected a file, a directory with {CARD_NAME}, or a model's name, the nearest of "
            f"which is {nearest!r}; `megaclip show models` lists the names"
        )
    return path


def describe(description: Any, source: str, towers: Towers = "auto") -> ModelDescription:
    """Return the typed description of the implementation that runs it. source: its name for error messages.

    Raises ConfigError if the model cannot be trained, or not by the implementation that `towers` chooses.
    """
    if not isinstance(description, dict):
        return ModelConfig.from_dict(description, source)  # which raises
    if reason_refused(description) is not None:
        return OpenClipConfig.from_dict(description, source)  # which raises
    if towers == "open_clip" or (towers == "auto" and reason_not_own(description) is not None):
        description = {**description}
        start = description.pop("vision_position_init", "normal")  # the key is MegaCLIP's own
        if start != "normal":
            raise ConfigError(
                f"{source}: vision_position_init {json.dumps(start)} requires MegaCLIP's own towers, and open_clip's "
                'modules run this model; leave it out, or set megaclip.towers to "auto"'
            )
        return OpenClipConfig.from_dict(description, source)
    return ModelConfig.from_dict(description, source)
