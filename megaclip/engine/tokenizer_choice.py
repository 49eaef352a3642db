"""Choose the tokenizer of a model, and fit the text tower to it.

The tokenizer comes from --tokenizer, else from the model card of the weights, else from the model description. Weights
depend on the tokenizer that they were trained with, so a tokenizer that differs from the card's gives a warning.
`choose_tokenizer` makes the choice, and `TokenizerChoice.fit` returns the model description for it.
"""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclip.checkpoint.model_card import ModelCard, check_inside
from megaclip.data import Tokenizer, load_tokenizer
from megaclip.data.tokenizers import CACHED, HuggingFaceTokenizer, is_hugging_face
from megaclip.errors import CheckpointError, ConfigError
from megaclip.logging import get_logger
from megaclip.models import ModelDescription, OpenClipConfig
from megaclip.models.hugging_face import configuration

logger = get_logger(__name__)

_SENTENCEPIECE = "sentencepiece"
"""text_cfg.hf_tokenizer_name of a model with a sentencepiece model of `megaclip tokenizer`."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Tokenizer of a model, with its source."""

    tokenizer: Tokenizer
    name: str
    """The tokenizer, as `load_tokenizer` takes it."""
    owner: ModelDescription | None
    """Model description that names this tokenizer. None: --tokenizer names another one."""

    def fit(self, config: ModelDescription) -> ModelDescription:
        """Return the description whose text tower fits the tokenizer, in MegaCLIP and in open_clip.

        Raises:
            ConfigError: the tokenizer has more ids than the text tower can have embeddings, or the tower takes the
                feature at the end-of-text token, and captions do not end with that token.
        """
        tokenizer, text = self.tokenizer, config.text_cfg
        rows = self.embeddings(config)
        with tempfile.TemporaryDirectory() as folder:
            settings = tokenizer.write_open_clip(folder)
        if _hugging_face_model(config) is None:
            settings["vocab_size"] = rows
        if config.has_decoder:  # the padding is no label of its loss, and its text tower masks it
            settings["pad_id"] = tokenizer.pad_id
        if isinstance(tokenizer, HuggingFaceTokenizer):
            described = text.hf_tokenizer_name
            # with a name here open_clip reads the files beside the card
            settings["hf_tokenizer_name"] = described if described and described != _SENTENCEPIECE else "hugging face"
            settings |= self._pool_settings(tokenizer, config)
        elif text.pool_type == "eos":
            settings["eos_id"] = tokenizer.eos_id
        return config.replace(text_cfg=settings)

    def embeddings(self, config: ModelDescription) -> int:
        """Return the number of embeddings of the text tower, as the description that names the tokenizer states it.

        A description without `text_cfg.vocab_size` has as many as the tokenizer has ids.

        Raises:
            ConfigError: the tokenizer has more ids, or the tower is a Hugging Face model and requires its own one.
        """
        tokenizer, hugging_face = self.tokenizer, _hugging_face_model(config)
        text, setting = (self.owner or config).text_cfg, "text_cfg.vocab_size"
        rows = text.vocab_size if "vocab_size" in text.model_fields_set else tokenizer.vocab_size
        if hugging_face is not None:
            setting, rows = "text_cfg.hf_model_name", int(configuration(hugging_face).vocab_size)
            if not isinstance(tokenizer, HuggingFaceTokenizer):
                raise ConfigError(
                    f"--tokenizer {self.name} is not the tokenizer of {setting} {hugging_face!r}; give a directory "
                    "with the files of that model's tokenizer"
                )
        if tokenizer.vocab_size > rows:
            raise ConfigError(
                f"tokenizer {self.name} has {tokenizer.vocab_size} ids, and the text tower has {rows} embeddings "
                f"({setting}); give the tokenizer of the model as --tokenizer, or, to train from random weights, set "
                "text_cfg.vocab_size in a copy of the model's JSON"
            )
        return rows

    def _pool_settings(self, tokenizer: HuggingFaceTokenizer, config: ModelDescription) -> dict[str, Any]:
        """Return the settings of `text_cfg` with which the text tower takes the feature at the tokenizer's end of text.

        A tower keeps its setting if the description that names the tokenizer has the same setting, because weights
        were trained with it.
        """
        text, owner = config.text_cfg, self.owner
        if _hugging_face_model(config) is not None:
            return {}
        padding = {} if owner is not None else {"pad_id": tokenizer.pad_id}
        finds_the_end = text.pool_type in ("argmax", "eos")
        if not finds_the_end or (isinstance(config, OpenClipConfig) and config.text_cfg.embed_cls):
            return padding
        is_highest = tokenizer.eos_id == tokenizer.vocab_size - 1
        if owner is not None and owner.text_cfg.pool_type == text.pool_type:
            if text.pool_type == "argmax":
                if not is_highest:
                    logger.warning(
                        'text_cfg.pool_type "argmax" takes the feature at the highest token id of a caption, which is '
                        "not the end of text (id %d) of tokenizer %s; to train from random weights, set "
                        '"pool_type": "eos" and "eos_id": %d in a copy of the model\'s JSON',
                        tokenizer.eos_id,
                        self.name,
                        tokenizer.eos_id,
                    )
                return {}
            end = owner.text_cfg.eos_id
            if not text.no_causal_mask:  # without the mask the first token, the fallback, attends to the whole caption
                self._check_end(tokenizer, end)
            return {"eos_id": end}
        self._check_end(tokenizer, tokenizer.eos_id)
        if text.pool_type == "argmax" and is_highest:
            return padding
        return {**padding, "pool_type": "eos", "eos_id": tokenizer.eos_id}

    def _check_end(self, tokenizer: HuggingFaceTokenizer, end: int) -> None:
        """Raise ConfigError if captions do not end with the token `end`, at which the text tower takes the feature."""
        if not tokenizer.ends_captions_with(end):
            raise ConfigError(
                f"tokenizer {self.name} does not end every caption with id {end}, where the text tower takes the "
                "feature; use a tokenizer that appends an end-of-text token (post_processor of tokenizer.json), and "
                "set text_cfg.eos_id to its id"
            )


def choose_tokenizer(given: str | None, card: ModelCard | None, config: ModelDescription) -> TokenizerChoice:
    """Load the tokenizer; warn if `given` is not the tokenizer of `card`.

    given: --tokenizer, as `load_tokenizer` takes it. card: that of the weights. config: sets the context length.

    Raises:
        CheckpointError: the card's tokenizer is not beside it, and no other one is given.
        ConfigError: the tokenizer cannot be loaded.
    """
    owner = config if card is None else card.config
    try:
        own = _named_by(config) if card is None else tokenizer_of(card)
    except CheckpointError:
        if given is None:
            raise
        return TokenizerChoice(_load(given, config, owner), given, None)
    if given is None or given == own:
        return TokenizerChoice(_load(own, config, owner), own, owner)
    tokenizer = _load(given, config, owner)
    with contextlib.suppress(ConfigError):  # the own one cannot be loaded
        if _load(own, config, owner).identity == tokenizer.identity:
            return TokenizerChoice(tokenizer, given, owner)
    if card is not None:
        logger.warning("--tokenizer %s is not the tokenizer of the model in %s, %s", given, card.directory, own)
    return TokenizerChoice(tokenizer, given, None)


def tokenizer_of(card: ModelCard) -> str:
    """Return the tokenizer of a model card as `load_tokenizer` takes it: "clip", the path of the sentencepiece model
    beside the card, or the card's directory, which holds the files of a Hugging Face tokenizer.

    Raises:
        CheckpointError: the model has its own tokenizer, and the directory holds neither, or a link from it leads out
            of the directory.
    """
    name = card.config.text_cfg.hf_tokenizer_name
    if not name:
        return "clip"
    if name != _SENTENCEPIECE and (card.directory / "tokenizer_config.json").is_file():
        return str(card.directory)
    models = sorted(card.directory.glob("*.model"))
    if len(models) != 1:
        raise CheckpointError(
            f"{card.directory} holds {len(models)} *.model files, expected 1, the sentencepiece model that the model "
            "was trained with; put exactly that file there, or name it with --tokenizer if the command has that flag"
        )
    check_inside(models[0], card.directory)
    return str(models[0])


def _named_by(config: ModelDescription) -> str:
    """Return the tokenizer that a model description without a card names, as `load_tokenizer` takes it."""
    name = config.text_cfg.hf_tokenizer_name
    if not name:
        return "clip"
    return name if Path(name).is_dir() else CACHED + name


def _load(name: str, config: ModelDescription, owner: ModelDescription) -> Tokenizer:
    """Load the tokenizer with the options of the description that has such a tokenizer, `owner` first.

    A description's options belong to its own tokenizer. CLIP's tokenizer and sentencepiece models do not have most
    options of Hugging Face tokenizers. Hugging Face tokenizers always receive the options of `config`.
    """
    kind = "hugging face" if is_hugging_face(name) else "clip" if name == "clip" else _SENTENCEPIECE
    described = [one.text_cfg for one in (owner, config) if _described_kind(one) == kind]
    if not described and kind == "hugging face":
        described = [config.text_cfg]
    mode, options = (described[0].tokenizer_mode, described[0].tokenizer_kwargs) if described else (None, None)
    return load_tokenizer(name, config.text_cfg.context_length, mode=mode, options=options)


def _described_kind(config: ModelDescription) -> str:
    name = config.text_cfg.hf_tokenizer_name
    return _SENTENCEPIECE if name == _SENTENCEPIECE else "hugging face" if name else "clip"


def _hugging_face_model(config: ModelDescription) -> str | None:
    """Return the name of the Hugging Face model that is the text tower, or None."""
    return config.text_cfg.hf_model_name if isinstance(config, OpenClipConfig) else None
