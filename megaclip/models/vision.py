"""The image tower: patches, a class token, learnt positions, pre-norm blocks, one embedding per image.

Parameter names are those of open_clip's `VisionTransformer`, and semantics also those of timm's. Parameters that no
submodule owns (class and position embeddings, final projection) are used only in this module's forward, because ZeRO-3
gathers them only there.

Shapes: b batch, P patches, L tokens (P + 1 with a class token, else P), C width, D embedding.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megaclip.models.blocks import AttentionPooling, Transformer, project, projection
from megaclip.models.config import TimmVisionConfig, VisionConfig
from megaclip.models.layers import LayerFactory
from megaclip.models.rotary import rotation_of


class PatchDropout(nn.Module):
    """Keep a random subset of the patches of every training image (FLIP, arXiv:2212.00794).

    prefix: number of tokens before the patches, which are kept.
    """

    def __init__(self, fraction: float, prefix: int = 1) -> None:
        super().__init__()
        self.fraction, self.prefix = fraction, prefix

    def draw(self, batch: int, patches: int, device: torch.device) -> torch.Tensor | None:
        """Return the patches to keep, (b, kept) int64, in training; None to keep all of them.

        They are drawn from torch's global generator of the device. Restoring the state of that generator repeats the
        selection.
        """
        if not self.training or self.fraction == 0:
            return None
        kept = max(1, int(patches * (1 - self.fraction)))
        return torch.rand(batch, patches, device=device).topk(kept, dim=1).indices

    def forward(self, x_bLC: torch.Tensor, index_bk: torch.Tensor | None) -> torch.Tensor:
        """(b, prefix + P, C) and what `draw` returned in, (b, prefix + kept, C) out."""
        if index_bk is None:
            return x_bLC
        row_b1 = torch.arange(len(x_bLC), device=x_bLC.device).unsqueeze(1)
        return torch.cat([x_bLC[:, : self.prefix], x_bLC[:, self.prefix :][row_b1, index_bk]], dim=1)


def patch_products(images: torch.Tensor, convolution: nn.Conv2d) -> torch.Tensor:
    """Return a convolution whose stride is its kernel size, as tokens (b, P, C), row by row; partial patches are left
    out. It is a matrix product: cuDNN's convolution of three channels is slower, and would have to be transposed.

    images: (b, 3, height, width).
    """
    high, wide = convolution.kernel_size
    rows, columns = images.shape[2] // high, images.shape[3] // wide
    patches = images[:, :, : rows * high, : columns * wide].unflatten(3, (columns, wide)).unflatten(2, (rows, high))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return F.linear(patches, convolution.weight.flatten(1), convolution.bias)


class PatchEmbedding(nn.Conv2d):
    """Convolution that returns tokens."""

    def __init__(self, width: int, patch_size: int, bias: bool) -> None:
        super().__init__(3, width, patch_size, stride=patch_size, bias=bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return patches (b, P, C) of images (b, 3, height, width)."""
        return patch_products(images, self)


class VisionTower(nn.Module):
    """Encode images as embeddings, which are not yet of unit length."""

    COMPILED = "_encode"
    """Method that torch.compile compiles: patches are drawn before it."""

    def __init__(self, config: VisionConfig, embed_dim: int, quick_gelu: bool, factory: LayerFactory) -> None:
        super().__init__()
        self.config = config
        self.grid_size = (config.grid_size, config.grid_size)
        width, eps = config.width, config.norm_eps
        self.conv1 = PatchEmbedding(width, config.patch_size, config.patch_bias)
        shape = (1, 1, width) if isinstance(config, TimmVisionConfig) else (width,)  # weight decay depends on it
        self.class_embedding = nn.Parameter(torch.empty(shape)) if config.class_token else None
        self.positional_embedding = nn.Parameter(torch.empty(config.tokens, width))
        self.patch_dropout = PatchDropout(config.patch_dropout, prefix=int(config.class_token))
        self.ln_pre = nn.Identity() if config.no_ln_pre else factory.norm(width, eps)
        self.transformer = Transformer(config, quick_gelu, causal=False, factory=factory)
        self.ln_post = factory.norm(width, eps)
        self.attn_pool = AttentionPooling(config, factory) if config.pool_heads else None
        self.proj = projection(config.projection, width, embed_dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images (b, 3, image_size, image_size), any floating dtype, as (b, D) in the parameters' dtype."""
        kept_bk = self.patch_dropout.draw(len(images), self.config.grid_size**2, images.device)
        dtype = torch.promote_types(self.conv1.weight.dtype, torch.float32)
        return self._encode(images, kept_bk, rotation_of(self.config, images.device, dtype))

    def _encode(
        self, images: torch.Tensor, kept_bk: torch.Tensor | None, rotation: torch.Tensor | None
    ) -> torch.Tensor:
        if rotation is not None and kept_bk is not None:
            rotation = self.patch_dropout(rotation.expand(len(images), -1, -1), kept_bk).unsqueeze(1)
        x_bLC = self.conv1(images.to(self.conv1.weight.dtype))
        if self.class_embedding is not None:
            x_bLC = torch.cat([self.class_embedding.expand(len(images), 1, -1), x_bLC], dim=1)
        x_bLC = self.ln_pre(self.patch_dropout(x_bLC + self.positional_embedding, kept_bk))
        if self.attn_pool is not None:
            pooled_bC = self.attn_pool(self.ln_post(self.transformer(x_bLC, rotation=rotation)))
        elif self.config.pool_type == "tok":
            pooled_bC = self.ln_post(self.transformer(x_bLC, position=0, rotation=rotation).squeeze(1))
        elif self.config.final_ln_after_pool:
            pooled_bC = self.ln_post(self.transformer(x_bLC)[:, 1:].mean(dim=1))
        else:
            pooled_bC = self.ln_post(self.transformer(x_bLC))[:, 1:].mean(dim=1)
        return project(pooled_bC, self.proj)
