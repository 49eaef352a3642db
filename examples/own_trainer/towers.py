"""A model and data for the examples."""

import torch
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 16


class Towers(torch.nn.Module):
    """Return image features (b, D), text features (b, D), both of unit length, and the exponentiated logit scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = torch.nn.Linear(192, 32), torch.nn.Linear(24, 32)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.66))

    def forward(self, images, texts):
        return normalize(self.image(images), dim=-1), normalize(self.text(texts), dim=-1), self.logit_scale.exp()


def pairs():
    """Return 64 images and texts."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 192, generator=generator), torch.randn(64, 24, generator=generator))
