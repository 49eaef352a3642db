"""The dual encoder: an image tower, a text tower, the logarithm of the logit scale, and optionally a logit bias.

`build_model(config)` builds one. Training uses the parameters only through `ClipModel.forward`, because under ZeRO-3 a
parameter has its value only inside the forward of its own module.

Shapes: b batch, L text length, D embedding.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megaclip.comm.collectives import gather_rows
from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import ConfigError
from megaclip.models.blocks import CheckpointFunction, Part
from megaclip.models.config import ModelConfig
from megaclip.models.initialise import initialise
from megaclip.models.layers import LayerFactory, own_rows
from megaclip.models.text import TextTower, caption_lengths, cut_lengths, is_cut_exact
from megaclip.models.vision import VisionTower


class ClipModel(nn.Module):
    """Encode images and captions as unit-length embeddings.

    The parameters are uninitialised until `initialise` is called or weights are loaded.


    tensor: tensor-parallel group. Each of its T ranks holds a part of every block. Each rank passes b rows of its own,
    the towers run on the rows of all T ranks, and each rank receives the features of its own rows.
    layer_norm: implementation of the layer norms, "torch" or "apex".
    """

    def __init__(self, config: ModelConfig, tensor: RankGroup = ONE_RANK, layer_norm: str = "torch") -> None:
        super().__init__()
        self.config = config
        self.tensor = tensor
        factory = LayerFactory(tensor, layer_norm)
        self.visual = VisionTower(config.vision_cfg, config.embed_dim, config.quick_gelu, factory)
        self.text = TextTower(config.text_cfg, config.embed_dim, config.quick_gelu, factory)
        # Shape (1,), because DeepSpeed cannot initialise with 0-d parameters.
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = None if config.init_logit_bias is None else nn.Parameter(torch.empty(1))

    def forward(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Encode images, captions or both.

        Args:
            images: (b, 3, image_size, image_size), normalised pixels, or None.
            tokens: (b, L) int64, or None. L is the context length, or less (`cut_captions`).

        Returns:
            image features (b, D) or None, text features (b, D) or None, the log of the logit scale (1,) float32, and,
            if the model has it, the logit bias (1,) float32. Features have unit length and the parameters' dtype; they
            are normalised in float32 or higher precision.
        """
        image_features = None if images is None else self._encode(self.visual, images)
        text_features = None if tokens is None else self._encode(self.text, tokens)
        # Copies, because under ZeRO-3 a returned parameter is partitioned again before the caller reads it.
        scalars = [self.logit_scale] if self.logit_bias is None else [self.logit_scale, self.logit_bias]
        return image_features, text_features, *(_at_least_float32(scalar.clone()) for scalar in scalars)

    def _encode(self, tower: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        features = tower(gather_rows(inputs, group=self.tensor))
        return _unit_length(own_rows(features, self.tensor))

    def cut_captions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cut the padding that no caption of the batch needs: (b, context_length) -> (b, L), with the same features.

        The tokens are returned unchanged if the text tower's features depend on their padding. With tensor parallelism
        all ranks of a replica call it together and get the same L, because they encode their rows together.
        """
        text = self.config.text_cfg
        if not is_cut_exact(text):
            return tokens
        (length,) = cut_lengths([int(caption_lengths(tokens, text).max())], text, self.tensor)
        return tokens[:, :length]

    def set_activation_checkpointing(self, checkpoint_fn: CheckpointFunction | None) -> None:
        """Run every block as `checkpoint_fn(block, x)` while gradients are enabled; None turns it off.

        If lower layers are locked, the function must be non-reentrant. A reentrant checkpoint computes no gradients
        for the parameters of a block whose input requires none.
        """
        self.visual.transformer.checkpoint_fn = checkpoint_fn
        self.text.transformer.checkpoint_fn = checkpoint_fn

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower, except its last `unlocked_groups` groups.

        From last to first, the groups are: projection; last block with norm; each earlier block; stem.
        """
        _lock(self.visual, self.visual.trainable_groups(), unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the text tower, except its last `unlocked_layers` groups; the groups are as in the image tower."""
        _lock(self.text, self.text.trainable_groups(), unlocked_layers)

    def no_weight_decay_names(self) -> set[str]:
        """Return the names of the parameters that open_clip trains without weight decay.

        These are vectors, norms, biases and the logit scale.
        """
        return {
            name
            for name, parameter in self.named_parameters()
            # ds_shape is the whole shape of a parameter that ZeRO-3 has partitioned.
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2
            or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        }


def build_model(
    config: ModelConfig,
    *,
    patch_dropout: float | None = None,
    tensor: RankGroup = ONE_RANK,
    layer_norm: str = "torch",
) -> ClipModel:
    """Build a model with open_clip's distributions of initial values, drawn from torch's global seed.

    The same `torch.manual_seed` gives the same values with and without `deepspeed.zero.Init`. With it, every rank must
    call this with the same seed. Under `torch.device("meta")` the parameters get no values.

    Args:
        config: model description.
        patch_dropout: replaces `config.vision_cfg.patch_dropout`.
        tensor: tensor-parallel group; the values do not depend on its size.
        layer_norm: implementation of the layer norms, "torch" or "apex".

    Raises:
        ConfigError: patch_dropout is outside [0, 1).
    """
    if patch_dropout is not None:
        config = config.replace(vision_cfg={"patch_dropout": patch_dropout})
    # The seed is drawn before construction, which uses the generator differently under deepspeed.zero.Init.
    seed = int(torch.randint(2**62, (1,), device="cpu"))
    model = ClipModel(config, tensor, layer_norm)
    initialise(model, config, seed)
    return model


def _unit_length(features: torch.Tensor) -> torch.Tensor:
    return F.normalize(_at_least_float32(features), dim=-1).to(features.dtype)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _lock(tower: nn.Module, groups: list[list[Part]], unlocked_groups: int) -> None:
    if unlocked_groups < 0:
        raise ConfigError(f"the number of unlocked groups is {unlocked_groups}, expected 0 or more")
    tower.requires_grad_(False)
    for group in groups[len(groups) - min(unlocked_groups, len(groups)) :]:
        for part in group:
            part.requires_grad_(True)
