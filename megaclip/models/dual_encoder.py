"""The interface of a dual encoder for training, evaluation, export, locks and planner.

`DualEncoder` has two implementations: `ClipModel` (MegaCLIP's own towers, `megaclip.models.clip`), and `OpenClipModel`
(open_clip's modules, `megaclip.models.open_clip_model`). Both have an image tower `visual` and a text tower `text`,
which map inputs to embeddings that are not yet of unit length, and the scalars of the loss. Image size, context length
and the reason why captions cannot be cut are properties of the model's description, `config`. Mean and deviation of the
pixels belong to the model card (`megaclip.checkpoint.model_card`).

Training uses the parameters only through `forward`, because under ZeRO-3 a parameter has its value only inside the
forward of its own module.

Shapes: b batch, L text length, D embedding.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megaclip.comm.collectives import gather_rows
from megaclip.comm.groups import RankGroup
from megaclip.errors import ConfigError
from megaclip.models.blocks import CheckpointFunction
from megaclip.models.compilation import compiled_class
from megaclip.models.config import ModelConfig
from megaclip.models.layers import own_rows
from megaclip.models.open_clip_config import OpenClipConfig
from megaclip.models.open_clip_layers import repeated_blocks
from megaclip.models.packing import Pieces
from megaclip.models.text import caption_lengths, cut_lengths, is_cut_exact
from megaclip.zero.parameters import gathered_shape

ModelDescription = ModelConfig | OpenClipConfig
"""Description of a model: of MegaCLIP's own towers, or of open_clip's."""


TOWER_PREFIXES = {"image": "visual.", "text": "text."}
"""Name of a tower in settings and flags -> beginning of the names of its parameters."""


class DualEncoder(nn.Module, abc.ABC):
    """Encode images and captions as unit-length embeddings."""

    config: ModelDescription
    """Description of the model."""
    tensor: RankGroup
    """Tensor-parallel group; a group of one rank if the towers are whole."""
    visual: nn.Module
    """Image tower: (b, 3, image_size, image_size) -> (b, D)."""
    text: nn.Module
    """Text tower: tokens (b, L) int64 -> (b, D)."""
    logit_scale: nn.Parameter
    """Logarithm of the logit scale, (1,)."""
    logit_bias: nn.Parameter | None
    """Bias of the sigmoid loss's logits, (1,), or None."""
    locked_weights: dict[str, torch.Tensor]
    """Whole float32 values of the locked parameters as they were read, if the model holds them rounded to bfloat16. On
    the first rank, until the run has written them."""
    objective: nn.Module | None
    """Terms of the loss beside the contrastive one, with their parameters (`megaclip.objectives`); None: no such terms.
    It is called in training only."""
    base_sha256: str | None = None
    """Checksum of the weights to which adapters were added (`megaclip.models.lora`); None: the model has no adapters.
    Checkpoints of a model with adapters hold its trained parameters only."""
    before_text: Callable[[], None] | None = None
    """Function that `forward` calls between the towers if it encodes images and captions, or None. The gradient cache
    seeds the text tower's random numbers with it."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = None  # not an attribute of the class, which would hide the submodule

    def forward(
        self,
        images: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        pieces: Pieces | None = None,
        for_objective: dict[str, dict[str, Any]] | None = None,
    ) -> tuple[Any, ...]:
        """Encode images, captions or both.

        Args:
            images: (b, 3, image_size, image_size), normalised pixels, or (b, D), image features of an earlier call,
                which are returned, or None.
            tokens: (b, L) int64, or None. L is the context length, or less (`cut_captions`).
            pieces: rows of `tokens` that are cut at their own lengths, only for MegaCLIP's own towers of
                `models.text.is_cut_exact` that are not tensor parallel; None: all rows have L tokens.
            for_objective: what the objective receives from the step, for each of its calls: "image" and "text" for the
                samples of one tower, or "pair". None: it is not called.

        Returns:
            image features (b, D) or None, text features (b, D) or None, the log of the logit scale (1,) float32, and,
            if the model has it, the logit bias (1,) float32. Features have unit length and the parameters' dtype; they
            are normalised in float32 or higher precision. With `for_objective`, the last element has the outputs of
            each call of the objective by name.
        """
        image_features, more_features = self._encode_images(images, for_objective)
        if image_features is not None and tokens is not None and self.before_text is not None:
            self.before_text()
        divided = () if pieces is None else (pieces,)
        text_features = None if tokens is None else self._encode(self.text, tokens, *divided)
        # Copies, because under ZeRO-3 a returned parameter is partitioned again before the caller reads it.
        scalars = [self.logit_scale] if self.logit_bias is None else [self.logit_scale, self.logit_bias]
        outputs = image_features, text_features, *(_at_least_float32(scalar.clone()) for scalar in scalars)
        if for_objective is None:
            return outputs
        assert self.objective is not None, "only a model with an objective receives its inputs"
        results = {}
        for call, given in for_objective.items():
            rows = None if image_features is None else len(image_features)
            seen: dict[str, Any] = {name: each[:rows] for name, each in self.tower_tokens().items()}
            if call != "text":
                seen |= {"images": images, "image_features": image_features, "more_image_features": more_features}
            if call != "image":
                seen |= {"tokens": tokens, "text_features": text_features}
            results[call] = self.objective(seen | given)
        return *outputs, results

    def _encode_images(
        self, images: torch.Tensor | None, for_objective: dict[str, dict[str, Any]] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the features of the images, and those of the images that the objective adds to them, or None."""
        if images is None or images.ndim == 2:
            return images, None
        more = None
        if self.objective is not None and for_objective is not None and for_objective.keys() & {"image", "pair"}:
            more = self.objective.more_images(images)  # type: ignore[operator]
        if more is None:
            return self._encode(self.visual, images), None
        if more.shape[1:] != images.shape[1:]:
            raise ConfigError(
                f"{type(self.objective).__name__}.more_images returned images of shape {tuple(more.shape)}; return "
                f"(k, {', '.join(map(str, images.shape[1:]))})"
            )
        features = self._encode(self.visual, torch.cat([images, more]))
        return features[: len(images)], features[len(images) :]

    def _encode(self, tower: nn.Module, inputs: torch.Tensor, *others: Pieces) -> torch.Tensor:
        features = own_rows(self._features(tower, gather_rows(inputs, group=self.tensor), *others), self.tensor)
        return F.normalize(_at_least_float32(features), dim=-1).to(features.dtype)

    def _features(self, tower: nn.Module, inputs: torch.Tensor, *others: Pieces) -> torch.Tensor:
        """Return features (b, D) that are not yet of unit length."""
        features: torch.Tensor = tower(inputs, *others)
        return features

    def tower_tokens(self) -> dict[str, torch.Tensor]:
        """Return the last tokens of the towers in this forward pass, as the fields of an objective's `Chunk`.

        Only a model with a caption decoder has them, and only in a pass with gradients.
        """
        return {}

    def blank(self, row: torch.Tensor) -> torch.Tensor:
        """Return input for a tower that must take part in a pass, and whose features are multiplied by zero.

        row: one row of zeros, (1, ...), images or tokens. The features of the returned rows are finite.
        """
        return row

    def cut_captions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cut the padding that no caption of the batch needs: (b, context_length) -> (b, L), with the same features.

        The tokens are returned unchanged if the text tower's features depend on their padding. With tensor parallelism
        all ranks of a replica call it together and receive the same L, because they encode their rows together.
        """
        text = self.config.text_cfg
        if not is_cut_exact(text):
            return tokens
        (length,) = cut_lengths([int(caption_lengths(tokens, text).max())], text, self.tensor)
        return tokens[:, :length]

    def set_activation_checkpointing(self, checkpoint_fn: CheckpointFunction | None) -> None:
        """Run every block through `checkpoint_fn` while gradients are enabled; None turns it off.

        If lower layers are locked, the function must be non-reentrant. A reentrant checkpoint computes no gradients
        for the parameters of a block whose input requires none. Raises ConfigError if a tower has no blocks.
        """
        for name, tower in self.parts().items():
            blocks = repeated_blocks(tower)
            if not blocks and checkpoint_fn is not None:
                raise ConfigError(
                    f"activation_checkpointing: the {name} tower {type(tower).__name__} has no blocks to checkpoint; "
                    "leave activation_checkpointing out"
                )
            for block in blocks:
                kind: Any = type(block)
                if not hasattr(block, "checkpoint_fn"):
                    block.__class__ = _checkpointed(kind)
                block.checkpoint_fn = checkpoint_fn  # type: ignore[assignment]

    def parts(self) -> dict[str, Any]:
        """Return the parts of the model that have blocks, by name: "image", "text", and "decoder" if it has one."""
        return {"image": self.visual, "text": self.text}

    @abc.abstractmethod
    def lock_tower(self, name: str, unlocked_groups: int = 0) -> None:
        """Freeze the tower "image" or "text", except its last `unlocked_groups` groups.

        Raises ConfigError if it has no groups.
        """

    def blocks_gathered_at_once(self) -> list[tuple[nn.Module, bool]]:
        """Return the blocks of all parts, and whether ZeRO-3 may gather the parameters of each at once.

        DeepSpeed reduces the gradients of a block that is gathered at once when the gradient of its input is ready. If
        the input has no gradient, DeepSpeed treats the block's backward pass as finished before it starts. So the first
        trained block above locked parameters is gathered module by module, and a block that reads the images.
        """
        found: list[tuple[nn.Module, bool]] = []
        for name, part in self.parts().items():
            is_tower = name in TOWER_PREFIXES  # a decoder reads the tokens of both towers
            below = [next(part.parameters())] if is_tower else [*self.visual.parameters(), *self.text.parameters()]
            has_gradient = all(parameter.requires_grad for parameter in below)
            for block in repeated_blocks(part):
                trained = any(parameter.requires_grad for parameter in block.parameters())
                reads_images = any(parameter is below[0] for parameter in block.parameters())
                found.append((block, not trained or (has_gradient and not reads_images)))
                has_gradient = has_gradient or (trained and is_tower)
        return found

    def blocks_to_compile(self, tower: nn.Module) -> list[nn.Module]:
        """Return the blocks of a tower that are worth compiling."""
        return repeated_blocks(tower)

    def compile_towers(
        self, whole_image_tower: bool, where: Callable[[nn.Module], bool], *, recomputes: bool = False
    ) -> str:
        """Compile the towers for training with torch.compile; return a description of the compiled parts, for the log.

        whole_image_tower: compile the image tower as a whole, else block by block. where: returns False for blocks
        that must not be compiled. recomputes: compute layer norms and activation functions again in the backward pass.
        """
        compiled_once: Callable[..., type] = functools.cache(compiled_class)
        parts = []
        # Captions that are cut have several lengths, and a block compiles faster than a tower.
        wholes = ("image",) if is_cut_exact(self.config.text_cfg) else ("image", "text")
        for name, tower in self.parts().items():
            whole = whole_image_tower and name in wholes
            modules = [tower] if whole else [block for block in self.blocks_to_compile(tower) if where(block)]
            for module in modules:
                module.__class__ = compiled_once(type(module), recomputes=recomputes)
            parts.append(f"{name} {'tower' if whole else 'blocks' if modules else 'tower not'}")
        compiled = f"compiled {' and '.join(parts)}"
        return f"{compiled} with selective recomputation" if recomputes else compiled

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the text tower."""
        return self.config.text_cfg.vocab_size

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters, and the buffers that a checkpoint and an export hold, by name."""
        saved = self.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.named_buffers() if name in saved}
        return {**dict(self.named_parameters()), **buffers}

    def statistics(self, tower: nn.Module) -> list[torch.Tensor]:
        """Return the buffers of a tower's batch norms, which its forward passes in training change."""
        return [buffer for norm in self._batch_norms[tower] for buffer in norm.buffers()]

    @functools.cached_property
    def _batch_norms(self) -> dict[nn.Module, list[_BatchNorm]]:
        """Batch norms of each tower. To look for them takes half a millisecond, while the GPU waits for a step."""
        towers = self.visual, self.text
        return {tower: [part for part in tower.modules() if isinstance(part, _BatchNorm)] for tower in towers}

    def no_weight_decay_names(self) -> set[str]:
        """Return the names of the parameters that open_clip trains without weight decay: vectors, norms and biases."""
        return {
            name
            for name, parameter in self.named_parameters()
            if len(gathered_shape(parameter)) < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        }


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@functools.cache
def _checkpointed(block_class: type) -> type:
    """Return a subclass whose calls go through `checkpoint_fn`, including the hooks of the module."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = block_class.__call__.__get__(self)
        if self.checkpoint_fn is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return self.checkpoint_fn(call, *args, **kwargs)

    return type(block_class.__name__, (block_class,), {"__call__": __call__})
