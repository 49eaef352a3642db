"""The image tower: patches, a class token, learnt positions, pre-norm blocks, one embedding per image.

Parameter names and semantics are open_clip's `VisionTransformer`. Parameters that no submodule owns (class and
position embeddings, the final projection) are used only in this module's own forward, which is where ZeRO-3 has them.

Shapes: b batch, P patches, L = P + 1 tokens, C width, D embedding.
"""

import torch
from torch import nn

from megaclip.models.blocks import Part, Transformer
from megaclip.models.config import VisionConfig


class PatchDropout(nn.Module):
    """Keep a random subset of the patches of every training image (FLIP, arXiv:2212.00794); the class token stays."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, 1 + P, C) in; (b, 1 + kept, C) out in training, the input itself otherwise.

        Draws from torch's global generator of the tensor's device, so restoring that generator repeats the choice.
        """
        if not self.training or self.fraction == 0:
            return x_bLC
        batch, patches = x_bLC.shape[0], x_bLC.shape[1] - 1
        kept = max(1, int(patches * (1 - self.fraction)))
        index_bk = torch.rand(batch, patches, device=x_bLC.device).topk(kept, dim=1).indices
        row_b1 = torch.arange(batch, device=x_bLC.device).unsqueeze(1)
        return torch.cat([x_bLC[:, :1], x_bLC[:, 1:][row_b1, index_bk]], dim=1)


class VisionTower(nn.Module):
    """Images to embeddings; not yet unit length."""

    def __init__(self, config: VisionConfig, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(config.width))
        self.positional_embedding = nn.Parameter(torch.empty(config.grid_size**2 + 1, config.width))
        self.patch_dropout = PatchDropout(config.patch_dropout)
        self.ln_pre = nn.Identity() if config.no_ln_pre else nn.LayerNorm(config.width)
        self.transformer = Transformer(
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            ls_init_value=config.ls_init_value,
            quick_gelu=quick_gelu,
            causal=False,
        )
        self.ln_post = nn.LayerNorm(config.width)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (b, 3, image_size, image_size), any floating dtype -> (b, D) in the parameters' dtype."""
        patches_bCP = self.conv1(images.to(self.conv1.weight.dtype)).flatten(2)
        class_b1C = self.class_embedding.expand(len(images), 1, -1)
        x_bLC = torch.cat([class_b1C, patches_bCP.transpose(1, 2)], dim=1) + self.positional_embedding
        x_bLC = self.transformer(self.ln_pre(self.patch_dropout(x_bLC)))
        if self.config.final_ln_after_pool:
            pooled_bC = self.ln_post(self._pool(x_bLC))
        else:
            pooled_bC = self._pool(self.ln_post(x_bLC))
        return pooled_bC @ self.proj

    def _pool(self, x_bLC: torch.Tensor) -> torch.Tensor:
        return x_bLC[:, 1:].mean(dim=1) if self.config.pool_type == "avg" else x_bLC[:, 0]

    def trainable_groups(self) -> list[list[Part]]:
        """Parts of the tower from input to output, in the groups that open_clip locks and unlocks."""
        blocks: list[list[Part]] = [[block] for block in self.transformer.resblocks]
        stem: list[Part] = [self.conv1, self.class_embedding, self.positional_embedding, self.ln_pre]
        return [stem, *blocks[:-1], [*blocks[-1], self.ln_post], [self.proj]]
