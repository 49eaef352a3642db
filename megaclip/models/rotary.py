"""Rotary position embeddings in two dimensions, as timm's `RotaryEmbeddingCat` computes them (EVA-02, PE).

Neighbouring channels of a head are pairs, which turn by an angle. The first half of the pairs turns with one coordinate
of the patch, the second half with the other. A class token does not turn.

Shapes: L tokens, K channels per head.
"""

import functools

import torch

from megaclip.models.config import Rotary, VisionConfig

_TEMPERATURE = 10000.0


@functools.lru_cache(maxsize=16)
def rotation_of(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """Return cosines and sines of every token's angles, (L, 2 K) in `dtype`; None for a tower without them.

    They are computed in float32, as in timm, and kept for later calls.
    """
    if (rotary := config.rotary) is None:
        return None
    with torch.inference_mode(False):  # a later call may require gradients
        return _rotation(config, rotary).to(device, dtype)


def _rotation(config: VisionConfig, rotary: Rotary) -> torch.Tensor:
    bands = 1.0 / _TEMPERATURE ** (torch.arange(config.head_width // 4, device="cpu") / (config.head_width // 4))
    places = torch.arange(config.grid_size, dtype=torch.float32, device="cpu") + rotary.offset
    if rotary.reference is not None:
        places = places / config.grid_size * rotary.reference
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy" if rotary.columns_first else "ij"), dim=-1)
    angles = (grid.flatten(0, 1).unsqueeze(-1) * bands).flatten(1).repeat_interleave(2, dim=1)
    if config.class_token:
        angles = torch.cat([torch.zeros_like(angles[:1]), angles])
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotate(x_bHLK: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return queries or keys turned by their angles, in their dtype. rotation: (L, 2 K) or (b, 1, L, 2 K)."""
    cos, sin = rotation.chunk(2, dim=-1)
    turned = torch.stack([-x_bHLK[..., 1::2], x_bHLK[..., ::2]], dim=-1).flatten(-2)
    return (x_bHLK * cos + turned * sin).to(x_bHLK.dtype)
