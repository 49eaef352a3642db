"""The command line of launch/train.py: data, model, schedule, evaluation and paths.

Flags carry open_clip's names where open_clip has the flag. What DeepSpeed owns (batches, precision, optimizer, ZeRO)
is set in ds_config.json alone; open_clip's other flags are refused with what to write instead (`open_clip_flags.py`).
"""

import argparse
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from megaclip.config.open_clip_flags import OPEN_CLIP_FLAGS
from megaclip.errors import ConfigError, nearest

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class TrainArguments(BaseModel):
    """Every flag of launch/train.py; the field `train_data` is the flag `--train-data`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    deepspeed_config: str = Field(
        description="ds_config.json: batch, precision, optimizer, ZeRO, and section 'megaclip'"
    )
    model: str = Field(description="preset name (ViT-B-32, ...) or the path of a model JSON in open_clip's schema")
    train_data: list[str] = Field(
        min_length=1,
        description="training data: tar shards with brace patterns or globs, parquet, CSV, JSON lines, image folders, "
        "saved or hub datasets; several make a mixture",
    )
    train_data_weights: list[Annotated[float, Field(gt=0)]] = Field(
        default=[], description="mixture weights, one per --train-data entry (default: by size)"
    )
    dataset_type: Literal["auto", "webdataset", "parquet", "csv", "json", "imagefolder", "saved", "hub"] = Field(
        default="auto", description="how to read --train-data and --val-data, 'auto' by their names"
    )
    image_key: str | None = Field(default=None, description="column or extension of the image")
    caption_key: str | None = Field(default=None, description="column or extension of the caption")
    val_data: list[str] = Field(default=[], description="held-out image-text pairs for retrieval")
    group_captions: bool = Field(default=False, description="--val-data has several captions per image (COCO, Flickr)")
    zeroshot_data: str | None = Field(
        default=None,
        description="labelled images for zero-shot classification: a folder with a folder per class, or "
        "CLIP_benchmark's layout (tar shards with .cls files, classnames.txt, templates)",
    )
    tokenizer: str | None = Field(
        default=None,
        description="'clip', or the path of a sentencepiece model (default: what the card of --pretrained or --model "
        "says, else clip; the --image flags likewise, else OpenAI's)",
    )
    workers: NotNegative = Field(default=4, description="data worker processes per rank")
    shard_order: Literal["shuffled", "sequential"] = Field(
        default="shuffled",
        description="order of the shards; 'sequential' visits them as given (curricula), shuffled within each",
    )
    data_offload_dir: str | None = Field(
        default=None, description="where megaclip.data_offload puts a step's images on disk (default: the run's folder)"
    )
    max_bad_fraction: float = Field(
        default=0.01, ge=0, le=1, description="stop when more than this fraction of the samples cannot be read"
    )
    aug_scale: tuple[float, float] = Field(
        default=(0.9, 1.0), description="area range of the random resized crop, as two numbers"
    )
    image_mean: tuple[float, float, float] | None = Field(default=None, description="channel means of the pixels")
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = Field(
        default=None, description="channel deviations of the pixels"
    )
    image_interpolation: Literal["bicubic", "bilinear"] | None = Field(
        default=None, description="how images are resized: bicubic or bilinear"
    )
    image_resize_mode: Literal["shortest", "squash"] | None = Field(
        default=None, description="evaluation: shortest (resize the shorter side, crop the centre) or squash"
    )

    pretrained: str | None = Field(default=None, description="start from these weights: open_clip file or directory")
    lock_image: bool = Field(default=False, description="freeze the image tower")
    lock_image_unlocked_groups: NotNegative = Field(default=0, description="leave the last n layer groups unfrozen")
    lock_text: bool = Field(default=False, description="freeze the text tower")
    lock_text_unlocked_layers: NotNegative = Field(default=0, description="leave the last n layers unfrozen")
    force_patch_dropout: float | None = Field(
        default=None, ge=0, lt=1, description="override the model's patch dropout"
    )
    logit_scale_max: float = Field(default=100.0, ge=1, description="upper bound of exp(logit_scale); 1 is the lower")

    epochs: Positive | None = Field(default=None, description="passes over the training data (default 32)")
    train_steps: Positive | None = Field(default=None, description="optimizer steps, instead of --epochs")
    warmup: NotNegative | None = Field(
        default=None, description="warm-up steps (default: 10000, or a tenth of the run's steps if that is less)"
    )
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = Field(default="cosine", description="schedule")
    epochs_cooldown: Positive | None = Field(default=None, description="const-cooldown: epochs of cooldown at the end")
    cooldown_steps: Positive | None = Field(default=None, description="const-cooldown: steps of cooldown at the end")
    lr_cooldown_power: float = Field(default=1.0, gt=0, description="const-cooldown: power of the polynomial decay")
    lr_cooldown_end: float = Field(default=0.0, ge=0, description="const-cooldown: learning rate at the end")
    seed: NotNegative = Field(default=0, description="seed of the data order, augmentation, initialisation and dropout")

    logs: str = Field(default="runs", description="folder that holds the runs")
    name: str | None = Field(
        default=None, description="name of the run, its folder below --logs (default: model and time)"
    )
    resume: str | None = Field(
        default=None, description="'auto' (or 'latest') for the run's latest checkpoint, or a checkpoint folder"
    )
    save_frequency: NotNegative = Field(default=1, description="save every n epochs (0: only at the end)")
    save_every_steps: Positive | None = Field(
        default=None, description="save every n steps, instead of --save-frequency"
    )
    keep_last: Positive = Field(default=3, description="checkpoints to keep")
    val_frequency: NotNegative = Field(default=1, description="evaluate every n epochs (0: only at the end)")
    eval_every_steps: Positive | None = Field(
        default=None, description="evaluate every n steps, instead of --val-frequency"
    )
    eval_batch_size: Positive = Field(default=64, description="evaluation batch per rank")
    log_every_n_steps: Positive = Field(
        default=10, description="TensorBoard and log interval, in steps; long steps are shown once a minute at least"
    )
    stop_after_steps: Positive | None = Field(
        default=None, description="save and stop after this many steps in all, with the schedule of the whole run"
    )
    no_plan: bool = Field(default=False, description="start even if the planner says that the run cannot fit")
    debug_traceback: bool = Field(default=False, description="print the traceback of user errors too")
    local_rank: int = Field(default=-1, description="set by the deepspeed launcher")

    @field_validator("resume")
    @classmethod
    def _take_open_clips_word(cls, resume: str | None) -> str | None:
        return "auto" if resume == "latest" else resume

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainArguments":
        if self.epochs and self.train_steps:
            raise ValueError("give --epochs or --train-steps, not both")
        cooldown = self.epochs_cooldown or self.cooldown_steps
        if (self.lr_scheduler == "const-cooldown") != bool(cooldown):
            raise ValueError("--lr-scheduler const-cooldown and --epochs-cooldown (or --cooldown-steps) go together")
        if self.epochs_cooldown and self.cooldown_steps:
            raise ValueError("give --epochs-cooldown or --cooldown-steps, not both")
        if self.train_data_weights and len(self.train_data_weights) != len(self.train_data):
            raise ValueError("--train-data-weights needs one weight for each --train-data entry")
        if not 0 < self.aug_scale[0] <= self.aug_scale[1] <= 1:
            raise ValueError("--aug-scale needs two fractions, the smaller one first")
        if self.lock_image_unlocked_groups and not self.lock_image:
            raise ValueError("--lock-image-unlocked-groups needs --lock-image")
        if self.lock_text_unlocked_layers and not self.lock_text:
            raise ValueError("--lock-text-unlocked-layers needs --lock-text")
        if self.group_captions and not self.val_data:
            raise ValueError("--group-captions needs --val-data")
        if self.val_data == [] and self.zeroshot_data is None and self.eval_every_steps:
            raise ValueError("--eval-every-steps needs --val-data or --zeroshot-data")
        return self


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are ConfigErrors, so that every rank ends in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def _add_flag(parser: argparse.ArgumentParser, name: str, annotation: Any, help_text: str) -> None:
    flag = "--" + name.replace("_", "-")
    names = [flag] if flag == "--" + name else [flag, "--" + name]
    if annotation is bool:
        parser.add_argument(*names, action="store_true", default=argparse.SUPPRESS, help=help_text)
        return
    nargs: int | str | None = None
    if get_origin(annotation) is list:
        nargs = "+"
    elif get_origin(annotation) is tuple:
        nargs = len(get_args(annotation))
    elif any(get_origin(choice) is tuple for choice in get_args(annotation)):
        nargs = 3
    parser.add_argument(*names, nargs=nargs, default=argparse.SUPPRESS, help=help_text.replace("%", "%%"))


def _told_default(field: FieldInfo) -> str:
    """What the help says of a flag that is left out; of some the description says it."""
    if field.is_required():
        return " (needed)"
    if field.default is None or field.default is False or field.default == []:
        return ""
    shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f" (default {shown})"


def build_parser() -> argparse.ArgumentParser:
    """The parser behind `launch/train.py --help`."""
    parser = _Parser(prog="launch/train.py", description="Train a CLIP model on DeepSpeed.", allow_abbrev=False)
    for name, field in TrainArguments.model_fields.items():
        choices = f"; one of {', '.join(get_args(field.annotation))}" if get_origin(field.annotation) is Literal else ""
        _add_flag(parser, name, field.annotation, f"{field.description}{choices}{_told_default(field)}")
    return parser


def parse_arguments(argv: list[str]) -> TrainArguments:
    """Parse and validate the command line. Raises ConfigError with one line that names the flag."""
    parser = build_parser()
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        known = {option for action in parser._actions for option in action.option_strings}
        given = [word.split("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
        raise ConfigError("; ".join(_about_unknown(word, known) for word in given))
    try:
        return TrainArguments(**vars(values))
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + str(problem["loc"][0]).replace("_", "-") if problem["loc"] else ""
        if problem["type"] == "missing":
            raise ConfigError(f"{flag} is needed (see --help)") from None
        got = f", got {problem['input']!r}" if flag else ""
        raise ConfigError(f"{flag + ': ' if flag else ''}{problem['msg'].removeprefix('Value error, ')}{got}") from None


def _about_unknown(word: str, known: set[str]) -> str:
    """What to write instead of a flag of open_clip's, or of a typing mistake."""
    if advice := OPEN_CLIP_FLAGS.get(word.replace("_", "-")):
        return f"{word} {advice}"
    return f"unknown argument {word!r}{nearest(word, known)}"
