"""Write the adapters of a run as a folder that `peft.PeftModel.from_pretrained` reads on transformers' model.

The folder has adapter_config.json, adapter_model.safetensors (float32) and a manifest. Names are those of transformers
(`megaclip.models.transformers_keys`). The logit scale and bias are no adapters, and are not in the folder.
"""

from pathlib import Path
from typing import Any

from megaclip.checkpoint.adapters import lora_state
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_directory import check_output, new_directory
from megaclip.checkpoint.open_clip_weights import write_tensors
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import MODEL_CARD, locate, require_whole
from megaclip.errors import CheckpointError
from megaclip.models.lora import adapter_config
from megaclip.models.open_clip_keys import SCALARS, StateDict
from megaclip.models.transformers_config import config_of
from megaclip.models.transformers_keys import transformers_name

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_adapters(
    source: Path, out_dir: Path, tag: str | None, *, overwrite: bool = False, ema: bool = False
) -> StateDict:
    """Write the adapters of a checkpoint to a folder, after every file of the checkpoint was checked.

    Args:
        source, tag, overwrite, ema: as for `open_clip_directory.export_checkpoint`.

    Returns:
        the scalars of the loss, which the folder does not have.

    Raises:
        ConfigError: transformers has no such model.
        CheckpointError: the run has no adapters, transformers has no such layers, or a path is refused.
    """
    folder, tag = locate(source, tag)
    check_output(out_dir, folder, overwrite=overwrite)
    require_whole(folder, tag)
    settings = lora_state(folder / tag)
    if settings is None:
        raise CheckpointError(
            f"{folder / tag} has no adapters, because megaclip.lora was not set; use --format open_clip"
        )
    description = read_model_card(folder / MODEL_CARD).config.to_open_clip()
    bias = 0.0 if "timm_model_name" in description["vision_cfg"] else None  # the folder does not have it
    config_of(description | {"init_logit_bias": bias})  # raises if transformers has no such model
    trained = consolidated_weights(folder, tag, ema=ema, merges=False)
    write_adapters(out_dir, trained, settings)
    return {name: trained[name] for name in SCALARS if name in trained}


def write_adapters(out_dir: Path, trained: StateDict, settings: dict[str, Any]) -> None:
    """Write adapters to a folder. trained: by the names of a run. settings: those of `megaclip.lora`.

    Raises:
        CheckpointError: transformers has no layer of an adapter, or a file cannot be written.
    """
    weights: StateDict = {}
    for name, value in trained.items():
        layer, is_adapter, part = name.partition(".lora_")
        if not is_adapter:
            continue
        if (theirs := transformers_name(layer)) is None:
            raise CheckpointError(
                f"{layer} has an adapter, and transformers' models have no such layer; use --format open_clip, which "
                "merges it"
            )
        part = part.replace(".default.weight", "" if part.startswith("magnitude_vector") else ".weight")
        weights[f"{theirs}.lora_{part}"] = value.detach()
    layers = sorted({name.partition(".lora_")[0] for name in weights})
    with new_directory(out_dir, ["adapter_config.json", WEIGHTS_NAME]):
        adapter_config(layers, settings, inference_mode=True).save_pretrained(str(out_dir))
        write_tensors(out_dir / WEIGHTS_NAME, {f"{_PREFIX}{name}": value for name, value in weights.items()})
