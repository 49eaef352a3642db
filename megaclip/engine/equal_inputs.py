"""Check that all ranks have the same inputs.

Every rank reads the command line, ds_config.json and the data itself. If hosts have different copies of them, a rank
takes other samples than the others expect. Or it saves, evaluates or ends at another step, and the other ranks wait for
it in a collective forever. So the ranks compare their inputs once, before anything depends on them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaclip.comm.collectives import gather_objects
from megaclip.config import TrainArguments
from megaclip.data import PairDataset
from megaclip.engine.inputs import Inputs
from megaclip.errors import ConfigError, os_reason
from megaclip.evaluation.items import ItemSet
from megaclip.evaluation.suite import TaskData
from megaclip.objectives.registry import objective_identity

_LOCAL = {
    "set",
    "name",
    "workers",
    "image_root",
    "data_offload_dir",
    "shard_cache",
    "shard_cache_gb",
    "logs",
    "local_rank",
    "debug_traceback",
}
"""Flags that may differ between ranks. Only the first rank's --name is used. ds_config.json is compared with --set."""
_WEIGHTS = ("pretrained", "pretrained_image", "pretrained_text")
_SAMPLES, _SAMPLE_BYTES = 64, 2**16
"""Parts of a file of weights that are compared. Weights of another training differ in all of them."""


def require_equal_inputs(arguments: TrainArguments, inputs: Inputs) -> None:
    """Raise ConfigError, on every rank, unless all ranks have the same settings and data. Every rank must call it.

    Paths may differ between hosts. The content that must be equal is compared instead.
    """
    flags = arguments.model_dump(mode="json", exclude=_LOCAL | {"deepspeed_config"})
    require_equal(
        {
            "--deepspeed_config": f"settings with {_checksum(inputs.config.deepspeed)}",
            **{f"--{name.replace('_', '-')}": json.dumps(value) for name, value in flags.items()},
            **{f"--{name.replace('_', '-')}": weights_text(getattr(arguments, name)) for name in _WEIGHTS},
            "--feature-cache": "not set" if arguments.feature_cache is None else "a path",
            "--resume": "a path" if arguments.resume not in (None, "auto") else json.dumps(arguments.resume),
            "--model": f"a description with {_checksum(inputs.model_config.to_open_clip())}",
            "megaclip.objective": objective_identity(inputs.config.megaclip.objective),
            "--tokenizer": inputs.tokenizer.identity,
            "the image preprocessing": json.dumps(inputs.preprocess_cfg),
            "--train-data": data_text(inputs.train),
            "--val-data": data_text(inputs.validation),
            "--zeroshot-data": data_text(inputs.labelled),
            "--suite": _checksum([[task.key, data_text(data)] for task, data in inputs.suite]),
        }
    )


def require_equal(texts: Mapping[str, str]) -> None:
    """Raise ConfigError, which names the first difference, unless all ranks pass equal `texts`.

    Every rank must call it, with the same names.
    """
    first, *others = gather_objects(dict(texts))
    for name, text in first.items():
        for rank, other in enumerate(others, start=1):
            if other[name] != text:
                raise ConfigError(
                    f"{name} differs between ranks: {text} on rank 0, {other[name]} on rank {rank}; give all ranks the "
                    "same settings, and all hosts the same files"
                )


def data_text(dataset: TaskData | None) -> str:
    """Return a text that is equal for equal data, wherever they are stored."""
    if dataset is None:
        return "no data"
    if isinstance(dataset, PairDataset):
        return f"{len(dataset)} samples in files with {_checksum(dataset.manifest())}"
    if isinstance(dataset, ItemSet):
        return f"{len(dataset)} images of items with {_checksum(repr(dataset.items))}"
    classes = f"{len(dataset.class_names)} classes with {_checksum([dataset.class_names, dataset.templates])}"
    return f"{len(dataset)} samples of {classes}"


def weights_text(path: str | None) -> str:
    """Return a text that differs for different weights, and is equal for equal files, wherever they are stored."""
    if path is None:
        return "not set"
    place, sums = Path(path), hashlib.sha256()
    try:
        for file in [place] if place.is_file() else sorted(place.iterdir()):
            if file != place and file.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".npz"):
                continue
            size = file.stat().st_size
            sums.update(f"{size} ".encode())
            with file.open("rb") as content:
                for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                    content.seek(start)
                    sums.update(content.read(_SAMPLE_BYTES))
    except OSError as error:  # of one rank: the others must not wait for it
        return f"weights that cannot be read: {os_reason(error)}"
    return f"weights with checksum {sums.hexdigest()[:8]}"


def _checksum(content: Any) -> str:
    return f"checksum {hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]}"
