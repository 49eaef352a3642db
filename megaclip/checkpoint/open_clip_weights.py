"""Read weights for a model, and write them in open_clip's format: `open_clip_model.safetensors`, float32.

`weight_files` finds and reads files of weights, and `models.weights` fits them to a model.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megaclip.checkpoint.weight_files import WEIGHTS_NAME, read_tensors
from megaclip.errors import first_line
from megaclip.files import replacing
from megaclip.logging import common_warnings, get_logger
from megaclip.models import DualEncoder, ModelConfig, ModelDescription, build_model, meta_model
from megaclip.models.open_clip_keys import StateDict, from_open_clip, to_open_clip
from megaclip.models.weights import compare_weights, fit_model, fit_tower

logger = get_logger(__name__)


@common_warnings()
def pretrained_weights(
    model: DualEncoder,
    whole: str | Path | None,
    *,
    image: str | Path | None = None,
    text: str | Path | None = None,
    kept_positions: int = 0,
) -> StateDict:
    """Read the weights with which training starts; return them by the names of `model`, and log what was read.

    It does not communicate. Before it, `manifest.require_whole` checks the files on all ranks.

    whole, image, text: --pretrained, --pretrained-image and --pretrained-text: a file or directory, or None. Weights of
    one tower replace those of `whole`. kept_positions: --keep-text-positions, for the weights of the text tower.
    Raises CheckpointError if a file cannot be read or does not fit the model.
    """
    weights: StateDict = {}
    for tower, path in (("", whole), ("image", image), ("text", text)):
        if path is None:
            continue
        tensors, source = read_tensors(path, quick_gelu=model.config.quick_gelu), str(path)
        kept = kept_positions if tower == ("" if text is None else "text") else 0
        if tower:
            fitted, line = fit_tower(model, tower, tensors, source, kept_positions=kept)
        else:
            fitted, line = fit_model(model, tensors, source, kept_positions=kept)
        weights |= fitted
        logger.info("%s", line)
    return weights


def write_weights(directory: str | Path, state_dict: StateDict, config: ModelDescription) -> Path:
    """Write MegaCLIP's state dict to `open_clip_model.safetensors`; return the path of the file.

    Raises as `open_clip_tensors` and `write_tensors`.
    """
    path = Path(directory) / WEIGHTS_NAME
    write_tensors(path, open_clip_tensors(state_dict, config))
    return path


def open_clip_tensors(state_dict: StateDict, config: ModelDescription) -> StateDict:
    """Return MegaCLIP's state dict with open_clip's names, in float32.

    Raises CheckpointError if the parameters or their shapes differ from those of the model that `config` describes.
    """
    model = meta_model(config)
    compare_weights(model, state_dict).require_complete("the weights do not fit the model in the card")
    exact = {name: state_dict[name].to(weight.dtype).contiguous() for name, weight in model.named_weights().items()}
    return to_open_clip(exact, config)


def write_tensors(path: Path, tensors: StateDict) -> None:
    """Write a safetensors file. The caller makes it survive a power cut. Nothing of it is left after an OSError."""
    try:
        with replacing(path, durable=False) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # the mode of the umask; safetensors lets only the owner read
            whole = {name: value.contiguous() for name, value in tensors.items()}
            save_file(whole, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None


def read_weights(path_or_dir: str | Path, config: ModelDescription) -> StateDict:
    """Return the weights of a file or directory under the names of the model that `config` describes, with the file's
    dtypes, on the CPU. Raises CheckpointError as `weight_files.read_tensors`."""
    return from_open_clip(read_tensors(path_or_dir, quick_gelu=config.quick_gelu), config)


def assigned_model(config: ModelDescription, state_dict: StateDict) -> DualEncoder:
    """Return a float32 model in evaluation mode whose parameters are the (converted) tensors of `state_dict`.

    Raises CheckpointError as `open_clip_tensors`.
    """
    on_meta = isinstance(config, ModelConfig)  # open_clip's modules have constants that are in no state dict
    model = meta_model(config) if on_meta else build_model(config)
    compare_weights(model, state_dict).require_complete("the weights do not fit the model in the card")
    wide = {name: value.float() if value.is_floating_point() else value for name, value in state_dict.items()}
    model.load_state_dict(wide, assign=on_meta)
    return model.eval()
