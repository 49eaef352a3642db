"""Write, read, compare and load weights in open_clip's format.

A directory that `open_clip.create_model("local-dir:DIR")` loads holds the model card (`checkpoint.model_card`),
`open_clip_model.safetensors` (float32) and, when the card names an HF tokenizer, the tokenizer's files. MegaCLIP
exports to this format, imports from it and starts training from it. It is the only weights format besides a run's own
checkpoints. Weights may come from untrusted sources: pickles are read with `weights_only=True`, and no tensor is
converted or copied before its shape has been checked.
"""

import math
import os
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.search import refuse_run
from megaclip.errors import CheckpointError, first_line
from megaclip.logging import get_logger
from megaclip.models import ClipModel, DualEncoder, ModelDescription, OpenClipConfig, build_model, meta_model
from megaclip.models.layers import own_part, whole_shape
from megaclip.models.open_clip_keys import StateDict, from_open_clip, to_open_clip
from megaclip.zero.parameters import gathered_shape

logger = get_logger(__name__)

WEIGHTS_NAME = "open_clip_model.safetensors"

# File names of weights, in the order in which open_clip looks for them in a directory.
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
# Entries of state dicts of older open_clip versions that are settings or constants, not parameters.
_NOT_PARAMETERS = {"input_resolution", "context_length", "vocab_size", "attn_mask"}
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class LoadReport:
    """Comparison of a weights file with a model, by MegaCLIP's parameter names."""

    loaded: tuple[str, ...]
    """Parameters that are in the model and in the file with the same shape."""
    missing: tuple[str, ...]
    """Parameters that are in the model, but not in the file."""
    unexpected: tuple[str, ...]
    """Parameters that are in the file, but not in the model."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Parameters whose shapes differ: name, the model's shape, the file's shape."""

    @property
    def complete(self) -> bool:
        """True if the model and the file have the same parameters with the same shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def advice(self) -> str:
        """Advice how to make the weights fit, for an error message."""
        if "logit_bias" in self.unexpected:
            return (
                "the weights have a logit_bias, as SigLIP's: add init_logit_bias to the model's JSON (SigLIP: -10, "
                "with init_logit_scale 2.303)"
            )
        return "use the model description that the weights were trained with"

    def __str__(self) -> str:
        """Return one line: the number of parameters of each kind, and the first name of each kind of difference."""
        parts = [f"{len(self.loaded)} parameters loaded"]
        for kind, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            parts.append(f"{len(names)} {kind}" + (f" (first: {names[0]})" if names else ""))
        first = ""
        if self.mismatched:
            name, expected, got = self.mismatched[0]
            first = f" (first: {name}, model {list(expected)}, file {list(got)})"
        parts.append(f"{len(self.mismatched)} with a different shape{first}")
        return ", ".join(parts)


def write_weights(directory: str | Path, state_dict: StateDict, config: ModelDescription) -> Path:
    """Write MegaCLIP's state dict to `open_clip_model.safetensors`, with open_clip's names, in float32.

    Returns:
        the path of the file.

    Raises:
        CheckpointError: the parameters or their shapes differ from those of the model that `config` describes.
        OSError: the file cannot be written; nothing of it is left.
    """
    model = meta_model(config)
    _require_complete(compare_weights(model, state_dict), "the weights do not fit the model in the card")
    exact = {name: state_dict[name].to(weight.dtype) for name, weight in model.named_weights().items()}
    tensors = {name: value.contiguous() for name, value in to_open_clip(exact, config).items()}
    path = Path(directory) / WEIGHTS_NAME
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # the mode of the umask; safetensors lets only the owner read
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(mode)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_weights(path_or_dir: str | Path, config: ModelDescription | None = None) -> StateDict:
    """Return weights in open_clip's format under MegaCLIP's names, on the CPU, with the dtypes of the file.

    Args:
        path_or_dir: a safetensors file; a PyTorch file that holds a state dict, or one under "state_dict" as
            open_clip's trainer writes it, with or without `module.` prefixes; or a directory that holds such a file.
        config: description of the model that gets the weights. None: one of MegaCLIP's own towers.

    Raises:
        CheckpointError: the file does not exist, is not a weights file, or is a pickle that contains objects other than
            tensors.
    """
    return from_open_clip(read_tensors(path_or_dir, config), config)


def read_tensors(path_or_dir: str | Path, config: ModelDescription | None) -> StateDict:
    """Return the tensors of a weights file under the names of the file, as `read_weights` reads them."""
    path = _weights_file(Path(path_or_dir))
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state_dict = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state_dict, dict) or not state_dict:
        raise CheckpointError(
            f"{path} holds no state dict; expected a dictionary of parameter names and tensors, at the top level or "
            "under 'state_dict'"
        )
    tensors = {}
    for name, value in state_dict.items():
        name = _without_wrappers(str(name))
        if name in _NOT_PARAMETERS or name.endswith(".position_ids"):  # the latter in files of older transformers
            continue
        if not _is_dense_tensor(value) or not (value.is_floating_point() or _is_counter(name, value, config)):
            raise CheckpointError(f"{path}: entry {name!r} is a {_kind(value)}, expected a floating-point tensor")
        tensors[name] = value
    return tensors


def assigned_model(config: ModelDescription, state_dict: StateDict) -> DualEncoder:
    """Return a float32 model in evaluation mode whose parameters are the (converted) tensors of `state_dict`.

    Raises:
        CheckpointError: the parameters or their shapes differ from those of the model that `config` describes.
    """
    problem = "the weights do not fit the model in the card"
    if isinstance(config, OpenClipConfig):  # not on meta: constants such as masks are not in the state dict
        built = build_model(config)
        _require_complete(compare_weights(built, state_dict), problem)
        built.load_state_dict(state_dict)
        return built.eval()
    model = meta_model(config)
    _require_complete(compare_weights(model, state_dict), problem)
    model.load_state_dict({name: value.float() for name, value in state_dict.items()}, assign=True)
    return model.eval()


def compare_weights(model: DualEncoder, state_dict: StateDict) -> LoadReport:
    """Compare a state dict with a model. Nothing is loaded; `loaded` lists the names that can be loaded."""
    shapes = {name: tuple(whole_shape(name, p, model.tensor)) for name, p in model.named_weights().items()}
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


def adapt_weights(state_dict: StateDict, model: DualEncoder) -> StateDict:
    """Return weights adapted to `model` in image size, context length and `logit_bias`; every change is logged.

    Position embeddings are interpolated as open_clip does when it loads: bicubic (antialiased) over the grid of
    patches, linear over the context. A missing `logit_bias` (CLIP's weights, used with the sigmoid loss) is set to the
    model's initial value; open_clip sets it to 0. All other entries are returned unchanged, even if they do not fit.
    """
    adapted, config = adapt_positions(state_dict, model), model.config
    if config.init_logit_bias is not None and "logit_bias" not in adapted:
        adapted["logit_bias"] = torch.full((1,), float(config.init_logit_bias))
        logger.info("the weights have no logit_bias; it starts at init_logit_bias %g", config.init_logit_bias)
    return adapted


def adapt_positions(state_dict: StateDict, model: DualEncoder) -> StateDict:
    """Return weights whose position embeddings are interpolated to the model's image size and context length.

    In vision transformers the positions are those of a class token and the patches. Those of timm's trunks are
    interpolated by timm. All other entries, and positions of another width, are returned unchanged.
    """
    adapted = dict(state_dict)
    name, positions = "visual.positional_embedding", getattr(model.visual, "positional_embedding", None)
    if _differs_in_length(adapted.get(name), positions):
        if isinstance(model, ClipModel):
            grid = (model.config.vision_cfg.grid_size, model.config.vision_cfg.grid_size)
        else:
            # open_clip's tower has the attribute; nn.Module's type does not.
            grid = tuple(model.visual.grid_size)  # type: ignore[arg-type, assignment]
        old_grid = math.isqrt(len(adapted[name]) - 1)
        if len(adapted[name]) == old_grid**2 + 1:
            class_1C, patches_PC = adapted[name].float().split([1, old_grid**2])
            patches_1Chw = patches_PC.T.reshape(1, -1, old_grid, old_grid)
            patches_1Chw = F.interpolate(patches_1Chw, grid, mode="bicubic", antialias=True)
            adapted[name] = torch.cat([class_1C, patches_1Chw[0].flatten(1).T])
            logger.info("interpolated positions of %d x %d patches to %d x %d", old_grid, old_grid, *grid)
    name, positions = "text.positional_embedding", getattr(model.text, "positional_embedding", None)
    if _differs_in_length(adapted.get(name), positions):
        assert positions is not None
        length = gathered_shape(positions)[0]
        logger.info("interpolated positions of %d tokens to %d", len(adapted[name]), length)
        adapted[name] = F.interpolate(adapted[name].float().T[None], length, mode="linear")[0].T
    name, trunk = "visual.trunk.pos_embed", getattr(model.visual, "trunk", None)
    if name in adapted and isinstance(getattr(trunk, "pos_embed", None), nn.Parameter):
        adapted[name] = _timm_positions(adapted[name], trunk)
    return adapted


def _timm_positions(positions: torch.Tensor, trunk: Any) -> torch.Tensor:
    """Return the positions (1, L, C) of a timm trunk at its image size, as timm interpolates them."""
    from timm.layers import resample_abs_pos_embed

    prefix = 0 if getattr(trunk, "no_embed_class", False) else getattr(trunk, "num_prefix_tokens", 1)
    new, table = gathered_shape(trunk.pos_embed), positions
    fits = table.ndim == 3 and table.is_contiguous() and len(table) == 1 and table.shape[2] == new[2]
    patches = table.shape[1] - prefix if fits else 0
    if not fits or table.shape[1] == new[1] or patches <= 0 or math.isqrt(patches) ** 2 != patches:
        return positions
    grid = list(trunk.patch_embed.grid_size)
    logger.info("interpolated positions of %d patches to %d x %d", patches, *grid)
    interpolated: torch.Tensor = resample_abs_pos_embed(table.float(), new_size=grid, num_prefix_tokens=prefix)
    return interpolated


def _differs_in_length(table: torch.Tensor | None, parameter: torch.Tensor | None) -> bool:
    """Return True if a table of positions (L, C) differs from the model's parameter only in L.

    A table that is not contiguous is rejected: an expanded tensor may have a huge shape with little storage.
    """
    if parameter is None:
        return False
    length, width = gathered_shape(parameter)
    return (
        table is not None
        and table.ndim == 2
        and table.is_contiguous()
        and table.shape[1] == width
        and len(table) not in (0, 1, length)
    )


def pretrained_weights(model: DualEncoder, path_or_dir: str | Path) -> tuple[StateDict, LoadReport]:
    """Read weights in open_clip's format that fit `model`; return them by the model's names.

    Args:
        model: not changed.
        path_or_dir: a file or directory that `read_weights` accepts. `adapt_weights` adapts it to the image size and
            the context length of the model.

    Raises:
        CheckpointError: the file cannot be read, is damaged or does not fit the model.
    """
    require_whole(Path(path_or_dir))
    state_dict = adapt_weights(read_weights(path_or_dir, model.config), model)
    report = compare_weights(model, state_dict)
    _require_complete(report, f"{path_or_dir} does not fit the model")
    return {name: state_dict[name] for name in report.loaded}, report


@torch.no_grad()
def copy_weights(model: DualEncoder, weights: StateDict) -> None:
    """Copy weights of `pretrained_weights` into `model`; call it before `deepspeed.initialize`.

    Parameters may be whole or partitioned by `deepspeed.zero.Init`. If they are partitioned, this is a collective:
    every rank must call it with the same weights. Parameters are gathered one at a time.

    model: any dtype and device; values are converted. weights: whole, by the model's names, some or all of them.
    """
    own = model.named_weights()
    for name, value in weights.items():
        weight = own[name]
        partitioned = isinstance(weight, nn.Parameter)  # buffers are whole on every rank
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0) if partitioned else nullcontext():
            weight.copy_(own_part(name, value, model.tensor))


def holds_weights(directory: Path) -> bool:
    """Return whether the directory has a file that `read_weights` would read."""
    return any((directory / name).is_file() for name in _WEIGHTS_NAMES)


def _require_complete(report: LoadReport, problem: str) -> None:
    if not report.complete:
        raise CheckpointError(f"{problem}: {report}; {report.advice}")


def _weights_file(path: Path) -> Path:
    if path.is_file():
        refuse_run(path)
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; expected a weights file or a directory with {WEIGHTS_NAME}")
    for name in _WEIGHTS_NAMES:
        if (path / name).is_file():
            return path / name
    refuse_run(path)
    raise CheckpointError(f"{path} holds no weights; expected {WEIGHTS_NAME} in it")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged: {first_line(error)}; download or copy it again"
        ) from None


def _read_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} contains objects other than tensors, or is not a PyTorch file; it was not read, because "
            "unpickling could run code. Save only its state dict, preferably as safetensors"
        ) from None
    except Exception as error:  # a damaged file can cause any exception inside torch.load
        raise CheckpointError(
            f"{path} is not a PyTorch weights file, or is damaged: {first_line(error)}; download or copy it again"
        ) from None


def _is_dense_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _is_counter(name: str, value: torch.Tensor, config: ModelDescription | None) -> bool:
    """Return whether the entry is the number of batches that a batch norm has seen."""
    counts = name.endswith("num_batches_tracked") and value.dtype == torch.int64
    return isinstance(config, OpenClipConfig) and counts


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.layout} tensor of {value.dtype} on {value.device}"
    return type(value).__name__


def _without_wrappers(name: str) -> str:
    while name.startswith(_WRAPPER_PREFIXES):
        name = name.partition(".")[2]
    return name
