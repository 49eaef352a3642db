"""Read and check the inputs of a run: configuration, model description, tokenizer and data.

These checks run before the process group exists. Every rank raises the same error, and no rank waits for another.

Weights depend on the tokenizer and the image preprocessing that they were trained with. So a model card supplies the
settings that no flag sets. It is the card beside --pretrained or, if there is none, the card of --model. A card beside
--pretrained-image takes precedence for image preprocessing, a card beside --pretrained-text for the tokenizer. If a
flag contradicts the card, the flag is used, with a warning.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, ModelCard, read_model_card
from megaclip.checkpoint.weight_files import holds_weights
from megaclip.config import MegaclipSection, TrainArguments, TrainingConfig, load_training_config
from megaclip.data import (
    ImageTransform,
    LabelledDataset,
    PairDataset,
    Tokenizer,
    check_image_root,
    open_labelled,
    open_pairs,
)
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.errors import ConfigError
from megaclip.evaluation.suite import Task, TaskData, open_suite
from megaclip.logging import common_warnings, get_logger
from megaclip.models import ModelConfig, ModelDescription, OpenClipConfig, list_models, load_model_config
from megaclip.models.config import CARD_NAME
from megaclip.models.descriptions import Towers
from megaclip.models.open_clip_config import open_clip_descriptions
from megaclip.models.text import reason_not_to_cut
from megaclip.models.transformers_config import CONFIG_NAME, card_path
from megaclip.objectives import Caption, Objective, load_objective
from megaclip.planner.text_chunks import fitted

logger = get_logger(__name__)

_TYPICAL_CAPTIONS = ("a photo of a cat", "A Photo of a Cat", "it's  2 cats_and -dogs, (naïve)\n", "")
"""Captions for which two tokenizers with one vocabulary must return equal ids."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, read and checked; equal on every rank."""

    config: TrainingConfig
    """Settings of ds_config.json."""
    model_config: ModelDescription
    """Description of the model that the run trains, with every change by a flag. The run and its plan derive everything
    from it."""
    saved_config: ModelDescription
    """Description that checkpoints and the model card record: `model_config` without --force-patch-dropout, which
    applies to one run."""
    tokenizer: Tokenizer
    train: PairDataset
    validation: PairDataset | None
    """Data for retrieval, or None without --val-data."""
    labelled: LabelledDataset | None
    """Data for zero-shot classification, or None without --zeroshot-data."""
    train_transform: ImageTransform
    """Image preprocessing of training."""
    evaluation_transform: ImageTransform
    """Image preprocessing of evaluation and of the exported model."""
    suite: Sequence[tuple[Task, TaskData]] = ()
    """Tasks of --suite with their data."""
    objective: Objective | None = None
    """Objective beside the contrastive loss, not yet attached to a model."""

    @property
    def preprocess_cfg(self) -> dict[str, Any]:
        """Image preprocessing of evaluation, in the schema of open_clip's model card."""
        transform = self.evaluation_transform
        return {
            "mean": list(transform.mean),
            "std": list(transform.std),
            "interpolation": transform.interpolation,
            "resize_mode": transform.resize_mode,
        }


@common_warnings()
def read_inputs(arguments: TrainArguments) -> Inputs:
    """Read and check everything that the command line names. Raises MegaclipError."""
    config = load_training_config(arguments.deepspeed_config, arguments.set)
    _check_that_weights_exist(arguments)
    towers = config.megaclip.towers
    card = _find_model_card(arguments, towers)
    model_config = _model_config(arguments.model, card, towers)
    image_card, text_card = (
        _tower_card(arguments.model, model_config, path, section) or card
        for path, section in ((arguments.pretrained_image, "vision_cfg"), (arguments.pretrained_text, "text_cfg"))
    )
    _check_settings(arguments, config.megaclip, model_config)
    _warn_of_unused_weights(arguments)
    if isinstance(model_config, ModelConfig):
        _check_locks(arguments, model_config)
    chosen = choose_tokenizer(arguments.tokenizer, text_card, model_config)
    saved_config = chosen.fit(model_config)
    model_config = _with_patch_dropout(saved_config, arguments.force_patch_dropout)
    _check_cut(arguments, config.megaclip, model_config)
    preprocess = _preprocess(arguments, image_card)
    if cards := dict.fromkeys(str(used.path) for used in (text_card, image_card) if used is not None):
        settings = ", ".join(f"{name} {value}" for name, value in preprocess.items())
        supplied = f"{' and '.join(cards)} {'supplies' if len(cards) == 1 else 'supply'}"
        logger.info("tokenizer %s, %s; %s what no flag sets", chosen.name, settings, supplied)
    reading = {"dataset_type", "image_key", "caption_key", "image_root", "max_bad_fraction"}
    keys = arguments.model_dump(include=reading)
    weights = arguments.train_data_weights or None
    objective = chosen_objective(arguments, config.megaclip, model_config)
    if model_config.has_decoder and chosen.tokenizer.vocab_size > (words := model_config.text_cfg.vocab_size):
        logger.warning(
            "the tokenizer has %d ids, and the caption decoder has logits for the first %d only: tokens with other ids "
            "are left out of the caption loss; set text_cfg.vocab_size in a copy of the model's JSON to train them",
            chosen.tokenizer.vocab_size,
            words,
        )
    fields = {} if objective is None else objective.fields
    if objective is not None and arguments.feature_cache is not None:
        raise ConfigError(
            f"--feature-cache keeps neither images nor extra fields, which megaclip.objective "
            f"{config.megaclip.objective} may read; leave --feature-cache out"
        )
    train = open_pairs(arguments.train_data, weights=weights, id_key=arguments.id_key, fields=fields, **keys)
    validation = open_pairs(arguments.val_data, **keys) if arguments.val_data else None
    check_image_root(arguments.image_root, train, validation)
    if arguments.val_fraction is not None:
        train, validation = train.split(arguments.val_fraction)
        logger.info("--val-fraction: %d samples for training, %d held out", len(train), len(validation))
    pixels: dict[str, Any] = {"size": model_config.vision_cfg.image_size, **preprocess}
    train_transform = _transform(
        image_card, training=not arguments.no_augmentation, scale=arguments.aug_scale, **pixels
    )
    for other in () if objective is None else objective.prepare(train_transform, chosen.tokenizer):
        _check_tokenizer_of(other, chosen.tokenizer, model_config.text_cfg.context_length)
    return Inputs(
        config=fitted(config, model_config, pairs=objective is not None and objective.encodes_pairs()),
        model_config=model_config,
        saved_config=saved_config,
        objective=objective,
        tokenizer=chosen.tokenizer,
        train=train,
        validation=validation,
        labelled=open_labelled(arguments.zeroshot_data, max_bad_fraction=arguments.max_bad_fraction)
        if arguments.zeroshot_data
        else None,
        suite=open_suite(Path(arguments.suite)) if arguments.suite is not None else (),
        train_transform=train_transform,
        evaluation_transform=_transform(image_card, **pixels),
    )


def chosen_objective(
    arguments: TrainArguments, section: MegaclipSection, model_config: ModelDescription
) -> Objective | None:
    """Return the objective of the settings, or the caption loss of a model with a caption decoder.

    Raises:
        ConfigError: the objective cannot be constructed, or leaves the decoder without a loss.
    """
    torch.manual_seed(arguments.seed)  # for a constructor that draws random values
    chosen = load_objective(section.objective, section.objective_settings or {})
    if chosen is not None and section.tensor_parallel_size > 1:
        raise ConfigError(
            f"megaclip.objective {section.objective!r} cannot be used with megaclip.tensor_parallel_size "
            f"{section.tensor_parallel_size}, whose ranks encode their samples together; set it to 1"
        )
    if not model_config.has_decoder or isinstance(chosen, Caption):
        return chosen
    if chosen is not None:
        raise ConfigError(
            f"megaclip.objective {section.objective!r} would not train the caption decoder of --model "
            f"{arguments.model}; derive it from megaclip.objectives.Caption, or leave megaclip.objective out"
        )
    return Caption(arguments.coca_caption_loss_weight, arguments.coca_contrastive_loss_weight)


def _check_tokenizer_of(card: ModelCard, tokenizer: Tokenizer, length: int) -> None:
    """Raise ConfigError unless the model of `card` can read the run's tokens, of which captions have up to `length`."""
    same_length = card.config.replace(text_cfg={"context_length": tokenizer.context_length})
    own = choose_tokenizer(None, card, same_length).tokenizer
    positions = card.config.text_cfg.context_length
    if own.identity != tokenizer.identity or positions < length:
        raise ConfigError(
            f"megaclip.objective gives the run's tokens to the model in {card.directory}: its tokenizer is "
            f"{own.identity}, for up to {positions} tokens, and that of the run is {tokenizer.identity}, for {length}; "
            "use its tokenizer as --tokenizer, and at most its text_cfg.context_length; or store its features"
        )
    # Tokenizers with one vocabulary may differ in letter case, white space, special tokens and padding.
    for caption in _TYPICAL_CAPTIONS:
        if not torch.equal(*(each([caption]) for each in (own, tokenizer))):
            raise ConfigError(
                f"megaclip.objective gives the run's tokens to the model in {card.directory}: its tokenizer has the "
                f"vocabulary of the run's, but other ids for the caption {caption!r}; use its tokenizer as "
                "--tokenizer, or store its features"
            )


def model_preprocessing(model: str, tokenizer: str | None) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the arguments of `ImageTransform` of a run with these --model and --tokenizer.

    Raises MegaclipError.
    """
    arguments = TrainArguments.model_construct(
        deepspeed_config="none", model=model, train_data=["none"], tokenizer=tokenizer
    )
    card = _find_model_card(arguments, "auto")
    config = _model_config(model, card, "auto")
    chosen = choose_tokenizer(tokenizer, card, config)
    return chosen.tokenizer, {"size": config.vision_cfg.image_size, **_preprocess(arguments, card)}


def _transform(card: ModelCard | None, **settings: Any) -> ImageTransform:
    """Return the transform. The error for a setting that is not supported names the model card, if there is one."""
    try:
        return ImageTransform(**settings)
    except ConfigError as error:
        if card is None:
            raise
        flags = "--image-mean, --image-std, --image-interpolation or --image-resize-mode"
        raise ConfigError(f"{card.path}: {error}; override it with {flags}") from None


def _check_settings(arguments: TrainArguments, section: MegaclipSection, model_config: ModelDescription) -> None:
    """Raise ConfigError if the command line, ds_config.json and the model contradict each other."""
    if section.loss == "siglip" and model_config.init_logit_bias is None:
        raise ConfigError(
            f'--model {arguments.model} has no init_logit_bias, which megaclip.loss "siglip" requires; add '
            "init_logit_bias to the model's JSON (SigLIP has -10, with init_logit_scale 2.303)"
        )
    if isinstance(model_config, OpenClipConfig):
        _check_open_clip_settings(arguments, section)
    if section.lora is not None and arguments.pretrained is None:
        raise ConfigError(
            "megaclip.lora requires --pretrained: adapters change a trained model, and checkpoints refer to its "
            "weights; set it, or leave out megaclip.lora"
        )
    if section.is_global and "logit_scale_max" in arguments.model_fields_set:
        raise ConfigError(
            f"--logit-scale-max has no effect with megaclip.loss {section.loss!r}; set "
            "megaclip.fastclip.temperature_min instead, which bounds its temperature"
        )
    weights = {"coca_caption_loss_weight", "coca_contrastive_loss_weight"} & arguments.model_fields_set
    if weights and not model_config.has_decoder:
        raise ConfigError(
            f"--{min(weights).replace('_', '-')} has no effect with --model {arguments.model}, which has no caption "
            "decoder (multimodal_cfg); leave it out, or use one of the coca models"
        )
    if arguments.eval_ema and section.ema_decay is None:
        raise ConfigError(
            "--eval-ema evaluates the moving average of the weights, and megaclip.ema_decay is not set; set it, or "
            "leave out --eval-ema"
        )
    if "id_key" in arguments.model_fields_set and section.same_ids == "ignore":
        raise ConfigError(
            "--id-key has no effect with megaclip.same_ids 'ignore'; set same_ids to 'mask' or 'positive', or leave "
            "out --id-key"
        )
    if section.loss == "clip" and section.same_ids == "positive" and arguments.id_key == "caption":
        logger.warning(
            "megaclip.same_ids 'positive' changes nothing for equal captions, because their features are equal; use "
            "'mask', or an --id-key that images with different captions share"
        )
    if arguments.data_offload_dir is not None:
        if section.data_offload in ("cpu", "reread"):
            raise ConfigError(
                f"--data-offload-dir has no effect with megaclip.data_offload {section.data_offload!r}; remove it, or "
                "set megaclip.data_offload to 'disk' or 'auto'"
            )
        if not Path(arguments.data_offload_dir).is_dir():
            raise ConfigError(f"--data-offload-dir {arguments.data_offload_dir!r} is not a folder; create it first")
    if arguments.feature_cache is not None:
        _check_feature_cache(arguments, section, model_config)


def _check_feature_cache(arguments: TrainArguments, section: MegaclipSection, model_config: ModelDescription) -> None:
    """Raise ConfigError if the features of an image might differ between steps, or are divided among ranks."""
    dropout = arguments.force_patch_dropout
    if isinstance(model_config, OpenClipConfig):
        raise ConfigError(
            f"--feature-cache requires MegaCLIP's own image tower, and open_clip's modules run --model "
            f"{arguments.model}, which may have dropout and batch norms; leave --feature-cache out"
        )
    if (model_config.vision_cfg.patch_dropout if dropout is None else dropout) > 0:
        raise ConfigError("--feature-cache requires images without patch dropout; add --force-patch-dropout 0")
    if section.tensor_parallel_size > 1:
        raise ConfigError(
            f"--feature-cache cannot be used with megaclip.tensor_parallel_size {section.tensor_parallel_size}; set it "
            "to 1, or leave --feature-cache out"
        )


def _check_locks(arguments: TrainArguments, model_config: ModelConfig) -> None:
    """Raise ConfigError for a lock that locks nothing; warn if both towers are locked entirely."""
    image, text = arguments.lock_image_unlocked_groups, arguments.lock_text_unlocked_layers
    for flag, unlocked, tower in (
        ("--lock-image-unlocked-groups", image, model_config.vision_cfg),
        ("--lock-text-unlocked-layers", text, model_config.text_cfg),
    ):
        groups = tower.layers + 1 + tower.has_head  # the stem, each block, pooling and projection
        if unlocked >= groups:
            raise ConfigError(
                f"{flag} {unlocked}: the tower has {groups} groups (stem, {tower.layers} blocks, projection), so "
                f"nothing would be locked; use at most {groups - 1}, or leave out {flag.partition('-unlocked')[0]}"
            )
    if arguments.lock_image and arguments.lock_text and not image and not text:
        logger.warning(
            "--lock-image and --lock-text: both towers are locked, so only logit_scale (and logit_bias) is trained; "
            "--lock-text-unlocked-layers 1 would train the text projection"
        )


def _check_open_clip_settings(arguments: TrainArguments, section: MegaclipSection) -> None:
    """Raise ConfigError for settings that require MegaCLIP's own towers, if open_clip's modules run the model."""
    for setting, accepted in (("tensor_parallel_size", 1), ("layer_norm", "torch")):
        if (value := getattr(section, setting)) != accepted:
            raise ConfigError(
                f"megaclip.{setting} {json.dumps(value)} requires MegaCLIP's own towers, and open_clip's modules run "
                f"--model {arguments.model}; use {json.dumps(accepted)}, or a model that `megaclip show models` lists "
                "with MegaCLIP's own towers"
            )


def _check_cut(arguments: TrainArguments, section: MegaclipSection, model_config: ModelDescription) -> None:
    """Raise ConfigError if captions are to be cut and the features of the text tower depend on the padding."""
    reason = reason_not_to_cut(model_config.text_cfg)
    if section.cut_captions is True and reason is not None:
        raise ConfigError(
            f"megaclip.cut_captions true cannot be used with --model {arguments.model}, whose features depend on the "
            f'padding of the captions: {reason}; use "auto" or false, which encode the padding too'
        )


def _check_that_weights_exist(arguments: TrainArguments) -> None:
    """Raise ConfigError for names of models and weights that open_clip would download, and for missing weights."""
    for prefix in ("local-dir:", "hf-hub:"):
        if arguments.model.startswith(prefix):
            raise ConfigError(
                f"--model {arguments.model} has the prefix {prefix!r}, but MegaCLIP downloads nothing; give the path "
                "of a directory to --model, and to --pretrained to start from its weights"
            )
    for flag in ("pretrained", "pretrained_image", "pretrained_text"):
        path = getattr(arguments, flag)
        if path is None or Path(path).exists():
            continue
        raise ConfigError(
            f"--{flag.replace('_', '-')} {path!r} does not exist; expected a weights file or a directory, not one of "
            "open_clip's tags. Download the weights of the tag (`megaclip show from_open_clip`), check them "
            "with `megaclip import` and give its output directory"
        )


def _find_model_card(arguments: TrainArguments, towers: Towers) -> ModelCard | None:
    """Return the model card of --pretrained, else that of --model, or None if neither has a card."""
    directories = [] if arguments.pretrained is None else [_directory(arguments.pretrained)]
    if (own := _card_directory(arguments.model)) is not None:
        directories.append(own)
    found = next((directory for directory in directories if card_path(directory) is not None), None)
    return None if found is None else read_model_card(found, towers=towers)


def _tower_card(model: str, config: ModelDescription, path: str | None, section: str) -> ModelCard | None:
    """Return the model card beside the weights of one tower, or None. Warn if its tower computes different features.

    section: "vision_cfg" or "text_cfg".
    """
    if path is None or card_path(_directory(path)) is None:
        return None
    card = read_model_card(_directory(path), towers="auto")
    if type(card.config) is type(config):
        card.warn_of_other_features(model, config, section)
    return card


def _directory(weights: str) -> Path:
    """Return the directory that contains the weights. weights: a file, or that directory."""
    path = Path(weights)
    return path.parent if path.is_file() else path


def _warn_of_unused_weights(arguments: TrainArguments) -> None:
    """Warn if --model is a directory with weights, because only --pretrained loads weights."""
    named = (arguments.pretrained, arguments.pretrained_image, arguments.pretrained_text, arguments.resume)
    directory = _card_directory(arguments.model)
    if directory is not None and not any(named) and holds_weights(directory):
        logger.warning(
            "--model %s holds weights, but training starts from random ones: set --pretrained %s to start from them",
            arguments.model,
            directory,
        )


def _card_directory(model: str) -> Path | None:
    """Return the directory in which --model would have a model card, or None for a preset."""
    if model in list_models() or model in open_clip_descriptions():
        return None
    path = Path(model)
    return path.parent if path.name in (CARD_NAME, CONFIG_NAME) else path


def _model_config(model: str, card: ModelCard | None, towers: Towers) -> ModelDescription:
    """Return the description that --model names. Warn if the card of the weights describes different features."""
    own = _card_directory(model)
    if card is not None and own is not None and own.resolve() == card.directory.resolve():
        return card.config
    config = load_model_config(model, towers)
    if card is not None:
        card.warn_of_other_features(model, config)
    return config


def _with_patch_dropout(config: ModelDescription, forced: float | None) -> ModelDescription:
    """Return the description with the value of --force-patch-dropout, if it is given."""
    if forced is None:
        return config
    try:
        return config.replace(vision_cfg={"patch_dropout": forced})
    except ConfigError as error:
        raise ConfigError(f"--force-patch-dropout {forced}: {error}, or leave out the flag") from None


def _preprocess(arguments: TrainArguments, card: ModelCard | None) -> dict[str, Any]:
    """Return mean, std, interpolation and resize_mode: each from its flag, else the card, else OpenAI's CLIP."""
    chosen = dict(OPENAI_PREPROCESS if card is None else card.pixel_settings)
    for name, own in chosen.items():
        given = getattr(arguments, f"image_{name}")
        if given is None:
            continue
        if card is not None and given != own:
            flag = "--image-" + name.replace("_", "-")
            logger.warning("%s %s: the weights in %s were trained with %s", flag, given, card.directory, own)
        chosen[name] = given
    return chosen
