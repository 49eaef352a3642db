"""Write the adapters of a run as a folder that `peft.PeftModel.from_pretrained` reads on transformers' model.

The folder has adapter_config.json, adapter_model.safetensors (float32) and a manifest. Names are those of transformers
(`megaclip.models.transformers_keys`). The logit scale and bias are no adapters, and are not in the folder.
"""

from pathlib import Path
from typing import Any

from megaclip.checkpoint.adapters import lora_state
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.model_directory import check_output, new_directory
from megaclip.checkpoint.open_clip_weights import write_tensors
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import MODEL_CARD, locate, require_whole
from megaclip.errors import CheckpointError
from megaclip.models.lora import adapter_config
from megaclip.models.open_clip_keys import SCALARS, StateDict
from megaclip.models.transformers_config import config_of
from megaclip.models.transformers_keys import transformers_name

_WEIGHTS_NAME = "adapter_model.safetensors"


def export_adapters(
    source: Path, out_dir: Path, tag: str | None, *, overwrite: bool = False, ema: bool = False
) -> StateDict:
    """Write the adapters of a checkpoint to a folder, after every file of the checkpoint was checked.

    The arguments are those of `model_directory.export_checkpoint`. Returns the scalars of the loss, which the
    folder does not have. Raises MegaclipError if the run has no adapters, or transformers no such model or layers.
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
    """Write the adapters among the parameters of a run to a folder. settings: those of `megaclip.lora`."""
    layers, weights = set[str](), StateDict()
    for name, value in trained.items():
        layer, is_adapter, part = name.partition(".lora_")
        if not is_adapter:
            continue
        if (theirs := transformers_name(layer)) is None:
            raise CheckpointError(
                f"{layer} has an adapter, and transformers' models have no such layer; use --format open_clip, which "
                "merges it"
            )
        layers.add(theirs)
        part = part.replace(".default.weight", "" if part.startswith("magnitude_vector") else ".weight")
        weights[f"base_model.model.{theirs}.lora_{part}"] = value.detach()
    with new_directory(out_dir, ["adapter_config.json", _WEIGHTS_NAME]):
        adapter_config(sorted(layers), settings, inference_mode=True).save_pretrained(str(out_dir))
        write_tensors(out_dir / _WEIGHTS_NAME, weights)
