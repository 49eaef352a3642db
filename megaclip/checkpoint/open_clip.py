"""open_clip's directory format: model card, weights and tokenizer, written and read.

A directory that `open_clip.create_model("local-dir:DIR")` loads holds `open_clip_config.json` (the card),
`open_clip_model.safetensors` (float32) and, when the card names an HF tokenizer, the tokenizer's files. MegaCLIP
exports to it, imports into it and starts training from it, so it is the only weights format outside a run's own
checkpoints. Weights come from strangers: pickles are read with `weights_only=True`, and no tensor is converted or
copied before its shape is known to be right.
"""

import json
import math
import os
import pickle
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megaclip.checkpoint.store import write_atomically
from megaclip.errors import CheckpointError, first_line
from megaclip.logging import get_logger
from megaclip.models.clip import ClipModel
from megaclip.models.config import CARD_NAME, ModelConfig
from megaclip.models.open_clip_keys import StateDict, from_open_clip, to_open_clip
from megaclip.models.projections import own_part, whole_shape

logger = get_logger(__name__)

WEIGHTS_NAME = "open_clip_model.safetensors"

OPENAI_PREPROCESS: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}
"""What open_clip assumes of a model whose card does not say."""

# The order in which open_clip itself looks for weights in a directory.
_WEIGHTS_NAMES = (
    WEIGHTS_NAME,
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.pth",
    "model.pth",
)
# Entries of old state dicts that are settings or constants, not parameters.
_NOT_PARAMETERS = {"input_resolution", "context_length", "vocab_size", "attn_mask"}
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class LoadReport:
    """What became of each parameter when weights were loaded into a model; names are MegaCLIP's."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the model, not in the file."""
    unexpected: tuple[str, ...]
    """In the file, not in the model."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """In both with different shapes: name, the model's shape, the file's shape."""

    @property
    def complete(self) -> bool:
        """Every parameter of the model and of the file found its counterpart."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """One line: the counts, and the first name of each kind that is not fine."""
        parts = [f"{len(self.loaded)} parameters loaded"]
        for kind, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            parts.append(f"{len(names)} {kind}" + (f" (first: {names[0]})" if names else ""))
        first = ""
        if self.mismatched:
            name, expected, got = self.mismatched[0]
            first = f" (first: {name}, model {list(expected)}, file {list(got)})"
        parts.append(f"{len(self.mismatched)} of another shape{first}")
        return ", ".join(parts)


def write_model_card(
    directory: str | Path,
    config: ModelConfig,
    preprocess_cfg: dict[str, Any],
    tokenizer_files: Iterable[str | Path] = (),
) -> None:
    """Write `open_clip_config.json` into `directory` (made if need be) and copy the tokenizer's files beside it.

    Args:
        directory: where everything of an export but the weights goes.
        config: the model, with what the tokenizer needs in `text_cfg` (`hf_tokenizer_name` and the like).
        preprocess_cfg: how images become pixels: mean, std, interpolation, resize_mode, as `OPENAI_PREPROCESS`.
        tokenizer_files: files to copy; those that are already in `directory` stay as they are.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for file in map(Path, tokenizer_files):
        if file.resolve().parent != directory.resolve():
            shutil.copyfile(file, directory / file.name)
    card = {"model_cfg": config.to_open_clip(), "preprocess_cfg": preprocess_cfg}
    write_atomically(directory / CARD_NAME, json.dumps(card, indent=2) + "\n")


def read_preprocess(directory: str | Path) -> dict[str, Any]:
    """`preprocess_cfg` of the card in `directory`, over open_clip's defaults; mean and std are tuples."""
    path = Path(directory) / CARD_NAME
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        settings = {**OPENAI_PREPROCESS, **(card.get("preprocess_cfg") or {})}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a model card: {first_line(error)}.") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def tokenizer_of(directory: str | Path, config: ModelConfig) -> str:
    """The tokenizer of the model whose card lies in `directory`: "clip", or the path of the sentencepiece model there.

    Raises:
        CheckpointError: the model has a tokenizer of its own, and `directory` does not hold exactly one *.model file.
    """
    if not config.text_cfg.hf_tokenizer_name:
        return "clip"
    models = sorted(Path(directory).glob("*.model"))
    if len(models) != 1:
        raise CheckpointError(
            f"{directory} holds {len(models)} *.model files, expected 1, the sentencepiece model it was trained with: "
            "put that one there, or name it where the command has --tokenizer"
        )
    return str(models[0])


def write_weights(directory: str | Path, state_dict: StateDict, config: ModelConfig) -> Path:
    """Write `open_clip_model.safetensors` from MegaCLIP's state dict: open_clip's names, float32. Returns its path.

    Raises:
        CheckpointError: the state dict is not the model's: a parameter is missing, too many, or of another shape.
    """
    report = compare_weights(meta_model(config), state_dict)
    if not report.complete:
        raise CheckpointError(f"the weights are not those of the model in the card: {report}.")
    tensors = {name: value.float().contiguous() for name, value in to_open_clip(state_dict, config).items()}
    path = Path(directory) / WEIGHTS_NAME
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)
    return path


def read_weights(path_or_dir: str | Path) -> StateDict:
    """Weights in open_clip's format, as MegaCLIP names them; dtypes as in the file, on the CPU.

    Reads a safetensors file, a PyTorch file (a state dict, or one under "state_dict" as open_clip's trainer writes it,
    with or without `module.` prefixes), or the weights file of a directory.

    Raises:
        CheckpointError: no such file, not a weights file, or a pickle that holds more than tensors.
    """
    path = _weights_file(Path(path_or_dir))
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state_dict = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state_dict, dict) or not state_dict:
        raise CheckpointError(f"{path} holds no state dict: expected names with tensors, or those under 'state_dict'.")
    tensors = {}
    for name, value in state_dict.items():
        name = _without_wrappers(str(name))
        if name in _NOT_PARAMETERS:
            continue
        if not _is_plain(value):
            raise CheckpointError(f"{path}: entry {name!r} is a {_kind(value)}, expected a floating-point tensor.")
        tensors[name] = value
    return from_open_clip(tensors)


def meta_model(config: ModelConfig) -> ClipModel:
    """The model without memory for its parameters: for names and shapes, or for loading by assignment."""
    with torch.device("meta"):
        return ClipModel(config)


def assigned_model(config: ModelConfig, state_dict: StateDict) -> ClipModel:
    """A float32 model in evaluation mode whose parameters are the (converted) tensors of `state_dict`.

    Raises:
        CheckpointError: the state dict is not the model's.
    """
    model = meta_model(config)
    report = compare_weights(model, state_dict)
    if not report.complete:
        raise CheckpointError(f"the weights are not those of the model in the card: {report}.")
    model.load_state_dict({name: value.float() for name, value in state_dict.items()}, assign=True)
    return model.eval()


def compare_weights(model: ClipModel, state_dict: StateDict) -> LoadReport:
    """How a state dict fits a model; nothing is loaded, and `loaded` are the names that would be."""
    shapes = {name: tuple(whole_shape(name, p, model.tensor)) for name, p in model.named_parameters()}
    common = [name for name in shapes if name in state_dict]
    return LoadReport(
        loaded=tuple(name for name in common if shapes[name] == tuple(state_dict[name].shape)),
        missing=tuple(name for name in shapes if name not in state_dict),
        unexpected=tuple(name for name in state_dict if name not in shapes),
        mismatched=tuple(
            (name, shapes[name], tuple(state_dict[name].shape))
            for name in common
            if shapes[name] != tuple(state_dict[name].shape)
        ),
    )


def adapt_weights(state_dict: StateDict, model: ClipModel) -> StateDict:
    """Weights of a model that differs in image size, context length or `init_logit_bias` alone, made to fit `model`.

    As open_clip does when it loads: positions are interpolated, bicubic (antialiased) over the grid of patches, linear
    over the context. A missing `logit_bias` (CLIP's weights, for the sigmoid loss) gets the model's initial value,
    where open_clip takes 0. Everything else stays, fitting or not. Says in the log what it did.
    """
    adapted, config = dict(state_dict), model.config
    name, grid = "visual.positional_embedding", config.vision_cfg.grid_size
    if _is_of_other_length(adapted.get(name), model.visual.positional_embedding):
        old_grid = math.isqrt(len(adapted[name]) - 1)
        if len(adapted[name]) == old_grid**2 + 1:
            class_1C, patches_PC = adapted[name].float().split([1, old_grid**2])
            patches_1Chw = patches_PC.T.reshape(1, -1, old_grid, old_grid)
            patches_1Chw = F.interpolate(patches_1Chw, (grid, grid), mode="bicubic", antialias=True)
            adapted[name] = torch.cat([class_1C, patches_1Chw[0].flatten(1).T])
            logger.info("positions of %d x %d patches interpolated to %d x %d", old_grid, old_grid, grid, grid)
    name, length = "text.positional_embedding", config.text_cfg.context_length
    if _is_of_other_length(adapted.get(name), model.text.positional_embedding):
        logger.info("positions of %d tokens interpolated to %d", len(adapted[name]), length)
        adapted[name] = F.interpolate(adapted[name].float().T[None], length, mode="linear")[0].T
    if config.init_logit_bias is not None and "logit_bias" not in adapted:
        adapted["logit_bias"] = torch.full((1,), float(config.init_logit_bias))
        logger.info("the weights have no logit_bias: it starts at the model's %g", config.init_logit_bias)
    return adapted


def _is_of_other_length(table: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether a table of positions (L, C) differs from the model's in L alone; only one that is as large as it says."""
    length, width = getattr(parameter, "ds_shape", parameter.shape)
    return (
        table is not None
        and table.ndim == 2
        and table.is_contiguous()
        and table.shape[1] == width
        and len(table) not in (0, 1, length)
    )


@torch.no_grad()
def load_pretrained(model: ClipModel, path_or_dir: str | Path) -> LoadReport:
    """Copy weights in open_clip's format into `model`; call it before `deepspeed.initialize`.

    Works on whole parameters and on those that `deepspeed.zero.Init` partitioned; then it is a collective: every rank
    calls it and reads the same file, and one parameter at a time is whole.

    Args:
        model: any dtype and device; values are converted.
        path_or_dir: what `read_weights` reads; another image size or context length is taken (`adapt_weights`).

    Raises:
        CheckpointError: the file is bad or does not fit the model, which is unchanged then.
    """
    state_dict = adapt_weights(read_weights(path_or_dir), model)
    report = compare_weights(model, state_dict)
    if not report.complete:
        raise CheckpointError(f"{path_or_dir} does not fit the model: {report}.")
    parameters = dict(model.named_parameters())
    for name in report.loaded:
        with deepspeed.zero.GatheredParameters(parameters[name], modifier_rank=0):
            parameters[name].copy_(own_part(name, state_dict[name], model.tensor))
    return report


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: expected a weights file or a directory with {WEIGHTS_NAME}.")
    for name in _WEIGHTS_NAMES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds no weights: expected {WEIGHTS_NAME} in it.")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {first_line(error)}.") from None


def _read_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} holds more than tensors (or is no PyTorch file); unpickling could run code, so it is not read. "
            "Save its plain state dict, better as safetensors."
        ) from None
    except Exception as error:  # a broken file can fail anywhere inside the reader
        raise CheckpointError(f"{path} is not a PyTorch weights file: {first_line(error)}.") from None


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.layout} tensor of {value.dtype} on {value.device}"
    return type(value).__name__


def _without_wrappers(name: str) -> str:
    while name.startswith(_WRAPPER_PREFIXES):
        name = name.partition(".")[2]
    return name
