"""Parameter groups of the optimizer: weight decay, and the learning rates of towers and layers.

By default there are two groups, with and without weight decay, and one group for each scalar of the loss. `logit_scale`
and `logit_bias` have separate groups, so that each float32 master is one tensor at every ZeRO stage. The settings
`image_lr`, `image_weight_decay` and `image_layer_decay` of the section "megaclip", and those of the text tower, divide
the first two groups by tower, or by the layers of a tower (`models.open_clip_layers`).

Each group has a factor of the learning rate, so all groups follow the same schedule.
"""

from typing import Any

from torch import nn

from megaclip.checkpoint.saved_states import PARAMETER_NAMES
from megaclip.config import MegaclipSection, TrainingConfig
from megaclip.errors import ConfigError
from megaclip.logging import format_count, get_logger
from megaclip.models import DualEncoder
from megaclip.models.dual_encoder import TOWER_PREFIXES
from megaclip.models.open_clip_keys import SCALARS
from megaclip.models.open_clip_layers import layer_groups

logger = get_logger(__name__)

LR_SCALE = "lr_scale"
"""Key of a group's factor of the learning rate."""


def grouping(section: MegaclipSection) -> dict[str, str | None]:
    """Return the division of each tower's parameters besides weight decay: "layers", "tower", or None for no division.

    A resumed run must have the same.
    """
    found: dict[str, str | None] = {}
    for tower in TOWER_PREFIXES:
        set_keys = {key for key, value in _settings(section, tower).items() if value is not None}
        found[tower] = "layers" if "layer_decay" in set_keys else "tower" if set_keys else None
    return found


def _settings(section: MegaclipSection, tower: str) -> dict[str, float | None]:
    """Return a tower's own settings in the section "megaclip"."""
    return {key: getattr(section, f"{tower}_{key}") for key in ("lr", "weight_decay", "layer_decay")}


def parameter_groups(model: DualEncoder, config: TrainingConfig) -> list[dict[str, Any]]:
    """Return the trainable parameters as optimizer groups, without empty ones.

    Each group has a name, a weight decay, a factor of the learning rate (`LR_SCALE`), and at ZeRO-0 the names of its
    parameters, which checkpoints save. Parameters are chosen by name, not by shape, because ZeRO-3 changes the shapes.

    Raises:
        ConfigError: a setting of a tower has no effect, or the layers of a tower are not known.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    scalars = {name: trained.pop(name) for name in SCALARS if name in trained}
    not_decayed, base = model.no_weight_decay_names(), config.optimizer.params
    divided: list[dict[str, Any]] = []
    for tower, division in grouping(config.megaclip).items():
        if division is None:
            continue
        settings = _settings(config.megaclip, tower)
        own = {name: trained.pop(name) for name in list(trained) if name.startswith(TOWER_PREFIXES[tower])}
        layers = _layers(model, tower, own) if division == "layers" else [own]
        _check_effect(tower, settings, layers, not_decayed)
        weight_decay = base.weight_decay if settings["weight_decay"] is None else settings["weight_decay"]
        factor, decay = (settings["lr"] or base.lr) / base.lr, settings["layer_decay"] or 1.0
        scales = [factor * decay**depth for depth in reversed(range(len(layers)))]
        for number, (layer, scale) in enumerate(zip(layers, scales, strict=True)):
            divided += _by_weight_decay(f"{tower}_{number}_", layer, not_decayed, weight_decay, scale)
        logger.info(
            "%s tower: learning rate %.3g in %s, %.3g in the first one, weight decay %g",
            tower,
            base.lr * scales[-1],
            format_count(len(layers), "layer group"),
            base.lr * scales[0],
            weight_decay,
        )
    groups = _by_weight_decay("", trained, not_decayed, base.weight_decay, 1.0) + divided
    groups += [
        {"name": name, "params": [parameter], "weight_decay": 0.0, LR_SCALE: 1.0} for name, parameter in scalars.items()
    ]
    groups = [group for group in groups if group["params"]]
    if config.zero_stage == 0:  # at other stages DeepSpeed saves the names
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in groups:
            group[PARAMETER_NAMES] = [names[id(parameter)] for parameter in group["params"]]
    return groups


def _layers(model: DualEncoder, tower: str, trained: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return the trained parameters of a tower by name, one dictionary for each layer group; locked ones are empty."""
    names = {id(parameter): name for name, parameter in trained.items()}
    return [
        {names[id(parameter)]: parameter for parameter in layer if id(parameter) in names}
        for layer in layer_groups(model.visual if tower == "image" else model.text)
    ]


def _by_weight_decay(
    prefix: str, parameters: dict[str, nn.Parameter], not_decayed: set[str], weight_decay: float, lr_scale: float
) -> list[dict[str, Any]]:
    """Return two groups, with and without weight decay."""
    decayed = [parameter for name, parameter in parameters.items() if name not in not_decayed]
    others = [parameter for name, parameter in parameters.items() if name in not_decayed]
    return [
        {"name": f"{prefix}decayed", "params": decayed, "weight_decay": weight_decay, LR_SCALE: lr_scale},
        {"name": f"{prefix}not_decayed", "params": others, "weight_decay": 0.0, LR_SCALE: lr_scale},
    ]


def _check_effect(
    tower: str, settings: dict[str, float | None], layers: list[dict[str, nn.Parameter]], not_decayed: set[str]
) -> None:
    """Raise ConfigError if a setting of a tower changes no trained parameter."""
    trained = [name for layer in layers for name in layer]
    without_effect = {
        "lr": "has no trained parameters" if not trained else "",
        "weight_decay": "" if set(trained) - not_decayed else "has no trained parameters with weight decay",
        "layer_decay": "" if any(layers[:-1]) else "has no trained parameters below its head",
    }
    for key, value in settings.items():
        if value is not None and (reason := without_effect[key]):
            raise ConfigError(
                f"megaclip.{tower}_{key} {value:g} has no effect: the {tower} tower {reason}; leave it out, or use "
                f"another --lock-{tower}"
            )
