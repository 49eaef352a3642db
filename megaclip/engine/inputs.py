"""What a run reads before any process group exists: configuration, data, tokenizer, model description.

A mistake in any of them is one error here, at once, on every rank: nothing has been started that could hang.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclip.arguments import TrainArguments
from megaclip.config import TrainingConfig, load_training_config
from megaclip.data import (
    OPENAI_MEAN,
    OPENAI_STD,
    ImageTransform,
    LabelledDataset,
    PairDataset,
    Tokenizer,
    load_tokenizer,
    open_labelled,
    open_pairs,
)
from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, load_model_config


@dataclass(frozen=True)
class Inputs:
    """Everything read and checked; the same on every rank."""

    config: TrainingConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    train: PairDataset
    validation: PairDataset | None
    labelled: LabelledDataset | None
    train_transform: ImageTransform
    evaluation_transform: ImageTransform

    @property
    def preprocess_cfg(self) -> dict[str, Any]:
        """How the evaluation transform makes pixels, in open_clip's words."""
        transform = self.evaluation_transform
        return {
            "mean": list(transform.mean),
            "std": list(transform.std),
            "interpolation": transform.interpolation,
            "resize_mode": transform.resize_mode,
        }


def read_inputs(arguments: TrainArguments) -> Inputs:
    """Read and check everything the command line names. Raises ConfigError or DataError."""
    config = load_training_config(arguments.deepspeed_config)
    model_config = load_model_config(arguments.model)
    if config.megaclip.loss == "siglip" and model_config.init_logit_bias is None:
        raise ConfigError(
            f'{arguments.model}: megaclip.loss "siglip" needs a model with init_logit_bias (-10 in SigLIP, with '
            "init_logit_scale 2.303); add it to the model's JSON"
        )
    if config.megaclip.is_global and "logit_scale_max" in arguments.model_fields_set:
        raise ConfigError(
            f"--logit-scale-max has no effect with megaclip.loss {config.megaclip.loss!r}: bound its temperature by "
            "megaclip.fastclip.temperature_min"
        )
    if arguments.data_offload_dir is not None and config.megaclip.data_offload in ("cpu", "reread"):
        raise ConfigError(
            f"--data-offload-dir has no effect with megaclip.data_offload {config.megaclip.data_offload!r}: it is for "
            "'disk' and 'auto'"
        )
    if arguments.data_offload_dir is not None and not Path(arguments.data_offload_dir).is_dir():
        raise ConfigError(f"--data-offload-dir {arguments.data_offload_dir!r} is not a folder: make it first")
    tokenizer = load_tokenizer(arguments.tokenizer, model_config.text_cfg.context_length)
    model_config = model_config.replace(text_cfg=_text_settings(tokenizer))
    keys: dict[str, Any] = {
        "dataset_type": arguments.dataset_type,
        "image_key": arguments.image_key,
        "caption_key": arguments.caption_key,
    }
    pixels: dict[str, Any] = {
        "size": model_config.vision_cfg.image_size,
        "mean": arguments.image_mean or OPENAI_MEAN,
        "std": arguments.image_std or OPENAI_STD,
    }
    return Inputs(
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        train=open_pairs(arguments.train_data, weights=arguments.train_data_weights or None, **keys),
        validation=open_pairs(arguments.val_data, **keys) if arguments.val_data else None,
        labelled=open_labelled(arguments.zeroshot_data) if arguments.zeroshot_data else None,
        train_transform=ImageTransform(training=True, scale=arguments.aug_scale, **pixels),
        evaluation_transform=ImageTransform(**pixels),
    )


def _text_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `text_cfg` must say for the text tower, here and in open_clip, to fit the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizer.write_open_clip(folder)
