"""Write a model as a directory that transformers' `from_pretrained` loads, and the README.md of an export.

`transformers_content` finds out, before anything is written, whether transformers has a model with the same features.
"""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, split_torch_state_dict_into_shards

from megaclip.checkpoint.model_card import ModelCard
from megaclip.checkpoint.open_clip_weights import open_clip_tensors, write_tensors
from megaclip.checkpoint.weight_files import INDEX
from megaclip.files import write_atomically
from megaclip.models import ModelConfig
from megaclip.models.open_clip_keys import StateDict, from_open_clip
from megaclip.models.transformers_config import CONFIG_NAME, PROCESSOR_NAME, config_of, processor_of
from megaclip.models.transformers_keys import to_transformers

MAX_PART = "5GB"
"""Largest file of weights, except for larger tensors."""


def transformers_content(card: ModelCard) -> dict[str, dict[str, Any]]:
    """Return the content of config.json and preprocessor_config.json. Raises ConfigError if transformers has none."""
    config = config_of(card.config.to_open_clip(), card.transformers)
    processor = processor_of(card.preprocess_cfg, card.config.vision_cfg.image_size, config["model_type"])
    return {CONFIG_NAME: config, PROCESSOR_NAME: processor}


def write_transformers(
    directory: Path, card: ModelCard, content: dict[str, dict[str, Any]], weights: StateDict
) -> list[str]:
    """Write config.json, the image processor and the weights, float32, in parts of at most `MAX_PART`.

    content: what `transformers_content` returned. weights: by MegaCLIP's names. Returns the names of the files. Raises
    CheckpointError if the weights are not those of the model in the card, OSError if a file cannot be written.
    """
    is_linear = content[CONFIG_NAME]["model_type"] == "siglip2"
    own = ModelConfig.from_dict(card.config.to_open_clip())
    own_weights = from_open_clip(open_clip_tensors(weights, card.config), own)
    tensors = to_transformers(own_weights, patches_are_linear=is_linear)
    parts = split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_PART)
    files: dict[str, Any] = dict(content)
    if parts.is_sharded:
        files[f"model.safetensors{INDEX}"] = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
    for name, names in parts.filename_to_tensors.items():
        write_tensors(directory / name, {one: tensors[one] for one in names})
    for name, value in files.items():
        write_atomically(directory / name, json.dumps(value, indent=2) + "\n")
    return [*parts.filename_to_tensors, *files]


def readme(formats: list[str], state: dict[str, Any] | None, *, data_names: bool) -> str:
    """Return the README.md of an export, which the Hugging Face hub shows.

    state: state.json of the checkpoint; None: the weights are not those of a run. data_names: list the sources of the
    training data.
    """
    library = "open_clip" if "open_clip" in formats else "transformers"
    header = ModelCardData(library_name=library, pipeline_tag="zero-shot-image-classification", tags=["clip"])
    lines = ["---", header.to_yaml(), "---", "", "# Model", ""]
    lines.append(f"Image-text model in the format of {' and '.join(formats)}, written by MegaCLIP.")
    if state is None:
        return "\n".join([*lines, ""])
    settings = state.get("settings", {})
    arguments, ds_config = settings.get("arguments", {}), settings.get("ds_config", {})
    optimizer = ds_config.get("optimizer", {}).get("params", {})
    facts = {
        "loss": ds_config.get("megaclip", {}).get("loss"),
        "steps": state.get("step"),
        "samples seen": state.get("samples_consumed"),
        "pairs in the training data": state.get("data", {}).get("samples"),
        "batch size": state.get("global_batch"),
        "optimizer": state.get("optimizer"),
        **{name: optimizer.get(name) for name in ("lr", "betas", "eps", "weight_decay")},
        "learning-rate schedule": arguments.get("lr_scheduler"),
        "warm-up steps": arguments.get("warmup"),
        "precision": state.get("precision"),
        "training data": " ".join(arguments.get("train_data", [])) if data_names else None,
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, "", "## Training", "", "| setting | value |", "| --- | --- |", *rows, ""])
