"""The interface of an objective: what it may declare, and when the step calls it.

    loss = weights["contrastive"] * contrastive loss + sum over terms of weights[name] * term

A term is one of two kinds. *Terms of a chunk* (`chunk_terms`) are sums over the samples of a chunk. They are computed
in the pass that has the chunk's graph, so they may use everything that the chunk's forward pass computes. *Terms of the
batch* (`batch_terms`) are computed once per step, from the features of all chunks. Both are exact over chunks and
ranks, at all ZeRO stages.

The order of a step:

1. Every chunk is encoded: `chunk_features`, and `chunk_terms` if the chunk's graph is kept.
2. The contrastive loss and `batch_terms` are evaluated and differentiated by the features.
3. The kept graphs are back-propagated. The other chunks are encoded again, with gradients: `chunk_features` and
   `chunk_terms`. Random numbers are those of the first time.

Shapes: m samples of a chunk, b samples of this rank in a step, L tokens, D embedding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megaclip.data.fields import Field
from megaclip.errors import ConfigError
from megaclip.logging import get_logger, log_once

if TYPE_CHECKING:
    from megaclip.checkpoint.model_card import ModelCard
    from megaclip.data import ImageTransform, Tokenizer
    from megaclip.models import DualEncoder

logger = get_logger(__name__)

CONTRASTIVE = "contrastive"
"""Name of the contrastive loss among the terms."""


@dataclass(frozen=True)
class Chunk:
    """The samples of one call: those that a pass encodes by one tower or, if the objective pairs, by both.

    What does not belong to the tower is None.
    """

    fields: dict[str, Tensor]
    """Extra fields of the samples, (m, ...) each."""
    counts: dict[str, int]
    """`Objective.counts` of these samples."""
    is_repeated: bool
    """True if the chunk is encoded for the second time. Features without gradients need not be returned again."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Results of `chunk_features`, for `chunk_terms`."""
    images: Tensor | None = None
    """Normalised pixels (m, 3, image_size, image_size), as the image tower receives them."""
    tokens: Tensor | None = None
    """Token ids (m, L) int64. L may be less than the context length where captions are cut."""
    image_features: Tensor | None = None
    """(m, D) of unit length, in the dtype of the parameters."""
    text_features: Tensor | None = None
    """(m, D)."""
    more_image_features: Tensor | None = None
    """Features of `Objective.more_images`, (k, D)."""
    image_tokens: Tensor | None = None
    """Last tokens of the image tower (m, P, width), if `Objective.tokens` names "image"."""
    text_tokens: Tensor | None = None
    """Last tokens of the text tower (m, L, width), if `Objective.tokens` names "text"."""


@dataclass(frozen=True)
class WholeBatch:
    """This rank's samples of a step, in the order of the batch. Gradients flow to the features and the scalars."""

    image_features: Tensor
    """(b, D) of unit length."""
    text_features: Tensor
    """(b, D)."""
    logit_scale: Tensor
    """(1,) float32: the factor of the similarities, 1 / temperature."""
    logit_bias: Tensor | None
    """(1,) float32, or None if the model has none."""
    features: dict[str, Tensor]
    """Features from `Objective.chunk_features`, (b, ...) each."""
    fields: dict[str, Tensor]
    """Extra fields of the samples, (b, ...) each."""


class Objective(nn.Module):
    """Base class of all objectives. Override what you need; every method has a default.

    The constructor receives `megaclip.objective_settings` as keyword arguments. It runs before there is a model. Wrong
    settings: raise ValueError.
    """

    fields: Mapping[str, Field] = {}
    """Extra fields of every sample, by name."""
    weights: Mapping[str, float] = {}
    """Factor of each term by name, and of the contrastive loss under "contrastive". Default: 1."""
    tokens: tuple[str, ...] = ()
    """Towers whose last tokens the objective reads: "image", "text" or both."""
    paired: bool = False
    """True: a chunk is encoded by both towers in one pass, so image i meets text i. Text chunks then have the size of
    image chunks. An objective with parameters requires it. It follows from `tokens` and `counts`."""

    model: "DualEncoder"
    """The model, from `attach` on. It is not a submodule."""
    term_names: list[str] | None = None
    """Names of all terms, from the first step on."""
    _graph_is_checked = False

    def prepare(self, transform: "ImageTransform", tokenizer: "Tokenizer") -> Sequence["ModelCard"]:
        """Read and check what the settings name. It is called before there is a model; raise ConfigError.

        transform, tokenizer: those of the run in training. Return the cards of further models that will receive the
        run's tokens. Their tokenizers must be that of the run.
        """
        return ()

    def build(self, model: "DualEncoder") -> None:
        """Create modules as attributes. Their parameters are trained, saved, resumed and exported (to
        `objective.safetensors`) with those of the model. `paired` must be true.

        Random initial values are equal on all ranks.
        """

    def more_images(self, images: Tensor) -> Tensor | None:
        """Return further images (k, 3, H, W), which the image tower encodes together with the images (m, 3, H, W) of a
        chunk.

        They are normalised pixels, as `images`. A second call of a tower in one pass is not possible at ZeRO-3.
        """
        return None

    def chunk_features(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return more features of the samples by name, (m, ...), for `batch_terms`. Gradients flow through them."""
        return {}

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return sums over the samples of a chunk by name, () each. A term is their sum over all chunks and ranks,
        divided by the samples of the batch, or by `counts`. Each rank must return the same names.

        A tower that is not trained has no pass with gradients, and its terms are left out.
        """
        return {}

    def counts(self, tokens: Tensor, fields: dict[str, Tensor]) -> dict[str, int]:
        """Return the numbers of addends, by name of a chunk term, if they are not the samples.

        It is called each time that a chunk is encoded, by both towers together. tokens: (m, L) of any integer type, and
        fields, (m, ...) each, on the host.
        """
        return {}

    def batch_terms(self, batch: WholeBatch) -> dict[str, Tensor]:
        """Return terms of the batch by name, () each. They must not use parameters.

        Each rank returns the mean over its own samples, or a loss of the whole batch that has the contract of
        `megaclip.losses`, such as `ClipLoss`.
        """
        return {}

    def attach(self, model: "DualEncoder") -> None:
        """Make the model known, and build the modules. Raises ConfigError if the objective does not fit the model."""
        if self.tokens and not model.config.has_decoder:
            raise ConfigError(
                f"the objective {type(self).__name__} reads tokens of the towers, and this model returns none; use a "
                "model with a caption decoder (multimodal_cfg), or remove `tokens` from the objective"
            )
        self.__dict__["model"] = model  # not registered as a submodule: the objective is one of the model
        self.build(model)

    def encodes_pairs(self) -> bool:
        """Return whether a pass encodes a chunk by both towers."""
        return self.paired or bool(self.tokens) or type(self).counts is not Objective.counts

    def changes_graphs(self) -> bool:
        """Return whether chunks need more memory than the towers take, which the plan of a run does not know."""
        methods = ("more_images", "chunk_features", "chunk_terms")
        return any(getattr(type(self), name) is not getattr(Objective, name) for name in methods)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the features and, in a pass with gradients, the terms of a chunk. The model's forward pass calls it.

        It is a module's forward, because ZeRO-3 gathers parameters there. inputs: the fields of `Chunk`. Raises
        ConfigError for outputs of another form than documented.
        """
        chunk, name_of_class = Chunk(**inputs), type(self).__name__
        features = self.chunk_features(chunk)
        _check_tensors(f"{name_of_class}.chunk_features", features)
        terms = self.chunk_terms(replace(chunk, features=features)) if torch.is_grad_enabled() else {}
        rows = next(len(each) for each in (chunk.image_features, chunk.text_features) if each is not None)
        check_terms(f"{name_of_class}.chunk_terms", terms, self.weights)
        for name, feature in features.items():
            if feature.ndim == 0 or len(feature) != rows or name in terms:
                raise ConfigError(
                    f"{name_of_class}.chunk_features returned {name!r} of shape {tuple(feature.shape)}; return one row "
                    f"for each of the {rows} samples, under a name that is no term's"
                )
        if torch.is_grad_enabled() and not self._graph_is_checked:
            self._graph_is_checked = True
            used = set(map(id, leaves((features | terms).values())))
            for name, parameter in self.named_parameters():
                if parameter.requires_grad and id(parameter) not in used:
                    log_once(
                        logger.warning, f"megaclip.objective: nothing uses its parameter {name}; it is not trained"
                    )
        return features | terms


def _check_tensors(method: str, results: Any) -> None:
    """Raise ConfigError unless `results`, which a user's method has returned, are tensors by name."""
    if not isinstance(results, dict):
        raise ConfigError(f"{method} returned {type(results).__name__}; return a dict of tensors by name")
    for name, result in results.items():
        if not isinstance(result, Tensor) or name == CONTRASTIVE:
            raise ConfigError(
                f"{method} returned {name!r} of type {type(result).__name__}; return a tensor, under a name other than "
                f"{CONTRASTIVE!r}"
            )


def check_terms(method: str, terms: Any, weights: Mapping[str, float]) -> None:
    """Raise ConfigError unless `terms`, which a user's method has returned, are scalar tensors by name.

    Those with a weight other than 0 must have gradients.
    """
    _check_tensors(method, terms)
    for name, term in terms.items():
        if term.ndim:
            raise ConfigError(f"{method} returned {name!r} of shape {tuple(term.shape)}; return a tensor of shape ()")
        if not term.requires_grad and weights.get(name, 1):
            raise ConfigError(
                f"{method} returned {name!r} without gradients, so it trains nothing; compute it without detach(), or "
                "give it the weight 0"
            )


def leaves(results: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that the graphs of the results start from."""
    nodes: list[Any] = [result.grad_fn for result in results]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            nodes += [following for following, _ in node.next_functions]
