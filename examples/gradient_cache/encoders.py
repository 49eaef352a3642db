"""A model with two encoders and a trained scale, and data, for the scripts of this folder."""

import torch
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 16


class Encoders(torch.nn.Module):
    """Encode images or texts, (n, ...) -> (n, 32) of unit length, or return the exponentiated scale.

    One forward method chooses what to compute, because DDP, FSDP2 and DeepSpeed act in the forward method.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = torch.nn.Linear(192, 32), torch.nn.Linear(24, 32)
        self.log_scale = torch.nn.Parameter(torch.tensor([2.66]))  # (1,): DeepSpeed cannot use 0-dim parameters

    def forward(self, images=None, texts=None):
        if images is not None:
            return normalize(self.image(images), dim=-1)
        if texts is not None:
            return normalize(self.text(texts), dim=-1)
        return self.log_scale.exp()


def pairs():
    """Return 64 images and texts."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 192, generator=generator), torch.randn(64, 24, generator=generator))
