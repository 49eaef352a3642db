"""LoRA adapters of both towers, by peft: the layers that get them, their checkpoints' names, and merged weights.

An adapter adds scale * B @ A to the weight of a linear layer (Hu et al., 2021, arXiv:2106.09685). peft replaces the
layer by a module with the layer itself, `base_layer`, and the two matrices. So `x.weight` becomes
`x.base_layer.weight`, beside `x.lora_A.default.weight` and `x.lora_B.default.weight`.

`nn.MultiheadAttention`, in open_clip's modules, gets no adapters. It reads its weights without calling its layers, so
peft adds the product to the weight before each forward pass, and subtracts it afterwards. The sums round, and the pass
that activation checkpointing repeats and ZeRO-3's partitions do not fit to it. MegaCLIP's own towers and timm's trunks
have linear layers.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from megaclip.errors import ConfigError
from megaclip.models.dual_encoder import DualEncoder
from megaclip.models.open_clip_keys import SCALARS, StateDict
from megaclip.models.open_clip_layers import repeated_blocks
from megaclip.open_clip_package import import_torchvision


def add_adapters(model: DualEncoder, settings: Mapping[str, Any]) -> list[str]:
    """Add adapters to the linear layers in a model's blocks, and freeze everything else except the loss's scalars.

    The values of A are drawn from torch's global seed; those of B are 0, so the features stay the same.

    settings: all settings of `megaclip.lora`. Returns the names of the layers. Raises ConfigError if peft is not
    installed, or if a tower has none of the layers.
    """
    chosen, targets = list[str](), settings["targets"]
    for tower in settings["towers"]:
        layers = _linear_layers(model, tower)
        kinds = sorted({name.rpartition(".")[2] for name in layers})
        if not layers:
            raise ConfigError(
                f"megaclip.lora.towers {tower!r}: the blocks of the {tower} tower have no linear layers to which peft "
                "can add adapters (nn.MultiheadAttention is one fused layer); leave this tower out"
            )
        if unknown := [target for target in targets or () if target not in kinds]:
            raise ConfigError(
                f"megaclip.lora.targets {unknown[0]!r}: the blocks of the {tower} tower have no such linear layer; "
                f"they have {', '.join(kinds)}"
            )
        chosen += [name for name in layers if targets is None or name.rpartition(".")[2] in targets]
    config = adapter_config(chosen, settings)
    import_peft().inject_adapter_in_model(config, model, low_cpu_mem_usage=model.logit_scale.is_meta)
    for name in SCALARS:
        if (scalar := getattr(model, name)) is not None:
            scalar.requires_grad_(True)
    return chosen


def adapter_config(layers: list[str], settings: Mapping[str, Any], **options: Any) -> Any:
    """Return `peft.LoraConfig` of adapters of these layers. settings: as for `add_adapters`. options: peft's own."""
    return import_peft().LoraConfig(
        target_modules=layers,
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        use_dora=settings["dora"],
        use_rslora=settings["rslora"],
        **options,
    )


def _linear_layers(model: DualEncoder, tower: str) -> list[str]:
    """Return the names of the linear layers in the blocks of a tower, except those inside nn.MultiheadAttention."""
    modules = list(model.named_modules())
    fused = tuple(f"{name}." for name, module in modules if isinstance(module, nn.MultiheadAttention))
    layers = {id(module): name for name, module in modules if isinstance(module, nn.Linear)}
    parts = [part for block in repeated_blocks(model.parts()[tower]) for part in block.modules()]
    return [name for part in parts if (name := layers.get(id(part), "")) and not name.startswith(fused)]


def check_use_of_adapters(tower: nn.Module, with_gradient: AbstractSet[torch.Tensor]) -> None:
    """Raise ConfigError if a tower does not use the adapters of a kind of layers. It may skip single blocks by chance.

    with_gradient: the parameters that a backward pass has reached.
    """
    adapters = {p: name.partition(".lora_")[0] for name, p in tower.named_parameters() if ".lora_A." in name}
    kinds = {parameter: layer.rpartition(".")[2] for parameter, layer in adapters.items()}
    used = {kind for parameter, kind in kinds.items() if parameter in with_gradient}
    if unused := sorted(set(kinds.values()) - used):
        raise ConfigError(
            f"megaclip.lora: {type(tower).__name__} reads the weights of its layers {unused[0]!r} without calling the "
            "layers, so adapters there have no effect; list the other layers in lora.targets"
        )


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether parameters of adapters are among the names."""
    return any(".lora_" in name for name in names)


@torch.no_grad()
def merge_adapters(model: DualEncoder) -> StateDict:
    """Add the adapters to the weights of their layers; return all weights by the names of a model without adapters."""
    import_peft()
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    weights = model.named_weights().items()
    return {name.replace(".base_layer.", "."): value.detach() for name, value in weights if ".lora_" not in name}


def checksum_of(weights: StateDict) -> str:
    """Return the SHA-256 of names, shapes and float32 values, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def import_peft() -> Any:
    """Return the package peft, with any build of torch. Raises ConfigError if it is not installed."""
    with contextlib.suppress(ImportError):
        import_torchvision()  # transformers, which peft imports, imports it if it is installed
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"megaclip.lora requires peft, which cannot be imported ({error}); run  pip install 'megaclip[lora]'"
        ) from None
    return peft
