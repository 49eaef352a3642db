"""The kernel that resizes images of different sizes, under Triton's interpreter, against torch's kernel for the CPU.

The interpreter must be chosen before triton is imported, so this file runs a second time in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaclip.data.images import resized_crop

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            command, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    from megaclip.data.ragged_resize import crop_and_resize

    CASES = [  # height, width, and left, top, width and height of the crop
        (60, 75, (3, 5, 60, 50)),
        (20, 30, (0, 0, 30, 20)),
        (37, 33, (1, 2, 3, 4)),
        (20, 20, (0, 0, 20, 20)),
        (9, 300, (20, 8, 280, 1)),
    ]

    @pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
    def test_crops_of_all_sizes_are_resized_as_by_torch(interpolation):
        generator = torch.Generator().manual_seed(0)
        images, boxes = [], [box for *_, box in CASES]
        for height, width, _ in CASES:
            smooth = torch.nn.functional.interpolate(
                torch.rand(1, 3, 6, 6, generator=generator), (height, width), mode="bicubic"
            )[0]
            noise = torch.randn(3, height, width, generator=generator)
            images.append((255 * smooth + 20 * noise).clamp(0, 255).to(torch.uint8))
        found = crop_and_resize(images, boxes, 20, interpolation)
        for image, box, ours in zip(images, boxes, found, strict=True):
            difference = (ours.int() - resized_crop(image, box, 20, interpolation)).abs()
            assert difference.max() <= 1 and difference.float().mean() < 0.1
