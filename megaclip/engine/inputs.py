"""What a run reads before any process group exists: configuration, data, tokenizer, model description.

A mistake in any of them is one error here, at once, on every rank: nothing has been started that could hang.

Weights go with the tokenizer and the pixels that they were trained with. So the model card beside --pretrained, or that
of --model, says what the flags leave out; a flag that contradicts it is taken, with a warning.
"""

import filecmp
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclip.checkpoint.open_clip import OPENAI_PREPROCESS, read_preprocess, tokenizer_of
from megaclip.config import MegaclipSection, TrainArguments, TrainingConfig, load_training_config
from megaclip.data import (
    ImageTransform,
    LabelledDataset,
    PairDataset,
    Tokenizer,
    load_tokenizer,
    open_labelled,
    open_pairs,
)
from megaclip.errors import CheckpointError, ConfigError
from megaclip.logging import get_logger
from megaclip.models import ModelConfig, list_models, load_model_config
from megaclip.models.config import CARD_NAME

logger = get_logger(__name__)

# What weights depend on and their shapes do not show.
_BEHIND_THE_SHAPES = {
    "vision_cfg": ("head_width", "pool_type", "final_ln_after_pool"),
    "text_cfg": ("heads", "pool_type", "no_causal_mask"),
}


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
    """Read and check everything the command line names. Raises MegaclipError."""
    config = load_training_config(arguments.deepspeed_config)
    _check_that_weights_are_here(arguments)
    model_config = load_model_config(arguments.model)
    _check_settings(arguments, config.megaclip, model_config)
    card = _card_directory(arguments)
    if card is not None:
        _warn_of_another_model(arguments.model, model_config, card)
    tokenizer_name = _tokenizer_name(arguments.tokenizer, card)
    tokenizer = load_tokenizer(tokenizer_name, model_config.text_cfg.context_length)
    model_config = model_config.replace(text_cfg=_text_settings(tokenizer, model_config))
    preprocess = _preprocess(arguments, card)
    if card is not None:
        pixels_said = ", ".join(f"{name} {value}" for name, value in preprocess.items())
        logger.info("tokenizer %s, %s: from %s where no flag says it", tokenizer_name, pixels_said, card / CARD_NAME)
    keys: dict[str, Any] = {
        "dataset_type": arguments.dataset_type,
        "image_key": arguments.image_key,
        "caption_key": arguments.caption_key,
    }
    pixels: dict[str, Any] = {"size": model_config.vision_cfg.image_size, **preprocess}
    return Inputs(
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        train=open_pairs(arguments.train_data, weights=arguments.train_data_weights or None, **keys),
        validation=open_pairs(arguments.val_data, **keys) if arguments.val_data else None,
        labelled=open_labelled(arguments.zeroshot_data) if arguments.zeroshot_data else None,
        train_transform=_transform(card, training=True, scale=arguments.aug_scale, **pixels),
        evaluation_transform=_transform(card, **pixels),
    )


def _transform(card: Path | None, **settings: Any) -> ImageTransform:
    """The transform, or an error that names the card that may have asked for what there is not."""
    try:
        return ImageTransform(**settings)
    except ConfigError as error:
        if card is None:
            raise
        flags = "--image-mean, --image-std, --image-interpolation or --image-resize-mode"
        raise ConfigError(f"{card / CARD_NAME}: {error}; say by {flags} what to do instead") from None


def _text_settings(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """What `text_cfg` must say for the text tower, here and in open_clip, to fit the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        settings = tokenizer.write_open_clip(folder)
    if config.text_cfg.pool_type == "eos":
        settings["eos_id"] = tokenizer.eos_id
    return settings


def _check_settings(arguments: TrainArguments, section: MegaclipSection, model_config: ModelConfig) -> None:
    """Refuse what the command line, ds_config.json and the model contradict each other in."""
    if section.loss == "siglip" and model_config.init_logit_bias is None:
        raise ConfigError(
            f'{arguments.model}: megaclip.loss "siglip" needs a model with init_logit_bias (-10 in SigLIP, with '
            "init_logit_scale 2.303); add it to the model's JSON"
        )
    if section.is_global and "logit_scale_max" in arguments.model_fields_set:
        raise ConfigError(
            f"--logit-scale-max has no effect with megaclip.loss {section.loss!r}: bound its temperature by "
            "megaclip.fastclip.temperature_min"
        )
    if arguments.data_offload_dir is None:
        return
    if section.data_offload in ("cpu", "reread"):
        raise ConfigError(
            f"--data-offload-dir has no effect with megaclip.data_offload {section.data_offload!r}: it is for 'disk' "
            "and 'auto'"
        )
    if not Path(arguments.data_offload_dir).is_dir():
        raise ConfigError(f"--data-offload-dir {arguments.data_offload_dir!r} is not a folder: make it first")


def _check_that_weights_are_here(arguments: TrainArguments) -> None:
    """Refuse open_clip's names of models and weights that it would download."""
    for prefix in ("local-dir:", "hf-hub:"):
        if arguments.model.startswith(prefix):
            raise ConfigError(
                f"--model {arguments.model}: nothing is downloaded here; give a directory's path to --model, and to "
                "--pretrained to start from its weights"
            )
    if arguments.pretrained is not None and not Path(arguments.pretrained).exists():
        raise ConfigError(
            f"--pretrained {arguments.pretrained!r} does not exist. It takes a weights file or a directory, none of "
            "open_clip's tags: download what the tag stands for (docs/from_open_clip.md), check it with "
            "tools/import_open_clip.py and give its directory"
        )


def _card_directory(arguments: TrainArguments) -> Path | None:
    """Where the model card of the weights lies or, if they have none, that of the model; None when neither has."""
    places = []
    if arguments.pretrained is not None:
        path = Path(arguments.pretrained)
        places.append(path.parent if path.is_file() else path)
    if arguments.model not in list_models():
        path = Path(arguments.model)
        places.append(path.parent if path.name == CARD_NAME else path)
    return next((place for place in places if (place / CARD_NAME).is_file()), None)


def _warn_of_another_model(model: str, config: ModelConfig, card: Path) -> None:
    """Say where --model and the card of --pretrained differ in what the weights' shapes do not show."""
    ours, theirs = config.model_dump(), load_model_config(card).model_dump()
    pairs = [("quick_gelu", ours["quick_gelu"], theirs["quick_gelu"])]
    for section, names in _BEHIND_THE_SHAPES.items():
        pairs += [(f"{section}.{name}", ours[section][name], theirs[section][name]) for name in names]
    for name, here, there in pairs:
        if here != there:
            logger.warning(
                "--model %s has %s %s, but the weights in %s were trained with %s", model, name, here, card, there
            )


def _tokenizer_name(given: str | None, card: Path | None) -> str:
    """ "clip" or the path of a sentencepiece model: the flag's, else the card's, else CLIP's."""
    if card is None:
        return given or "clip"
    try:
        own = tokenizer_of(card, load_model_config(card))
    except CheckpointError:
        if given is None:
            raise
        return given
    if given is not None and given != own and not (_is_file(given, own) and filecmp.cmp(given, own, shallow=False)):
        logger.warning("--tokenizer %s is not the tokenizer of the model in %s, %s", given, card, own)
    return given or own


def _is_file(*paths: str) -> bool:
    return all(Path(path).is_file() for path in paths)


def _preprocess(arguments: TrainArguments, card: Path | None) -> dict[str, Any]:
    """mean, std, interpolation and resize_mode: each the flag's, else the card's, else OpenAI's."""
    told = OPENAI_PREPROCESS if card is None else read_preprocess(card)
    chosen = {}
    for name in OPENAI_PREPROCESS:
        own, given = told[name], getattr(arguments, f"image_{name}")
        if card is not None and given not in (None, own):
            flag = "--image-" + name.replace("_", "-")
            logger.warning("%s %s: the weights in %s were trained with %s", flag, given, card, own)
        chosen[name] = own if given is None else given
    return chosen
