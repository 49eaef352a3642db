"""Compiled code keeps intermediate results in rows of their own length, if it is a multiple of 16 bytes.

With another row length, a matrix product on a GPU cannot add its bias in the same kernel.
tests/gpu/test_compiled_open_clip_gpu.py searches for the copies that this causes.
"""

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.utils import run_and_get_code

from megaclip.models.compilation import compiled_class

pytestmark = pytest.mark.long

WIDTH = 64


class Mlp(nn.Sequential):
    pass


def allocated(rows: int, hidden: int, stride: int) -> bool:
    """Return whether the code of an MLP allocates hidden values in rows of `stride` float32 numbers."""
    torch.compiler.reset()
    mlp = Mlp(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)).train()
    mlp.__class__ = compiled_class(Mlp)
    _, codes = run_and_get_code(lambda: mlp(torch.randn(rows, WIDTH)).sum().backward())
    return any(f"({rows}, {hidden}), ({stride}, 1)" in code for code in codes)


@pytest.mark.parametrize(("hidden", "stride"), [(1100, 1100), (1101, 1104)])
def test_rows_are_rounded_up_to_16_bytes(hidden: int, stride: int) -> None:
    """With torch.compile's default, both row lengths would be rounded up to 128 bytes: 1,120 numbers."""
    with inductor.patch(disable_padding_cpu=False, padding_stride_threshold=0):
        assert allocated(48, hidden, stride)
