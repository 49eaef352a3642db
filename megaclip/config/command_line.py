"""The command line of launch/train.py: data, model, schedule, evaluation and paths.

Flags have open_clip's names if open_clip has such a flag. The other flags of open_clip are refused, and the message
names the replacement (`open_clip_flags.json`; docs/from_open_clip.md documents the usual ones). Batches, precision,
optimizer and ZeRO are set in ds_config.json only.
"""

import argparse
import json
import re
import sys
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from megaclip.errors import ConfigError, closest, config_error, public

DEFAULT_EPOCHS = 32
"""Number of epochs when neither --train-steps nor --epochs is given."""
LONGEST_DEFAULT_WARMUP = 10_000
"""Largest number of warm-up steps when --warmup is not given. It is open_clip's default."""
DEFAULT_WORKERS = 4
"""Number of data worker processes per rank, also in the planner and in tools."""
MOST_WORKERS = 1024
"""Largest value of --workers: more is a typing mistake, and forks processes until the host has no memory."""

DEFAULT_SKIPS_IN_A_ROW = 10
"""Default of N in --on-nonfinite skip:N, the largest number of consecutive skipped updates."""

DatasetType = Literal["auto", "webdataset", "parquet", "csv", "json", "imagefolder", "saved", "hub"]
DATASET_TYPES = get_args(DatasetType)
"""Values of --dataset-type, also in other commands."""


def _replacements(trainer: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return each refused flag of another trainer -> the rest of the error message, which begins with the flag."""
    return {flag: f"is set in ds_config.json: {key}" for flag, key in trainer["in ds_config.json"].items()} | {
        flag: f"is not a flag here; {advice}" for flag, advice in trainer["elsewhere"].items()
    }


OTHER_TRAINERS = json.loads(Path(__file__).with_name("open_clip_flags.json").read_text(encoding="utf-8"))
"""Flags of open_clip's and FastCLIP's trainers, and their equivalents."""
OPEN_CLIP_FLAGS, FASTCLIP_FLAGS = (_replacements(OTHER_TRAINERS[trainer]) for trainer in ("open_clip", "FastCLIP"))
"""Flags that are refused. FastCLIP's trainer has those of open_clip too."""

Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
NotNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]

_GROUPS = {
    "deepspeed_config": "Required",
    "set": "Settings of ds_config.json",
    "train_data_weights": "Data",
    "aug_scale": "Image preprocessing",
    "pretrained": "Model",
    "epochs": "Schedule",
    "val_data": "Evaluation",
    "logs": "Run and checkpoints",
    "log_every_n_steps": "Logging and faults",
}
"""First flag of each group of the help text -> title of the group."""


_REQUIRES = {
    "shard_cache_gb": ("shard_cache",),
    "keep_text_positions": ("pretrained", "pretrained_text"),
    "lock_image_unlocked_groups": ("lock_image",),
    "lock_text_unlocked_layers": ("lock_text",),
    "group_captions": ("val_data", "val_fraction"),
    "eval_every_steps": ("val_data", "val_fraction", "zeroshot_data", "suite"),
    "eval_ema": ("val_data", "val_fraction", "zeroshot_data", "suite"),
}
"""Flag -> flags of which it requires one."""


class TrainArguments(BaseModel):
    """Every flag of launch/train.py; the field `train_data` is the flag `--train-data`, its docstring the help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    deepspeed_config: str
    """path of ds_config.json (batch, precision, optimizer, ZeRO, the section 'megaclip'), or the name of a shipped one,
    such as zero3_offload"""
    model: str
    """name of a model (such as ViT-B-32), path of a model JSON in open_clip's schema, or an exported or imported
    directory; its weights are loaded by --pretrained only"""
    train_data: list[str] = Field(min_length=1)
    """training data, by path or URL: tar shards (as brace patterns or globs), parquet, CSV, JSON lines, image folders,
    saved or hub datasets; several entries make a mixture"""

    set: list[str] = []
    """settings of ds_config.json for this run, instead of the file's: KEY=VALUE with dots in KEY and a JSON value, such
    as megaclip.loss=siglip or optimizer.params.lr=1e-4; KEY=null leaves a setting out"""

    train_data_weights: list[Annotated[float, Field(gt=0)]] = []
    """mixture weights, one per --train-data entry (default: proportional to their sizes)"""
    dataset_type: DatasetType = "auto"
    """format of --train-data and --val-data; 'auto' detects it from the file names"""
    image_key: str | None = None
    """column or extension of the images"""
    caption_key: str | None = None
    """column, extension or JSON field of the captions; json.FIELD reads only the field; with several keys, each epoch
    draws one by its weight (short:0.7,long:0.3) or takes the next one (short,long)"""
    image_root: str | None = None
    """folder to which the image paths in tables are relative (default: the table's folder, or else the working
    directory)"""
    id_key: str = "caption"
    """which pairs are equal for megaclip.same_ids: those with the same 'caption' (except for white space), the same
    'image' file, or the same value in a column of a table"""
    tokenizer: str | None = None
    """'clip', path of a sentencepiece model, or directory of a Hugging Face tokenizer (default: the tokenizer in the
    model card of --pretrained or --model, else the one that the model names, else 'clip')"""
    workers: int = Field(default=DEFAULT_WORKERS, ge=0, le=MOST_WORKERS)
    """number of data worker processes per rank"""
    image_decoder: Literal["auto", "cpu", "gpu"] = "cpu"
    """where JPEG files of the training data are decoded, cropped and resized: 'cpu' (the data workers), 'gpu' (requires
    torchvision), or 'auto': the data workers, or the GPU if the first steps wait for data and it is faster"""
    shard_order: Literal["shuffled", "sequential"] = "shuffled"
    """order of the shards; 'sequential' keeps the given order (for curricula) and shuffles within each shard"""
    shard_cache: str | None = None
    """folder on a local disk where the ranks of a host keep the tar shards of URLs that are needed next (default:
    samples are read one by one)"""
    shard_cache_gb: PositiveFloat | None = None
    """largest size of --shard-cache in GB (default: half of its disk)"""
    data_offload_dir: str | None = None
    """folder for the images that megaclip.data_offload stores on disk (default: the run's folder)"""
    # `megaclip.config` and `megaclip.data` may not import each other. Loaders and transforms that are constructed
    # without a command line therefore have their own defaults for max_bad_fraction and aug_scale.
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """largest fraction of bad samples; the run stops above it"""

    aug_scale: tuple[float, float] = (0.9, 1.0)
    """smallest and largest area of the random resized crop, as fractions of the image"""
    no_augmentation: bool = False
    """resize and crop training images as in evaluation, without random crops"""
    image_mean: tuple[float, float, float] | None = None
    """channel means of the pixels (default: as in the model card, otherwise OpenAI's)"""
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    """channel standard deviations of the pixels (default: as for --image-mean)"""
    image_interpolation: Literal["bicubic", "bilinear"] | None = None
    """interpolation when images are resized: bicubic or bilinear (default: as for --image-mean)"""
    image_resize_mode: Literal["shortest", "squash"] | None = None
    """resizing in evaluation: shortest (resize the shorter side, then crop the centre) or squash (default: as for
    --image-mean)"""

    pretrained: str | None = None
    """initial weights: an open_clip file or folder"""
    pretrained_image: str | None = None
    """initial weights of the image tower, instead of those of --pretrained: a file or folder with an open_clip model,
    its image tower, or a timm model"""
    pretrained_text: str | None = None
    """initial weights of the text tower, instead of those of --pretrained: a file or folder with an open_clip model,
    its text tower, or a Hugging Face text model"""
    keep_text_positions: NotNegative = 0
    """number of first text positions that stay unchanged when the model's context_length is larger than that of the
    weights, 20 in Long-CLIP; the others are stretched (default: all are interpolated)"""
    lock_image: bool = False
    """freeze the image tower"""
    lock_image_unlocked_groups: NotNegative = 0
    """number of last layer groups to train"""
    feature_cache: str | None = None
    """folder, shared by all hosts, for the features of a locked image tower: training images are encoded once, and
    later steps, epochs and runs read their features instead of the images (requires --lock-image and
    --no-augmentation)"""
    lock_text: bool = False
    """freeze the text tower"""
    lock_text_unlocked_layers: NotNegative = 0
    """number of last layers to train"""
    force_patch_dropout: float | None = Field(default=None, ge=0, lt=1)
    """patch dropout, instead of the model's"""
    logit_scale_max: float = Field(default=100.0, ge=1)
    """upper bound of exp(logit_scale), at least 1; without the flag, weights above it raise it"""
    coca_caption_loss_weight: float = Field(default=2.0, ge=0)
    """factor of the caption loss of a model with a caption decoder"""
    coca_contrastive_loss_weight: float = Field(default=1.0, ge=0)
    """factor of the contrastive loss of a model with a caption decoder"""

    epochs: Positive | None = Field(
        default=None, description=f"passes over the training data (default {DEFAULT_EPOCHS})"
    )
    train_steps: Positive | None = None
    """number of optimizer steps, instead of --epochs"""
    warmup: NotNegative | None = Field(
        default=None,
        description=f"number of warm-up steps (default: {LONGEST_DEFAULT_WARMUP}, or a tenth of the run's steps if "
        "that is less)",
    )
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = "cosine"
    """learning rate schedule"""
    lr_min: float = Field(default=0.0, ge=0)
    """last learning rate (cosine)"""
    epochs_cooldown: Positive | None = None
    """epochs of cooldown at the end (const-cooldown)"""
    cooldown_steps: Positive | None = None
    """steps of cooldown at the end (const-cooldown)"""
    lr_cooldown_power: float = Field(default=1.0, gt=0)
    """power of the decay (const-cooldown)"""
    lr_cooldown_end: float = Field(default=0.0, ge=0)
    """last learning rate (const-cooldown)"""
    seed: int = Field(default=0, ge=0, le=2**64 - 1)  # PyTorch's generators accept no larger seed
    """seed of the data order, augmentation, initialisation and dropout"""
    stop_after_steps: Positive | None = None
    """number of steps, counted from the start of the run, after which the run saves and stops; the schedule stays that
    of the whole run"""

    val_data: list[str] = []
    """held-out image-text pairs for retrieval"""
    val_fraction: float | None = Field(default=None, gt=0, lt=1)
    """fraction of --train-data to hold out for retrieval, instead of --val-data; rows of a table that name one image
    stay together"""
    group_captions: bool = False
    """take every line of a text in --val-data as a caption (CLIP_benchmark's COCO and Flickr); default: a text is one
    caption. Rows with equal images are always one image with several captions, and all captions of a list are used.
    Training takes the captions of a list in turn, one per epoch"""
    zeroshot_data: str | None = None
    """labelled images for zero-shot classification: a folder with one folder per class, or CLIP_benchmark's layout (tar
    shards with .cls files, classnames.txt, templates)"""
    suite: str | None = None
    """folder of small evaluation sets, one sub-folder per task as `megaclip evaluate --suite` reads them; every
    evaluation scores them"""
    val_frequency: NotNegative = 1
    """epochs between evaluations; 0 evaluates only at the end"""
    eval_every_steps: Positive | None = None
    """steps between evaluations (replaces --val-frequency)"""
    eval_ema: bool = False
    """evaluate the moving average of the weights (megaclip.ema_decay) during training"""
    eval_batch_size: Positive = 64
    """batch size of the evaluation, per rank"""

    logs: str = "runs"
    """folder of all runs"""
    name: str | None = None
    """name of the run and of its folder in --logs (default: model and time)"""
    resume: str | None = None
    """checkpoint to resume: 'auto' (or 'latest') for the latest one of the run, or a folder"""
    save_frequency: NotNegative = 1
    """epochs between checkpoints; 0 saves only at the end"""
    save_every_steps: Positive | None = None
    """steps between checkpoints, instead of --save-frequency"""
    keep_last: Positive = 3
    """number of latest checkpoints to keep, besides the best one"""
    keep_every_steps: Positive | None = None
    """also keep the first checkpoint at or after each multiple of this number of steps"""
    async_save: bool = False
    """write checkpoints from a copy in host memory while training continues; training waits only for the copy"""

    log_every_n_steps: Positive = 10
    """steps between log lines and TensorBoard entries; long steps are logged at least once a minute"""
    on_nonfinite: str = Field(
        default="stop",
        description="what to do when the loss or the gradient norm is infinite or NaN: 'stop', or 'skip' or 'skip:N' "
        f"to leave out the update of such a step, at most N in a row (default of N: {DEFAULT_SKIPS_IN_A_ROW})",
    )
    hang_timeout: Annotated[float, Field(ge=0, le=1e7)] | None = None  # PyTorch's time-outs overflow at 1e9
    """seconds without a finished step after which a run writes its stacks and ends; 0 turns this off (default: 20 times
    the median step, at least 900)"""
    no_plan: bool = False
    """start even if the planner computes that the run does not fit"""
    debug_traceback: bool = False
    """print the traceback of configuration and data errors"""
    local_rank: int = -1
    """rank on this host; set by the deepspeed launcher"""

    @field_validator("resume")
    @classmethod
    def _accept_latest(cls, resume: str | None) -> str | None:
        return "auto" if resume == "latest" else resume

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        path = PurePath(name or ".")
        if name is not None and (not path.parts or path.is_absolute() or ".." in path.parts or not name.isprintable()):
            raise ValueError("the run's folder would not be in --logs; use a name such as my-run or group/my-run")
        return name

    @field_validator("on_nonfinite")
    @classmethod
    def _check_on_nonfinite(cls, value: str) -> str:
        if not re.fullmatch(r"stop|skip(:[1-9]\d{0,5})?", value):
            raise ValueError("expected stop, skip or skip:N with N from 1 to 999999; write one of them")
        return value

    @field_validator("*")
    @classmethod
    def _refuse_empty(cls, value: Any) -> Any:
        if value == "" or (isinstance(value, list) and "" in value):  # "$WEIGHTS" if the variable is not set
            raise ValueError("the value is empty; give it a value, or leave it out")
        return value

    @property
    def skips_in_a_row(self) -> int:
        """Largest number of consecutive steps whose update may be left out because it is not finite; 0 with "stop"."""
        policy, _, limit = self.on_nonfinite.partition(":")
        return 0 if policy == "stop" else int(limit or DEFAULT_SKIPS_IN_A_ROW)

    @property
    def shard_cache_bytes(self) -> int | None:
        """--shard-cache-gb in bytes."""
        return None if self.shard_cache_gb is None else int(self.shard_cache_gb * 1e9)

    def recorded(self) -> dict[str, Any]:
        """Return all settings for files and logs, as JSON values, without the secrets of URLs."""
        return json.loads(public(json.dumps(self.model_dump(mode="json"))))

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainArguments":
        for one, other in (
            ("epochs", "train_steps"),
            ("epochs_cooldown", "cooldown_steps"),
            ("val_data", "val_fraction"),
        ):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{_flag(one)} and {_flag(other)} exclude each other; use one of them")
        if (self.lr_scheduler == "const-cooldown") != bool(self.epochs_cooldown or self.cooldown_steps):
            raise ValueError(
                f"--lr-scheduler is {self.lr_scheduler}; use const-cooldown together with --epochs-cooldown or "
                "--cooldown-steps, or none of them"
            )
        used_by = {"lr_min": "cosine", "lr_cooldown_end": "const-cooldown", "lr_cooldown_power": "const-cooldown"}
        for name, scheduler in used_by.items():
            if name in self.model_fields_set and self.lr_scheduler != scheduler:
                unused = f"{_flag(name)} has no effect with --lr-scheduler {self.lr_scheduler}"
                raise ValueError(f"{unused}; leave it out, or use {scheduler}")
        if self.train_data_weights and len(self.train_data_weights) != len(self.train_data):
            raise ValueError(
                f"--train-data-weights has {len(self.train_data_weights)} weights, but --train-data has "
                f"{len(self.train_data)} entries; write one weight for each entry"
            )
        if not 0 < self.aug_scale[0] <= self.aug_scale[1] <= 1:
            smallest, largest = self.aug_scale
            raise ValueError(f"--aug-scale is {smallest} {largest}; write two fractions, the smaller one first")
        for name, others in _REQUIRES.items():
            if getattr(self, name) and not any(getattr(self, other) for other in others):
                raise ValueError(
                    f"{_flag(name)} requires {' or '.join(map(_flag, others))}; add it, or leave {_flag(name)} out"
                )
        if self.no_augmentation and "aug_scale" in self.model_fields_set:
            raise ValueError("--aug-scale has no effect with --no-augmentation; leave one of them out")
        if self.no_augmentation and self.image_decoder == "gpu":
            raise ValueError(
                "--image-decoder gpu cannot be used with --no-augmentation, whose pixels are those of an evaluation; "
                "use cpu"
            )
        if self.feature_cache is not None:
            if not (self.no_augmentation and self.lock_image) or self.lock_image_unlocked_groups:
                raise ValueError(
                    "--feature-cache requires features that never change: add --lock-image and --no-augmentation, and "
                    "leave out --lock-image-unlocked-groups"
                )
            if self.id_key != "caption":
                raise ValueError(f"--feature-cache reads no images and ids: --id-key is {self.id_key}; use caption")
        if self.resume == "auto" and self.name is None:
            raise ValueError("--resume auto requires --name; set it to the name of the run to resume")
        return self


_MANY_UNKNOWN = "these arguments are not accepted (`megaclip show from_open_clip`):"
"""First line of the only error with several lines, one for each argument."""


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError, so that every rank ends in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter that shows each flag only in its spelling with hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        arguments = "" if action.nargs == 0 else " " + self._format_args(action, "VALUE")
        return (", ".join(action.option_strings) if action.dest == "help" else action.option_strings[0]) + arguments


def _add_flag(parser: argparse._ActionsContainer, name: str, field: FieldInfo) -> None:
    flag, annotation = "--" + name.replace("_", "-"), field.annotation
    names = [flag] if flag == "--" + name else [flag, "--" + name]
    help_text = _help(field).replace("%", "%%")
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
    metavar = name.rpartition("_")[2].upper()
    action = "extend" if nargs == "+" else "store"
    parser.add_argument(*names, action=action, nargs=nargs, default=argparse.SUPPRESS, help=help_text, metavar=metavar)


def _help(field: FieldInfo) -> str:
    """Return the description of a flag, with its choices and its default (unless the description names them)."""
    text = " ".join(str(field.description).split())
    if get_origin(field.annotation) is Literal:
        text += f"; one of {', '.join(get_args(field.annotation))}"
    if field.is_required():
        return text + " (required)"
    if field.default is None or field.default is False or field.default == []:
        return text
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{text} (default {default})"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `megaclip train` and launch/train.py. Its usage names the one that the user has called."""
    command = "megaclip train" if sys.argv[0] == "megaclip train" else "deepspeed launch/train.py"
    parser = _Parser(
        prog=command,
        usage=f"{command} --deepspeed-config CONFIG --model MODEL --train-data DATA [DATA ...] [flags]",
        description="Train a CLIP model with DeepSpeed. Flags may be written with underscores, too.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    group: argparse._ActionsContainer = parser
    for name, field in TrainArguments.model_fields.items():
        if name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[name])
        _add_flag(group, name, field)
    return parser


def parse_arguments(argv: list[str]) -> TrainArguments:
    """Parse and check the command line. Raises ConfigError with one line that names the flag."""
    parser = build_parser()
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        known = {option for action in parser._actions for option in action.option_strings}
        given = [word.split("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
        described = [_describe_unknown(word, known) for word in dict.fromkeys(given)]
        raise ConfigError(described[0] if len(described) == 1 else "\n  ".join([_MANY_UNKNOWN, *described]))
    try:
        return TrainArguments(**vars(values))
    except ValidationError as error:
        evaluates = [_flag(name) for name in ("val_data", "zeroshot_data", "suite") if name in values]
        if evaluates and "train_data" not in values:
            raise ConfigError(
                f"--train-data is required; to evaluate only, use `megaclip evaluate DIRECTORY` with "
                f"{' and '.join(evaluates)}, where DIRECTORY was written by `megaclip import` or `megaclip export`"
            ) from None
        raise config_error(error, name=_flag) from None


def _flag(path: str) -> str:
    """Return the flag of a field of `TrainArguments`, from the dotted path of its value."""
    return "--" + path.partition(".")[0].replace("_", "-")


def _describe_unknown(word: str, known: set[str]) -> str:
    """Return one sentence that names the replacement for a flag of another trainer, or the nearest flag."""
    replacements = FASTCLIP_FLAGS | OPEN_CLIP_FLAGS
    if replacement := replacements.get(word.replace("_", "-")):
        return f"{word} {replacement}"
    from megaclip.config.section import MegaclipSection  # only after a mistake, because it imports the losses

    if (name := word.removeprefix("--").replace("-", "_")) in MegaclipSection.model_fields:
        return f"{word} is set in ds_config.json: megaclip.{name}; on the command line: --set megaclip.{name}=VALUE"
    close = closest(word, known | replacements.keys(), cutoff=0.6)
    if close in replacements:
        return f"unknown argument {word!r}; if you mean {close!r}, that {replacements[close]}"
    return f"unknown argument {word!r}" + (f"; did you mean {close!r}?" if close else "")
