"""Configurations of the Hugging Face text models that open_clip's descriptions name, so that no network is needed.

open_clip reads the configuration of `text_cfg.hf_model_name` from the Hugging Face hub. `known_configurations` lets it
read, in this order: a local directory with a config.json, the file `hugging_face_configs.json` beside this module, and
the local cache of the hub. The file holds the values of the models' own config.json that differ from transformers'
defaults for the model type.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

from megaclip.errors import ConfigError, first_line

_LAYERS = {
    "bert": {"layer_attr": "layer", "token_embeddings_attr": "embeddings"},
    "m2m_100": {"layer_attr": "layers", "token_embeddings_attr": "embed_tokens"},
}
"""Attributes that open_clip 3.3.0 does not name. Its `lock` and layer-wise learning rates read them."""


@contextmanager
def known_configurations() -> Iterator[None]:
    """Let open_clip read configurations of Hugging Face models without the network, in the body of a `with`
    statement, and complete its table of their layers."""
    from open_clip import hf_model

    for model_type, names in _LAYERS.items():
        known = hf_model.arch_dict[model_type]["config_names"]
        known.update({name: value for name, value in names.items() if name not in known})
    with mock.patch.object(hf_model, "AutoConfig", SimpleNamespace(from_pretrained=configuration), create=True):
        yield


def configuration(name: str) -> Any:
    """Return the configuration of a Hugging Face model. Raises ConfigError if it is not on this machine."""
    from transformers import AutoConfig

    file = resources.files("megaclip.models") / "hugging_face_configs.json"
    known: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    if not Path(name).is_dir() and name in known:
        settings = known[name]
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # transformers does not document the exceptions that it raises
        raise ConfigError(
            f"text_cfg.hf_model_name {name!r} is neither a directory with a config.json, nor in the cache of the "
            f"Hugging Face hub ({first_line(error)}), nor one of {', '.join(sorted(known))}; download its config.json "
            "into a directory, and name that directory"
        ) from None


def position_limit(model: nn.Module) -> int | None:
    """Return the most tokens for which a text model has position embeddings; None if it learns none."""
    limits = [
        # RoBERTa's positions begin after the id of its padding.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "position_embedding"))
    ]
    return min(limits, default=None)
