"""Turn encoded images into pixels, and pixels into the model's input on any device.

Images are passed on as 8-bit pixels, which take a quarter of the bytes of float32, and are normalised on the model's
device. The evaluation transform equals open_clip's exactly (resize the shorter side, or squash; crop the centre;
normalise). Training takes a random crop and resizes it. The crop depends on (seed, epoch, id) only. A JPEG file that is
much larger than the target is decoded at 1/2, 1/4 or 1/8 of its size.

For training, simplejpeg decodes JPEG files and torch resizes 8-bit pixels, if the processor has AVX2. That
takes less than half of Pillow's time (docs/data.md). simplejpeg's pixels equal Pillow's, torch's differ by rounding.
Pillow opens and checks every file, and decodes what simplejpeg refuses: other formats, CMYK and damaged files. So both
ways find the same bad samples. Without AVX2 Pillow does everything, because it is then faster than torch.
With --image-decoder gpu, the transform only draws the crop of the files that the GPU decodes (gpu_decoder.py).

Image files are untrusted: only raster formats are opened, and their size is checked before decoding. As in open_clip,
the orientation in EXIF data is ignored, and transparency is dropped: the colours of transparent pixels remain. Unlike
in open_clip, 16-bit grey images are scaled to 8 bits, by the high byte; Pillow would clip them to white.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

from megaclip.data.batch import BadSample
from megaclip.errors import ConfigError, shortened

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_PIXELS = 64 << 20
"""Largest number of pixels of an image file, and of an image after resizing: 67,108,864, as in 8,192 x 8,192. Decoding
and resizing such a file takes about 0.5 GiB of a worker's memory and a few seconds."""
IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    *("avif", "jfif", "jpe", "apng", "ppm", "pgm", "pbm", "pnm"),
)
"""Extensions of images, lower-case, without a dot. The first one that a sample has is used."""
HEAD_BYTES = 16
"""Number of first bytes by which `image_kind` recognises a file."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM") + ("AVIF",) * bool(importlib.util.find_spec("PIL._avif"))
_READABLE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|....ftypavi[fs]", re.DOTALL)
_UNREADABLE = re.compile(
    rb"....ftyp(hei|hev|mif|msf|crx)|\xff\x0a|\0\0\0\x0c(JXL|jP) |8BPS|II[*+RU]\0|MM\0[*+]|<svg", re.DOTALL
)
"""First bytes of HEIF, JPEG XL, JPEG 2000, Photoshop, SVG and TIFF files. Raw files of cameras resemble TIFF files."""
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_RATIO = (3 / 4, 4 / 3)
LARGEST_ON_GPU = 4 << 20
"""Largest number of pixels of a file that a GPU decodes. The CPU decodes larger ones at a part of their size."""
RESIZED_BY_TORCH = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""True if torch resizes crops. Its kernel for 8-bit pixels requires AVX2."""
CPU_DECODER = f"{'Pillow' if simplejpeg is None else 'simplejpeg'} and torch" if RESIZED_BY_TORCH else "Pillow"
GPU_DECODER = "nvJPEG and Triton"
"""Libraries that decode JPEG files and resize crops in training: on this machine's CPU, and on a GPU."""


def normalised_pixels(
    pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return (pixels / largest - mean) / std in `dtype`, computed in float32. pixels: (b, 3, H, W) uint8."""
    return pixels.to(torch.float32).div_(largest).sub_(mean).div_(std).to(dtype)


class JpegCrop(NamedTuple):
    """A JPEG file that a GPU decodes, and the crop that it takes."""

    nbytes: int
    """Size of the file."""
    size: tuple[int, int]
    """Width and height of the image in pixels."""
    box: tuple[int, int, int, int]
    """Left, top, width and height of the crop in pixels."""


@dataclasses.dataclass(frozen=True)
class ImageTransform:
    """Turn an image file (bytes) into pixels (3, size, size) uint8; `normalise` turns these into the model's input.

    size: width and height in pixels.
    training: True takes a random resized crop. False resizes by `resize_mode`.
    mean, std: per channel, for pixel values in 0..1.
    scale: smallest and largest share of the image's area in a random crop.
    interpolation: "bicubic" or "bilinear".
    resize_mode: "shortest" resizes the shorter side and crops the centre; "squash" ignores the aspect ratio.
    """

    size: int
    training: bool = False
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    scale: tuple[float, float] = (0.9, 1.0)  # a run passes --aug-scale; other callers use this default
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if not isinstance(values, tuple) or len(values) != 3 or not all(map(_is_finite, values)):
                raise ConfigError(f"image {name} is {shortened(repr(values))}; use three numbers, one per channel")
        if min(self.std) <= 0:
            raise ConfigError(f"image std is {self.std!r}; use three numbers greater than 0, one per channel")
        for name, value, choices in (
            ("interpolation", self.interpolation, sorted(_RESAMPLING)),
            ("resize_mode", self.resize_mode, ["shortest", "squash"]),
        ):
            if value not in choices:  # a list: a value from a model card may have any type
                raise ConfigError(f"{name} is {shortened(repr(value))}; use one of {choices}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"the scale of the random crop is {self.scale}; use 0 < low <= high <= 1")

    def __call__(
        self, content: bytes, *, seeds: tuple[int, int, int] = (0, 0, 0), crop: np.ndarray | None = None
    ) -> torch.Tensor:
        """Decode and transform one image file. seeds: (seed, epoch, id), for the crop in training. Raises BadSample.

        crop: left, top, width and height as shares of the image's size, instead of a random crop.
        The pixels are a view of (size, size, 3) in memory, so that they are moved once, when the batch is filled.
        """
        pixels = self.prepare(content, seeds, gpu_bytes=0, crop=crop)
        assert isinstance(pixels, torch.Tensor)  # no file has 0 bytes
        return pixels

    def prepare(
        self, content: bytes, seeds: tuple[int, int, int], *, gpu_bytes: int, crop: np.ndarray | None = None
    ) -> torch.Tensor | JpegCrop:
        """Return the crop of a file that a GPU decodes, or else the pixels, as `__call__` does. Raises BadSample.

        gpu_bytes: size of the largest file that is left to the GPU.
        """
        try:
            image = eight_bit(open_image(content))
            if not self.training and crop is None:
                return self._resize_and_crop(image)
            box = random_box(image.size, self.scale, _generator(seeds)) if crop is None else box_of(image.size, crop)
            if len(content) <= gpu_bytes and _is_for_gpu(image, content):
                return JpegCrop(len(content), image.size, box)
            return self._crop(image, content, box)
        except BadSample:
            raise
        except Exception as error:  # Pillow's decoders raise exceptions of many types for damaged files
            raise BadSample("undecodable image", f"{type(error).__name__}: {error}") from error

    def normalise(
        self,
        pixels: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        compute: Callable[..., torch.Tensor] = normalised_pixels,
    ) -> torch.Tensor:
        """Turn pixels (b, 3, H, W) uint8 into the model's input on the same device: computed in float32, then cast.

        compute: `normalised_pixels`, or that function compiled.
        """
        return compute(pixels, *_constants(self.mean, self.std, pixels.device), dtype)

    def _crop(self, image: Image.Image, content: bytes, box: tuple[int, int, int, int]) -> torch.Tensor:
        full, (left, top, width, height) = image.size, box
        # Draft mode decodes JPEG at 1/2, 1/4 or 1/8 of the size, here never below the size that the crop needs.
        image.draft("RGB", (math.ceil(self.size * full[0] / width), math.ceil(self.size * full[1] / height)))
        x, y = image.width / full[0], image.height / full[1]
        left, top, right, bottom = round(left * x), round(top * y), round((left + width) * x), round((top + height) * y)
        right, bottom = max(right, left + 1), max(bottom, top + 1)
        if RESIZED_BY_TORCH:
            crop = (left, top, right - left, bottom - top)
            return resized_crop(_pixels(_decoded(image, content)), crop, self.size, self.interpolation)
        size, corners = (self.size, self.size), (left, top, right, bottom)
        return _pixels(image.convert("RGB").crop(corners).resize(size, _RESAMPLING[self.interpolation]))

    def _resize_and_crop(self, image: Image.Image) -> torch.Tensor:
        # As open_clip: resize first, then convert to RGB. The order matters for images with a palette.
        width, height = image.size
        filter_ = _RESAMPLING[self.interpolation]
        if self.resize_mode == "squash":
            return _pixels(image.resize((self.size, self.size), filter_).convert("RGB"))
        short = min(width, height)
        # As torchvision: the longer side is rounded down, and the crop's corner is rounded half to even.
        new = (int(self.size * width / short), int(self.size * height / short))
        if new != (width, height):
            _check_pixels(*new, f"{width} x {height} pixels, resized to ")
            image = image.resize(new, filter_)
        left, top = round((new[0] - self.size) / 2), round((new[1] - self.size) / 2)
        return _pixels(image.crop((left, top, left + self.size, top + self.size)).convert("RGB"))


def resized_crop(pixels: torch.Tensor, box: tuple[int, int, int, int], size: int, interpolation: str) -> torch.Tensor:
    """Return a crop of pixels (3, H, W) uint8 on the CPU, resized with antialiasing. box: left, top, width, height."""
    left, top, width, height = box
    crop = pixels[None, :, top : top + height, left : left + width]
    crop = crop.contiguous(memory_format=torch.channels_last)  # a copy of whole rows is faster than a view
    return torch.nn.functional.interpolate(crop, (size, size), mode=interpolation, antialias=True)[0]


def _is_for_gpu(image: Image.Image, content: bytes) -> bool:
    """Return whether a GPU decodes an opened image: baseline JPEG, grey or YCbCr, that is not cut off."""
    if not isinstance(image, JpegImageFile) or image.format != "JPEG" or "progressive" in image.info:
        return False
    # nvJPEG takes RGB for YCbCr. libjpeg recognises it by Adobe's marker or the numbers of the components.
    is_ycc = image.info.get("adobe_transform", 1) == 1 and [number for number, *_ in image.layer] == [1, 2, 3]
    return (
        (is_ycc or image.mode == "L")
        and all(table in image.quantization for *_, table in image.layer)
        and image.width * image.height <= LARGEST_ON_GPU
        and content.endswith(b"\xff\xd9")  # the CPU finds out whether another file can be used
    )


def _pixels(image: Image.Image | np.ndarray) -> torch.Tensor:
    """Return the pixels (3, H, W) uint8 of an RGB image, as a view of (H, W, 3)."""
    return torch.from_numpy(image if isinstance(image, np.ndarray) else np.array(image)).permute(2, 0, 1)


def _decoded(image: Image.Image, content: bytes) -> Image.Image | np.ndarray:
    """Decode an opened image to RGB: with simplejpeg if it can and finds no fault in the file, else with Pillow."""
    if simplejpeg is not None and image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        height, width = image.height, image.width  # the scaled size, if it is decoded at a part of its size
        try:
            if simplejpeg.decode_jpeg_header(content, height, width)[:2] == (height, width):
                return simplejpeg.decode_jpeg(content, min_height=height, min_width=width)
        except ValueError:  # Pillow decides whether the file can be used
            pass
    return image.convert("RGB")


def _is_finite(value: Any) -> bool:
    """Return True for a finite number. Values of a model card may have any type."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


@functools.lru_cache(maxsize=8)
def _constants(
    mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return mean and standard deviation per channel and the largest pixel value, to broadcast over (b, 3, H, W).

    They are tensors on the device, not numbers: CUDA divides by a number by multiplying with its reciprocal, and the
    last bit would differ from torchvision's.
    """
    channels = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
    return *channels, torch.full((1,), 255.0, device=device)


def is_image_name(name: str) -> bool:
    """Return whether a file name has the extension of an image and is not hidden."""
    return os.path.splitext(name)[1].lower().removeprefix(".") in IMAGE_EXTENSIONS and not name.startswith(".")


def image_kind(head: bytes) -> str:
    """Return "readable", "unreadable" or "no image" for the first HEAD_BYTES of a file with an unknown extension."""
    return "readable" if _READABLE.match(head) else "unreadable" if _UNREADABLE.match(head) else "no image"


def open_image(content: bytes) -> Image.Image:
    """Open an image file without decoding it. Raises BadSample if its format is unknown or its size is too large."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:  # Pillow's message contains only the address of a buffer
        begins = f"it begins with {content[:15]!r}, and is not a file of"
        raise BadSample("undecodable image", f"{begins} {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit, 179 megapixels
        raise BadSample("image too large", f"{error}; expected at most {MAX_PIXELS:,}") from error
    _check_pixels(image.width, image.height)
    return image


def _check_pixels(width: int, height: int, origin: str = "") -> None:
    if width * height > MAX_PIXELS:
        raise BadSample("image too large", f"{origin}{width} x {height} pixels; expected at most {MAX_PIXELS:,}")


def eight_bit(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits per channel. 16-bit grey is scaled by its high byte, as Pillow scales 16-bit colour.

    Raises BadSample for 32-bit integers and floating-point numbers, whose range of values is not known.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        found = f"{image.format} of {'32-bit integers' if image.mode == 'I' else 'floating-point numbers'}"
        raise BadSample("unsupported pixel format", f"{found}; expected 8 or 16 bits per channel")
    return image


def _generator(seeds: tuple[int, int, int]) -> np.random.Generator:
    """Return the generator for (seed, epoch, id).

    The three numbers are its key. Hashing them to a seed would take a third of the time of a small image.
    """
    seed, epoch, sample_id = seeds
    return np.random.Generator(np.random.Philox(key=(seed % 2**32) << 96 | (epoch % 2**32) << 64 | sample_id))


def box_of(size: tuple[int, int], crop: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, top, width and height in pixels of a stored crop. Raises BadSample if it is not in the image."""
    shares = [float(share) for share in crop]
    left, top, width, height = (round(share * side) for share, side in zip(shares, (*size, *size), strict=True))
    if min(shares) < 0 or min(width, height) < 1 or left + width > size[0] + 1 or top + height > size[1] + 1:
        raise BadSample("crop outside of the image", f"{shares} of {size[0]} x {size[1]} pixels")
    return left, top, min(width, size[0] - left), min(height, size[1] - top)


def random_box(
    size: tuple[int, int], scale: tuple[float, float], generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random crop: share of the area in `scale`, aspect ratio 3/4 to 4/3.

    The distribution is that of torchvision's RandomResizedCrop: ten tries, then the centre with the nearest allowed
    aspect ratio.
    """
    full_width, full_height = size
    for _ in range(10):
        share, shape, x, y = generator.random(4).tolist()  # one call: each takes microseconds
        area = full_width * full_height * (scale[0] + share * (scale[1] - scale[0]))
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** shape
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= full_width and 0 < height <= full_height:
            return int(x * (full_width - width + 1)), int(y * (full_height - height + 1)), width, height
    ratio = min(max(full_width / full_height, _RATIO[0]), _RATIO[1])
    width, height = min(full_width, round(full_height * ratio)), min(full_height, round(full_width / ratio))
    return (full_width - width) // 2, (full_height - height) // 2, width, height
