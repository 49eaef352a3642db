"""Compiled code keeps intermediate results in rows of their own length.

Otherwise a product on a GPU cannot add its bias in the same kernel. tests/gpu/test_compiled_open_clip_gpu.py looks for
the copies there.
"""

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.utils import run_and_get_code

from megaclip.models.compilation import compiled_class

pytestmark = pytest.mark.long

WIDTH, HIDDEN = 64, 1100
"""A row of 1,100 float32 numbers has 4,400 bytes, which torch.compile would round up to 4,480: 1,120 numbers."""


class Mlp(nn.Sequential):
    pass


def allocated(rows: int) -> tuple[bool, bool]:
    """Return whether the code of an MLP allocates hidden values in rows of their length, and in longer rows."""
    torch.compiler.reset()
    mlp = Mlp(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).train()
    mlp.__class__ = compiled_class(Mlp)
    _, codes = run_and_get_code(lambda: mlp(torch.randn(rows, WIDTH)).sum().backward())
    return tuple(any(f"({rows}, {HIDDEN}), ({stride}, 1)" in code for code in codes) for stride in (HIDDEN, 1120))


def test_hidden_values_are_not_padded() -> None:
    with inductor.patch(disable_padding_cpu=False, padding_stride_threshold=0):
        assert allocated(48) == (True, False)
