"""MegaCLIP's own dual encoder: its image tower, its text tower, and the scalars of the loss."""

import torch
from torch import nn

from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.models.config import ModelConfig, TimmVisionConfig
from megaclip.models.dual_encoder import DualEncoder
from megaclip.models.layers import LayerFactory
from megaclip.models.open_clip_layers import layer_groups, repeated_blocks
from megaclip.models.text import TextTower
from megaclip.models.vision import VisionTower


class ClipModel(DualEncoder):
    """Dual encoder of pre-norm transformers, which can be tensor parallel.

    The parameters are uninitialised until `initialise` is called or weights are loaded.

    tensor: tensor-parallel group. Each of its T ranks holds a part of every block. Each rank passes b rows of its own,
    the towers run on the rows of all T ranks, and each rank receives the features of its own rows.
    layer_norm: implementation of the layer norms, "torch" or "apex".
    """

    config: ModelConfig
    visual: VisionTower
    text: TextTower

    def __init__(self, config: ModelConfig, tensor: RankGroup = ONE_RANK, layer_norm: str = "torch") -> None:
        super().__init__()
        self.config = config
        self.tensor = tensor
        factory = LayerFactory(tensor, layer_norm)
        timm = isinstance(config.vision_cfg, TimmVisionConfig)  # quick_gelu is for open_clip's transformers
        self.visual = VisionTower(config.vision_cfg, config.embed_dim, config.quick_gelu and not timm, factory)
        self.text = TextTower(config.text_cfg, config.embed_dim, config.quick_gelu, factory)
        # Shape (1,), because DeepSpeed cannot initialise with 0-d parameters.
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = None if config.init_logit_bias is None else nn.Parameter(torch.empty(1))

    def lock_tower(self, name: str, unlocked_groups: int = 0) -> None:
        """Freeze a tower, except its last `unlocked_groups` groups.

        From last to first, the groups are: attention pooling and projection; last block with norm; each earlier block;
        stem.
        """
        tower = self.parts()[name]
        groups = layer_groups(tower)
        tower.requires_grad_(False)
        for group in groups[len(groups) - min(unlocked_groups, len(groups)) :]:
            for parameter in group:
                parameter.requires_grad_(True)

    def blocks_to_compile(self, tower: nn.Module) -> list[nn.Module]:
        """Return all blocks except a last one that computes one token."""
        blocks = repeated_blocks(tower)
        return blocks if getattr(tower, "attn_pool", None) is not None else blocks[:-1]
