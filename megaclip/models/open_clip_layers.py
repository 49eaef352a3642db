"""Layer groups of open_clip's towers, from input to output.

The groups are those of `layer_groups()` in open_clip's development version (4.2.0.dev0): a stem, one group per block or
stage, and a head. open_clip 3.3.0 has no such method. Layer-wise learning-rate decay uses them.
"""

from typing import Any

from torch import nn

from megaclip.errors import ConfigError, first_line
from megaclip.models.blocks import Part, parameters_of
from megaclip.open_clip_package import import_open_clip


def open_clip_layer_groups(tower: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of a tower, each in one group. The last group contains the head and all other parameters.

    Raises:
        ConfigError: the layers of the tower are not known.
    """
    groups = [parameters_of(parts) for parts in _parts(tower)]
    found = {id(parameter) for group in groups for parameter in group}
    groups[-1] += [parameter for parameter in tower.parameters() if id(parameter) not in found]
    return [group for group in groups if group]


def _parts(tower: Any) -> list[list[Part | None]]:
    import_open_clip()
    from open_clip.hf_model import HFTextEncoder
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import TextTransformer, VisionTransformer

    if isinstance(tower, TimmModel):
        return _timm_parts(tower)
    if isinstance(tower, ModifiedResNet):
        stem = [tower.conv1, tower.bn1, tower.conv2, tower.bn2, tower.conv3, tower.bn3]
        return [stem, [tower.layer1], [tower.layer2], [tower.layer3], [tower.layer4], [tower.attnpool]]
    if isinstance(tower, HFTextEncoder):
        return _hugging_face_parts(tower)
    if isinstance(tower, VisionTransformer):
        stem = [tower.conv1, tower.class_embedding, tower.positional_embedding, tower.ln_pre]
        return [stem, *_blocks(tower.transformer.resblocks, tower.ln_post), [tower.proj]]
    if isinstance(tower, TextTransformer):
        stem = [tower.token_embedding, tower.positional_embedding, tower.cls_emb]
        return [stem, *_blocks(tower.transformer.resblocks, tower.ln_final), [_part(tower.text_projection)]]
    raise ConfigError(
        f"the layers of {type(tower).__name__} are not known to MegaCLIP; leave megaclip.image_layer_decay and "
        "megaclip.text_layer_decay out for it"
    )


def _timm_parts(tower: Any) -> list[list[Part | None]]:
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


def _hugging_face_parts(tower: Any) -> list[list[Part | None]]:
    """Return the embeddings, each layer, and the projection of open_clip together with the model's own pooler."""
    from open_clip.hf_configs import arch_dict

    names = arch_dict[tower.config.model_type]["config_names"]
    encoder = getattr(tower.transformer, "encoder", tower.transformer)
    layers: list[list[Part | None]] = [[layer] for layer in getattr(encoder, names["layer_attr"])]
    return [[getattr(tower.transformer, names["token_embeddings_attr"])], *layers, []]


def _blocks(blocks: nn.ModuleList, norm: nn.Module) -> list[list[Part | None]]:
    """Return one group per block; the last one includes the norm behind it."""
    parts: list[list[Part | None]] = [[block] for block in blocks]
    parts[-1].append(norm)
    return parts


def _part(value: Any) -> Part | None:
    return value if isinstance(value, nn.Module | nn.Parameter) else None
