"""The kernel that resizes images of different sizes, under Triton's interpreter, against torch's kernel for the CPU.

The interpreter must be chosen before triton is imported, so this file is a program too, for a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaclip.data.images import resized_crop

CASES = [  # height, width, and left, top, width and height of the crop
    (40, 50, (3, 5, 35, 30)),
    (20, 30, (0, 0, 30, 20)),
    (37, 33, (1, 2, 3, 4)),
    (20, 20, (0, 0, 20, 20)),
    (9, 100, (20, 8, 80, 1)),
]
SIZE = 17


def test_crops_of_all_sizes_are_resized_as_by_torch():
    pytest.importorskip("triton")
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"}
    options = {"cwd": Path(__file__).parents[3], "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, __file__], **options, timeout=600)
    assert done.returncode == 0 and done.stdout == "compared 10\n", done.stdout + done.stderr


def compare(interpolation: str) -> int:
    """Compare the kernel with torch's for all cases. Return their number."""
    from megaclip.data.ragged_resize import crop_and_resize

    generator = torch.Generator().manual_seed(0)
    images, boxes = [], [box for *_, box in CASES]
    for height, width, _ in CASES:
        coarse = torch.rand(1, 3, 6, 6, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
        noise = torch.randn(3, height, width, generator=generator)
        images.append((255 * smooth + 20 * noise).clamp(0, 255).to(torch.uint8))
    found = crop_and_resize(images, boxes, SIZE, interpolation)
    for image, box, ours in zip(images, boxes, found, strict=True):
        difference = (ours.int() - resized_crop(image, box, SIZE, interpolation)).abs()
        assert difference.max() <= 1 and difference.float().mean() < 0.1, (box, difference.max())
    return len(found)


if __name__ == "__main__":
    sys.stdout.write(f"compared {sum(map(compare, ('bicubic', 'bilinear')))}\n")
