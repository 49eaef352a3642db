"""Weights of a run that trains adapters: its checkpoints hold the adapters, and the files of --pretrained the rest.

state.json records the settings of the adapters, the files of --pretrained, and the checksum of their weights. An export
reads the files again, and refuses other weights. It either merges the adapters with the weights, for open_clip's
format, or writes the adapters alone, as `peft.PeftModel` reads them on transformers' model.
"""

from pathlib import Path
from typing import Any

from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_weights import assigned_model, pretrained_weights
from megaclip.checkpoint.search import MODEL_CARD, STATE
from megaclip.checkpoint.store import read_state
from megaclip.errors import CheckpointError
from megaclip.models import meta_model
from megaclip.models.lora import add_adapters, checksum_of, has_adapters, merge_adapters
from megaclip.models.open_clip_keys import StateDict

LORA, BASE = "lora", "base"
"""Entries of state.json: the settings of the adapters with the checksum of the weights below them, or None; and the
arguments of `pretrained_weights` that read these weights, with absolute paths."""


def lora_state(step: Path) -> dict[str, Any] | None:
    """Return the entry `LORA` of the state of a checkpoint, which is whole; None if the run has no adapters."""
    state = read_state(step.parent, step.name)
    return None if state.get(LORA) is None else {**state[LORA], BASE: state[BASE]}


def merged_weights(step: Path, trained: StateDict) -> StateDict:
    """Return a checkpoint's weights, float32, with its adapters merged into the weights of --pretrained.

    step: folder of the checkpoint of a run with adapters. trained: its trained parameters and buffers. Raises
    CheckpointError if the files of --pretrained are missing, damaged, or hold other weights.
    """
    settings = lora_state(step)
    assert settings is not None, "only runs with adapters merge"
    config, arguments = read_model_card(step.parent / MODEL_CARD).config, settings.pop(BASE)
    paths = [value for value in arguments.values() if isinstance(value, str)]
    if missing := [path for path in paths if not Path(path).exists()]:
        raise CheckpointError(
            f"{missing[0]} does not exist: {step} holds adapters, and the run read the weights below them from there; "
            "put them there again (a link is enough)"
        )
    base = pretrained_weights(meta_model(config), **arguments)
    if (found := checksum_of(base)) != (recorded := settings.pop("base_sha256")):
        raise CheckpointError(
            f"the adapters of {step} were trained on weights with SHA-256 {recorded}, and those of "
            f"{' and '.join(paths)} have {found}; put the weights there that the run started from"
        )
    model = assigned_model(config, base)
    add_adapters(model, settings)
    loaded = model.load_state_dict(trained, strict=False)
    if different := [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if has_adapters([name]))]:
        raise CheckpointError(f"{step}: {different[0]} does not fit megaclip.lora in its {STATE}; choose another one")
    return merge_adapters(model)
