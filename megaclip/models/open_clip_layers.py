"""Blocks and layer groups of the towers of MegaCLIP and open_clip, from input to output.

The groups are those of `layer_groups()` in open_clip's development version (4.2.0.dev0): a stem, one group per block or
stage, and a head. open_clip 3.3.0 has no such method. Layer-wise learning-rate decay uses them, and locks of MegaCLIP's
towers.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from megaclip.errors import ConfigError, first_line
from megaclip.open_clip_package import import_open_clip

Part = nn.Module | nn.Parameter

_BLOCK_CLASS = re.compile(r".*(Block\w*|Layer|Bottleneck)$")
"""Names of classes that are blocks of a tower if they are elements of a list or of a sequence of modules."""

_STEM = ("conv1", "token_embedding", "class_embedding", "positional_embedding", "cls_emb", "ln_pre")
_LAST_NORM = ("ln_post", "ln_final")
_HEAD = ("attn_pool", "proj", "text_projection")
"""Parts before, in and behind the last block of a transformer, by open_clip's names."""


def parameters_of(parts: Iterable[Part]) -> list[nn.Parameter]:
    """Return the parameters of parts of a tower, in their order."""
    return [
        parameter for part in parts for parameter in ([part] if isinstance(part, nn.Parameter) else part.parameters())
    ]


def repeated_blocks(tower: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a tower, from input to output."""
    found: list[nn.Module] = []
    for child in tower.children():
        is_element = isinstance(tower, nn.ModuleList | nn.Sequential)
        if is_element and _BLOCK_CLASS.fullmatch(type(child).__name__):
            found.append(child)
        else:
            found += repeated_blocks(child)
    return found


def layer_groups(tower: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of a tower, each in one group. The last group contains the head and all other parameters.

    Raises ConfigError if the layers of the tower are not known.
    """
    groups = _groups(tower)
    found = {id(parameter) for group in groups for parameter in group}
    groups[-1] += [parameter for parameter in tower.parameters() if id(parameter) not in found]
    return [group for group in groups if group]


def _groups(tower: Any) -> list[list[nn.Parameter]]:
    if hasattr(getattr(tower, "transformer", None), "resblocks"):  # of MegaCLIP or of open_clip
        return _transformer_groups(tower)
    import_open_clip()
    from open_clip.hf_model import HFTextEncoder
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(tower, TimmModel):
        return _timm_groups(tower)
    if isinstance(tower, HFTextEncoder):
        return _hugging_face_groups(tower)
    if isinstance(tower, ModifiedResNet):
        stem = [tower.conv1, tower.bn1, tower.conv2, tower.bn2, tower.conv3, tower.bn3]
        stages = [[tower.layer1], [tower.layer2], [tower.layer3], [tower.layer4], [tower.attnpool]]
        return [parameters_of(parts) for parts in (stem, *stages)]
    raise ConfigError(
        f"the layers of {type(tower).__name__} are not known to MegaCLIP; leave megaclip.image_layer_decay and "
        "megaclip.text_layer_decay out for it"
    )


def _transformer_groups(tower: Any) -> list[list[nn.Parameter]]:
    """Return the stem, the blocks, the last one with the norm behind it, and the head of a transformer."""

    def parts(names: tuple[str, ...]) -> list[Part]:
        found = (getattr(tower, name, None) for name in names)
        return [part for part in found if isinstance(part, nn.Module | nn.Parameter)]

    blocks: list[list[Part]] = [[block] for block in tower.transformer.resblocks]
    blocks[-1] += parts(_LAST_NORM)
    return [parameters_of(group) for group in (parts(_STEM), *blocks, parts(_HEAD))]


def _timm_groups(tower: Any) -> list[list[nn.Parameter]]:
    """Return timm's own groups of the trunk, and the projection of open_clip."""
    from timm.models import group_parameters

    trunk = tower.trunk
    try:
        names = group_parameters(trunk, trunk.group_matcher())
    except Exception as error:  # timm does not document the exceptions of models without groups
        raise ConfigError(
            f"timm has no layer groups for {type(trunk).__name__} ({type(error).__name__}: {first_line(error)}); leave "
            "megaclip.image_layer_decay out"
        ) from None
    layers = [[trunk.get_parameter(name) for name in names[index]] for index in sorted(names)]
    head = list(tower.head.parameters())
    return [*layers, head] if head else layers


def _hugging_face_groups(tower: Any) -> list[list[nn.Parameter]]:
    """Return the embeddings, each layer, and the projection of open_clip together with the model's own pooler."""
    from open_clip.hf_configs import arch_dict

    names = arch_dict[tower.config.model_type]["config_names"]
    encoder = getattr(tower.transformer, "encoder", tower.transformer)
    layers = [list(layer.parameters()) for layer in getattr(encoder, names["layer_attr"])]
    return [list(getattr(tower.transformer, names["token_embeddings_attr"]).parameters()), *layers, []]
