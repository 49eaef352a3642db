"""Decode JPEG files on the GPU, and crop and resize them there, for the rank's thread that takes batches from workers.

torchvision calls nvJPEG, which uses the JPEG engines of the chip if it has some. One Triton kernel resizes the crops of
all images (ragged_resize.py). Both run on their own stream beside the training step, and the pixels are copied into the
batch in host memory. So a step's images are kept and read again as with any other decoder.

Workers leave only baseline JPEG files to the GPU (`ImageTransform.prepare`). A file that it refuses is decoded again
by the CPU, which decides whether the sample is bad.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from PIL import Image
from torch import Tensor

from megaclip.data.images import JpegCrop, resized_crop
from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger

GROUP_BYTES = 128 << 20
"""Bytes of decoded pixels that are on the GPU at a time. One image may have more."""
GROUP_FILES = 256
"""Number of files that are decoded at a time."""

_logger = get_logger(__name__)

Decode = Callable[[list[Tensor]], list[Tensor]]
"""Decode files, (_,) uint8 in host memory, to pixels (3, H, W) uint8 each. Raises RuntimeError for any bad file."""


class GpuDecoder:
    """Replace the JPEG files in a batch by their pixels.

    device: of the pixels while they are resized. decode: decodes to this device. interpolation: of the transform.
    """

    def __init__(self, device: torch.device, interpolation: str, decode: Decode) -> None:
        self._device, self._interpolation, self._decode = device, interpolation, decode
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_refused = False

    def __call__(self, images: Tensor, files: list[tuple[int, JpegCrop]]) -> list[int]:
        """Write the pixels of files into the rows that contain them. Return the rows that the GPU refuses.

        images: (m, 3, S, S) uint8 in host memory. files: row and crop of each of them, in the order of the rows. Raises
        torch.OutOfMemoryError.
        """
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return [row for group in _groups(files) for row in self._decode_group(images, group)]

    def _decode_group(self, images: Tensor, files: list[tuple[int, JpegCrop]]) -> list[int]:
        try:
            pixels = self._decode([images[row].view(-1)[: crop.nbytes] for row, crop in files])
            for image, (_, crop) in zip(pixels, files, strict=True):
                if image.shape != (3, *crop.size[::-1]):
                    raise RuntimeError(f"shape {tuple(image.shape)} of an image of {crop.size}")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._stream is not None:
                torch.cuda.synchronize(self._device)  # the decoder may still write into memory that is freed now
            if len(files) > 1:
                middle = len(files) // 2
                return self._decode_group(images, files[:middle]) + self._decode_group(images, files[middle:])
            if not self._has_refused:
                self._has_refused = True
                _logger.warning("the GPU refuses a JPEG file, and the CPU decodes it: %s", first_line(error))
            return [files[0][0]]
        boxes, size = [crop.box for _, crop in files], images.shape[-1]
        if self._stream is None:
            crops = [resized_crop(*pair, size, self._interpolation) for pair in zip(pixels, boxes, strict=True)]
            resized = torch.stack(crops)
        else:
            from megaclip.data.ragged_resize import crop_and_resize  # imports triton

            resized = crop_and_resize([image.contiguous() for image in pixels], boxes, size, self._interpolation)
        for (row, _), image in zip(files, resized, strict=True):
            images[row].copy_(image, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return []


def _groups(files: list[tuple[int, JpegCrop]]) -> Iterator[list[tuple[int, JpegCrop]]]:
    """Yield the files in groups of at most GROUP_FILES files and GROUP_BYTES of pixels, or of one file."""
    group, total = list[tuple[int, JpegCrop]](), 0
    for row, crop in files:
        nbytes = 3 * crop.size[0] * crop.size[1]
        if group and (len(group) == GROUP_FILES or total + nbytes > GROUP_BYTES):
            yield group
            group, total = [], 0
        group.append((row, crop))
        total += nbytes
    if group:
        yield group


def open_gpu_decoder(device: torch.device, interpolation: str) -> GpuDecoder:
    """Return a decoder on this GPU, after it has decoded a small file. Raises ConfigError if it cannot."""
    try:
        if device.type != "cuda":
            raise RuntimeError(f"the run is on a {device.type} device")
        from torchvision.io import ImageReadMode, decode_jpeg

        def decode(files: list[Tensor]) -> list[Tensor]:
            return decode_jpeg(files, ImageReadMode.RGB, device=device)

        content = io.BytesIO()
        Image.new("RGB", (16, 16)).save(content, "jpeg")
        decode([torch.frombuffer(content.getbuffer(), dtype=torch.uint8)])
    except (ImportError, RuntimeError, AttributeError) as problem:
        raise ConfigError(
            f"--image-decoder gpu requires a CUDA GPU and a torchvision that decodes JPEG files on it "
            f"({type(problem).__name__}: {first_line(problem)}); install the torchvision of this torch and CUDA, or "
            "use --image-decoder cpu"
        ) from None
    return GpuDecoder(device, interpolation, decode)
