"""Read the tensors of a file of weights that any program may have written, without executing anything from it.

A file is recognised by its first bytes, not by its name, and its content by the names of its entries. What cannot be
read is named, with what to do. `models.weights` fits the tensors to a model.
"""

import os
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megaclip.checkpoint.deepspeed_files import read_file
from megaclip.checkpoint.model_card import check_inside
from megaclip.checkpoint.search import refuse_run
from megaclip.errors import CheckpointError, first_line, os_errors_as, shortened
from megaclip.logging import get_logger
from megaclip.models.config import read_json_object
from megaclip.models.open_clip_keys import StateDict
from megaclip.models.transformers_keys import from_transformers, is_transformers

logger = get_logger(__name__)

WEIGHTS_NAME = "open_clip_model.safetensors"

WEIGHTS_NAMES = (
    WEIGHTS_NAME,
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pth",
    "model.pth",
)
"""File names of weights, in the order in which open_clip looks for them in a directory."""
INDEX = ".index.json"
"""End of the name of a file that lists the files of a model in parts."""
_AGAIN = "is incomplete or damaged; download or copy it again"
_UNPACK = "is a compressed file or an archive; unpack it, and give the file of weights in it"
_OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file; run  git lfs pull  where it was cloned",
    b"<": "is a web page, for example of an error or a login; download the file itself",
    b"{": "is a JSON text, for example a configuration; give the directory of a model, or its file of weights",
    b"\x1f\x8b": _UNPACK,
    b"BZh": _UNPACK,
    b"\xfd7zXZ": _UNPACK,
    b"\x28\xb5\x2f\xfd": _UNPACK,
    b"\x89HDF": "is an HDF5 file, as Keras writes it; give the weights of PyTorch",
    b"GGUF": "is a GGUF file, as llama.cpp reads it; give the weights of PyTorch",
    b"\x93NUMPY": "is an array of NumPy; give the weights of PyTorch",
}
"""First bytes of files that hold no weights, or in a format that is not read: what the file is, and what to do."""
_ENTRIES = ("state_dict_ema", "ema_state_dict", "model_ema", "state_dict", "model_state_dict", "model", "module")
"""Entries under which programs save the weights. The moving average comes first: its authors evaluate it."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that torch.compile, FSDP and activation checkpointing insert."""
_SETTINGS = (
    "argparse.Namespace",
    "pathlib.PosixPath",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)
"""Classes that training programs save beside the weights. Nothing of them is used."""
_PREFIXES = ("module.", "model.", "clip.")
_OPENAI = "input_resolution"
# Entries that are settings or constants, not parameters, in OpenAI's files and those of older open_clip versions.
_NOT_PARAMETERS = {_OPENAI, "context_length", "vocab_size", "attn_mask"}


def read_tensors(path_or_dir: str | Path, *, quick_gelu: bool = True) -> StateDict:
    """Return the tensors of a file, on the CPU, with its dtypes and open_clip's names without prefixes of wrappers.

    path_or_dir: a file of safetensors, of torch.save or of torch.jit.save (as OpenAI's), or a directory with one or
    with one in parts, as transformers saves large models. Names of its CLIPModel, SiglipModel and Siglip2Model are
    translated. quick_gelu: the model that gets the weights has this activation. OpenAI's weights require it.

    Raises:
        CheckpointError: the file does not exist, cannot be read, or holds something else.
    """
    path = _weights_file(Path(path_or_dir))
    content = _in_parts(path) if path.name.endswith(INDEX) else _content(path)
    found = _unwrapped(_state_dict(content, path), path)
    if _OPENAI in found and not quick_gelu:
        logger.warning("%s has the entries of OpenAI's weights, which require a -quickgelu model", path)
    tensors = {}
    for name, value in found.items():
        if name in _NOT_PARAMETERS or name.endswith(".position_ids"):  # the latter in files of older transformers
            continue
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"{value.layout} tensor of {value.dtype} on {value.device}"
        is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        counts_batches = name.endswith("num_batches_tracked")  # of a batch norm
        is_float = is_dense and value.is_floating_point() and value.dtype.itemsize > 1  # 8 bits have scales elsewhere
        if not is_float and not (is_dense and counts_batches and value.dtype == torch.int64):
            raise CheckpointError(
                f"{path}: entry {name!r} is a {kind}, expected a floating-point tensor of at least 16 bits"
            )
        tensors[name] = value
    return from_transformers(tensors) if is_transformers(tensors) else tensors


def holds_weights(directory: Path) -> bool:
    """Return whether the directory has a file that `read_tensors` would read."""
    return any(os.path.isfile(directory / name) for name in WEIGHTS_NAMES)


def _weights_file(path: Path) -> Path:
    if path.is_file():
        refuse_run(path)
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; expected a weights file or a directory with {WEIGHTS_NAME}")
    for name in WEIGHTS_NAMES:
        if (path / name).is_file():
            return path / name
    refuse_run(path)
    names = ", ".join(WEIGHTS_NAMES)
    raise CheckpointError(f"{path} holds no weights; expected one of {names}; give a file of another name by its path")


def _in_parts(index: Path) -> dict[str, Any]:
    """Return the tensors of the files that an index lists, which are beside it."""
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index} has no weight_map of names and files; download it again")
    content: dict[str, Any] = {}
    for file in sorted(set(listed.values())):
        path = index.parent / file
        if Path(file).name != file or file.endswith(INDEX):
            raise CheckpointError(f"{index} lists the file {shortened(file)!r}; expected names of files beside it")
        if not path.is_file():
            raise CheckpointError(f"{index} lists {file}, which does not exist; download it too")
        check_inside(path, index.parent)
        content |= {name: value for name, value in _content(path).items() if listed.get(name) == file}
    if missing := [name for name in listed if name not in content]:
        raise CheckpointError(f"{index.parent / listed[missing[0]]} lacks {shortened(missing[0])}; download it again")
    return content


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a file, in the format that its first bytes show."""
    with os_errors_as(CheckpointError, f"cannot read {path}"), path.open("rb") as file:
        start = file.read(512)
    if start[5:9] == b"\0\0\0{":  # after the length of the header
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} {_AGAIN} ({first_line(error)})") from None
    if start.startswith(b"PK\x03\x04"):
        return _archived(path)
    if start.startswith(b"\x80"):
        return _saved(path)
    first = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    what = next((what for bytes_, what in _OTHER_FILES.items() if first.startswith(bytes_)), "")
    if start[257:262] == b"ustar":
        what = _UNPACK
    if not what:
        what = _AGAIN if path.suffix == ".safetensors" else "is no file of torch.save or safetensors, or is damaged"
    raise CheckpointError(f"{path} {what if start else 'is empty; download or copy it again'}")


def _saved(path: Path) -> dict[str, Any]:
    """Return the content of a file of torch.save. Settings of its program become `_Inert` objects."""
    if path.suffix == ".safetensors":  # PyTorch 2.13 would read it as such
        raise CheckpointError(f"{path} is a file of torch.save; rename it to .pt")
    with torch.serialization.safe_globals([(_Inert, name) for name in _SETTINGS]):
        return read_file(path, "save only its state dict, preferably as safetensors", map_location="cpu")


def _archived(path: Path) -> dict[str, Any]:
    """Return the content of a zip archive that torch.save or torch.jit.save has written."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            root = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None)
            if root is None:
                raise CheckpointError(f"{path} {_UNPACK} (it has {names[0] if names else 'nothing'})")
            pickled = archive.read(f"{root}data.pkl") if f"{root}constants.pkl" in names else None
        return _saved(path) if pickled is None else _scripted(path, pickled)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} {_AGAIN} ({first_line(error)})") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can cause any exception
        raise CheckpointError(f"{path}, a TorchScript archive, {_AGAIN} ({first_line(error)})") from None


def _scripted(path: Path, pickled: bytes) -> StateDict:
    """Return the tensors of a TorchScript archive, whose data.pkl is `pickled`, with PyTorch's reader of torch.save.

    torch.jit.load would build the archive's functions. Here its own classes become `_Inert` objects.
    """
    used = {str(name).replace(" ", ".") for code, name, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    own = [(_Inert, name) for name in used if name.startswith(("__torch__.", "torch.jit._pickle."))]
    serialization: Any = torch.serialization
    with serialization.safe_globals(own), serialization._open_zipfile_reader(str(path)) as archive:
        module = serialization._load(archive, "cpu", torch._weights_only_unpickler)
    return module.tensors() if isinstance(module, _Inert) else {}


class _Inert:
    """Stand-in for an object of another program, such as a module of a TorchScript archive: only its attributes."""

    def __init__(self, *_: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, attributes: Any) -> None:
        self.attributes = attributes if isinstance(attributes, dict) else {}

    def tensors(self, prefix: str = "") -> StateDict:
        """Return all parameters and buffers by their dotted names."""
        found: StateDict = {}
        for name, value in self.attributes.items():
            if isinstance(value, _Inert):
                found |= value.tensors(f"{prefix}{name}.")
            elif isinstance(value, torch.Tensor):
                found[f"{prefix}{name}"] = value
        return found


def _state_dict(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the dictionary of tensors: `content`, or the entry that holds it."""
    for _ in range(3):  # programs save at most so many dictionaries in each other
        entries = [name for name in _ENTRIES if _may_hold_tensors(content.get(name))]
        if not entries:
            break
        content = content[entries[0]]
        if entries[1:]:
            logger.warning("%s: reading the entry %r; not reading %s", path, entries[0], ", ".join(entries[1:]))
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        if not all(isinstance(name, str) for name in content):
            raise CheckpointError(f"{path} holds no state dict: its keys are not names")
        return content
    names = ", ".join(map(str, list(content)[:5]))
    raise CheckpointError(
        f"{path} holds no state dict; expected names and tensors, at the top level or under one of "
        f"{', '.join(_ENTRIES)}; it has {names or 'nothing'}"
    )


def _may_hold_tensors(entry: Any) -> bool:
    return isinstance(entry, dict) and any(isinstance(value, torch.Tensor | dict) for value in entry.values())


def _unwrapped(tensors: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the entries of a model without the prefixes that programs around it have added to its names."""
    named = {_WRAPPERS.sub("", name): value for name, value in tensors.items()}
    roots = [name.removesuffix("logit_scale") for name in named if re.fullmatch(r"(.*\.)?logit_scale", name)]
    if not roots:  # one tower, or a model without its scale
        while prefix := next((one for one in _PREFIXES if all(name.startswith(one) for name in named)), ""):
            named = {name.removeprefix(prefix): value for name, value in named.items()}
        return named
    if len(roots) > 1 and "" not in roots:
        raise CheckpointError(f"{path} holds several models, {', '.join(roots)}; save the state dict of one of them")
    root = "" if "" in roots else roots[0]
    own = {name.removeprefix(root): value for name, value in named.items() if name.startswith(root)}
    if len(own) < len(named):
        other = next(name for name in named if not name.startswith(root))
        logger.warning("%s: entries outside %s are not read: %d (first: %s)", path, root, len(named) - len(own), other)
    return own
