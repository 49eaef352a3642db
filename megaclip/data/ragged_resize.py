"""Triton kernel that crops and resizes images of different sizes with antialiasing, in two launches for all images.

Each launch resizes one axis: first the rows of every crop, then the columns of the result. A program computes a tile of
some lines of one image. Its weights are those of torch's and Pillow's antialiased filters. They are computed for each
tap, because a line of the tile has few of them, and normalised by their sum over the pixels inside the crop.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

Box = tuple[int, int, int, int]
_LINES, _OUTPUTS = 32, 32  # of the tile of one program
_FIELDS = 7  # of a row of the table


@triton.jit
def _resize_axis_kernel(
    table_ptr,  # in: (n, 7) int64: address, height and width of an image; left, top, width and height of its crop
    offsets_ptr,  # in: (n,) int64: where the image begins in `middle`
    middle_ptr,  # out of the first launch, in of the second: crops of (3, height, SIZE) uint8, one after another
    out_ptr,  # out of the second launch: (n, 3, SIZE, SIZE) uint8
    SIZE: tl.constexpr,
    RADIUS: tl.constexpr,  # of the filter: 2 for bicubic, 1 for bilinear
    VERTICAL: tl.constexpr,  # False: first launch, each line is a row of the crop. True: second launch, a column.
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Resize the lines of each image to SIZE pixels."""
    image = tl.program_id(0).to(tl.int64)
    row = table_ptr + image * 7
    full_height, full_width = tl.load(row + 1), tl.load(row + 2)
    left, top, width, height = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    begin = middle_ptr + tl.load(offsets_ptr + image)
    count = 3 * SIZE if VERTICAL else 3 * height
    length = (height if VERTICAL else width).to(tl.int32)
    first = tl.program_id(1) * LINES
    if first < count:
        # Neighbouring threads read neighbouring pixels: the last dimension of a tile lies along the rows.
        if VERTICAL:
            line = (first + tl.arange(0, LINES))[None, :].to(tl.int64)
            output = (tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
            source = begin + (line // SIZE) * height * SIZE + line % SIZE
            target = out_ptr + (image * 3 + line // SIZE) * SIZE * SIZE + output * SIZE + line % SIZE
            step = SIZE
        else:
            line = (first + tl.arange(0, LINES))[:, None].to(tl.int64)
            output = (tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
            pixels = tl.load(row).to(tl.pointer_type(tl.uint8))
            source = pixels + ((line // height) * full_height + top + line % height) * full_width + left
            target = begin + line * SIZE + output
            step = 1
        scale = length.to(tl.float32) / SIZE
        spread = tl.maximum(scale, 1.0)
        centre = (output.to(tl.float32) + 0.5) * scale
        start = tl.maximum((centre - RADIUS * spread + 0.5).to(tl.int32), 0)
        end = tl.minimum((centre + RADIUS * spread + 0.5).to(tl.int32), length)
        inside = (line < count) & (output < SIZE)
        total = tl.zeros_like(centre)
        result = tl.zeros((OUTPUTS, LINES) if VERTICAL else (LINES, OUTPUTS), tl.float32)
        for tap in range(0, (2 * RADIUS * spread).to(tl.int32) + 2):
            position = start + tap
            distance = tl.abs((position.to(tl.float32) - centre + 0.5) / spread)
            if RADIUS == 2:
                near = (1.5 * distance - 2.5) * distance * distance + 1.0
                far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
                weight = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
            else:
                weight = tl.maximum(1.0 - distance, 0.0)
            weight = tl.where(position < end, weight, 0.0)
            pixel = tl.load(source + position * step, mask=inside & (position < end), other=0)
            result += weight * pixel.to(tl.float32)
            total += weight
        result = tl.minimum(tl.maximum(result / total + 0.5, 0.0), 255.0)
        tl.store(target, result.to(tl.uint8), mask=inside)


def crop_and_resize(images: list[Tensor], boxes: list[Box], size: int, interpolation: str) -> Tensor:
    """Return the crops of n images, resized with antialiasing to (n, 3, size, size) uint8.

    As in torch's kernel for the CPU (`images.resized_crop`), rows are resized first and rounded to 8 bits. The results
    differ by at most 2, because that kernel rounds its weights.

    images: (3, H, W) uint8 each, contiguous, on one device. boxes: left, top, width and height of each crop.
    interpolation: "bicubic" or "bilinear".
    """
    device, heights = images[0].device, [height for *_, height in boxes]
    rows = [(image.data_ptr(), *image.shape[1:], *box) for image, box in zip(images, boxes, strict=True)]
    ends = torch.tensor([3 * height * size for height in heights]).cumsum(0)
    table = torch.cat([torch.tensor(rows).flatten(), torch.zeros(1, dtype=torch.int64), ends[:-1]])
    table = table.to(device)
    middle = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
    out = torch.empty((len(images), 3, size, size), dtype=torch.uint8, device=device)
    radius = 2 if interpolation == "bicubic" else 1
    for vertical, lines in ((False, 3 * max(heights)), (True, 3 * size)):
        grid = (len(images), triton.cdiv(lines, _LINES), triton.cdiv(size, _OUTPUTS))
        _resize_axis_kernel[grid](
            table, table[_FIELDS * len(images) :], middle, out, size, radius, vertical, _LINES, _OUTPUTS
        )
    return out
