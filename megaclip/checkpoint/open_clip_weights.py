"""Read and write weights in open_clip's format.

A directory that `open_clip.create_model("local-dir:DIR")` loads holds the model card (`checkpoint.model_card`),
`open_clip_model.safetensors` (float32) and, when the card names an HF tokenizer, the tokenizer's files. MegaCLIP
exports to this format, imports from it and starts training from it. It is the only weights format besides a run's own
checkpoints. `weight_files` reads files of weights, and `models.weights` fits them to a model.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.search import refuse_run
from megaclip.checkpoint.weight_files import read_tensors_of
from megaclip.errors import CheckpointError, first_line
from megaclip.files import replacing
from megaclip.logging import get_logger
from megaclip.models import DualEncoder, ModelDescription, OpenClipConfig, build_model, meta_model
from megaclip.models.open_clip_keys import StateDict, from_open_clip, to_open_clip
from megaclip.models.weights import compare_weights, fit_model, fit_tower

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


def pretrained_weights(
    model: DualEncoder, whole: str | Path | None, *, image: str | Path | None = None, text: str | Path | None = None
) -> StateDict:
    """Read the weights with which training starts; return them by the names of `model`, and log what was read.

    Args:
        model: not changed.
        whole: --pretrained, a file or directory with the weights of a whole model, or None.
        image, text: --pretrained-image and --pretrained-text, weights of one tower, which replace those of `whole`.

    Raises:
        CheckpointError: a file cannot be read, is damaged or does not fit the model.
    """
    weights: StateDict = {}
    for tower, path in (("", whole), ("image", image), ("text", text)):
        if path is None:
            continue
        require_whole(Path(path))
        tensors, source = read_tensors(path, quick_gelu=model.config.quick_gelu), str(path)
        fitted, line = fit_tower(model, tower, tensors, source) if tower else fit_model(model, tensors, source)
        weights |= fitted
        logger.info("%s", line)
    return weights


def write_weights(directory: str | Path, state_dict: StateDict, config: ModelDescription) -> Path:
    """Write MegaCLIP's state dict to `open_clip_model.safetensors`, with open_clip's names, in float32.

    Returns:
        the path of the file.

    Raises:
        CheckpointError: the parameters or their shapes differ from those of the model that `config` describes.
        OSError: the file cannot be written; nothing of it is left.
    """
    model = meta_model(config)
    compare_weights(model, state_dict).require_complete("the weights do not fit the model in the card")
    exact = {name: state_dict[name].to(weight.dtype) for name, weight in model.named_weights().items()}
    path = Path(directory) / WEIGHTS_NAME
    write_tensors(path, to_open_clip(exact, config))
    return path


def write_tensors(path: Path, tensors: StateDict) -> None:
    """Write a safetensors file. The caller makes it survive a power cut.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
    """
    try:
        with replacing(path, durable=False) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # the mode of the umask; safetensors lets only the owner read
            save_file(
                {name: value.contiguous() for name, value in tensors.items()}, temporary, metadata={"format": "pt"}
            )
            temporary.chmod(mode)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None


def read_weights(path_or_dir: str | Path, config: ModelDescription | None = None) -> StateDict:
    """Return weights in open_clip's format under MegaCLIP's names, on the CPU, with the dtypes of the file.

    Args:
        path_or_dir: a file that `weight_files.read_tensors_of` reads, or a directory that holds one.
        config: description of the model that gets the weights. None: one of MegaCLIP's own towers.

    Raises:
        CheckpointError: the file does not exist, is not a weights file, or contains objects other than tensors.
    """
    return from_open_clip(read_tensors(path_or_dir, quick_gelu=config is None or config.quick_gelu), config)


def read_tensors(path_or_dir: str | Path, *, quick_gelu: bool = True) -> StateDict:
    """Return the tensors of a weights file under open_clip's names, as `weight_files.read_tensors_of` reads them."""
    return read_tensors_of(_weights_file(Path(path_or_dir)), quick_gelu=quick_gelu)


def assigned_model(config: ModelDescription, state_dict: StateDict) -> DualEncoder:
    """Return a float32 model in evaluation mode whose parameters are the (converted) tensors of `state_dict`.

    Raises:
        CheckpointError: the parameters or their shapes differ from those of the model that `config` describes.
    """
    problem = "the weights do not fit the model in the card"
    if isinstance(config, OpenClipConfig):  # not on meta: constants such as masks are not in the state dict
        built = build_model(config)
        compare_weights(built, state_dict).require_complete(problem)
        built.load_state_dict(state_dict)
        return built.eval()
    model = meta_model(config)
    compare_weights(model, state_dict).require_complete(problem)
    model.load_state_dict({name: value.float() for name, value in state_dict.items()}, assign=True)
    return model.eval()


def holds_weights(directory: Path) -> bool:
    """Return whether the directory has a file that `read_weights` would read."""
    return any((directory / name).is_file() for name in _WEIGHTS_NAMES)


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
