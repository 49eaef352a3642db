"""Check that all ranks have the same inputs.

Every rank reads the command line, ds_config.json and the data itself. If hosts have different copies of them, a rank
takes other samples than the others expect. Or it saves, evaluates or ends at another step, and the other ranks wait for
it in a collective forever. So the ranks compare their inputs once, before anything depends on them.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megaclip.comm.collectives import gather_objects
from megaclip.config import TrainArguments
from megaclip.data import PairDataset
from megaclip.engine.inputs import Inputs
from megaclip.errors import ConfigError
from megaclip.evaluation.items import ItemSet
from megaclip.evaluation.suite import TaskData
from megaclip.objectives.registry import objective_identity

_PATHS = {
    "deepspeed_config",
    "model",
    "train_data",
    "image_root",
    "val_data",
    "zeroshot_data",
    "suite",
    "tokenizer",
    "pretrained",
    "pretrained_image",
    "pretrained_text",
    "data_offload_dir",
    "feature_cache",
    "shard_cache",
    "logs",
    "resume",
}
"""Flags with paths, which may differ between hosts. Content that must be equal is compared instead."""
_ON_ALL_RANKS = ("pretrained", "pretrained_image", "pretrained_text", "feature_cache")
"""Flags of `_PATHS` that all ranks or none must have, and whose content is not compared."""
_PER_RANK = {"set", "name", "workers", "shard_cache_gb", "local_rank", "debug_traceback"}
"""Other flags that may differ. Only the first rank's --name is used. ds_config.json is compared with --set."""


def require_equal_inputs(arguments: TrainArguments, inputs: Inputs) -> None:
    """Raise ConfigError, on every rank, unless all ranks have the same settings and data. Every rank must call it."""
    flags = arguments.model_dump(mode="json", exclude=_PATHS | _PER_RANK)
    given = arguments.model_dump(exclude_none=True)
    require_equal(
        {
            "--deepspeed_config": f"settings with {_checksum(inputs.config.deepspeed)}",
            **{f"--{name.replace('_', '-')}": json.dumps(value) for name, value in flags.items()},
            **{f"--{name.replace('_', '-')}": "a path" if name in given else "not set" for name in _ON_ALL_RANKS},
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


def _checksum(content: Any) -> str:
    return f"checksum {hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]}"
