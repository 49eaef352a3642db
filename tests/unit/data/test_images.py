"""Images: evaluation equals open_clip's transform, crops have torchvision's distribution, unsafe files are errors."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from megaclip.data import OPENAI_MEAN, OPENAI_STD, ImageTransform
from megaclip.data import images as images_module
from megaclip.data.batch import BadSample
from megaclip.data.images import random_box
from megaclip.errors import ConfigError
from megaclip.open_clip_package import import_open_clip
from tests.tolerances import WRITTEN, assert_close
from tests.unit.data.data_samples import picture

SIZES = [(24, 24), (31, 57), (57, 31), (224, 100), (9, 9), (5, 40), (300, 301)]


def smooth(width, height, kind="JPEG"):
    """Return an image with low frequencies only, as in a photograph, so that resampling does not magnify rounding."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = [127 + 120 * np.sin(x / width * 5 + c) * np.cos(y / height * 4 - c) for c in range(3)]
    buffer = io.BytesIO()
    Image.fromarray(np.stack(pixels, -1).astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def model_input(transform, content, **seeds):
    """Return the input of the image tower (3, H, W) float32 for an image file."""
    pixels = transform(content, **seeds)
    assert pixels.dtype == torch.uint8
    return transform.normalise(pixels[None])[0]


@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_the_evaluation_transform_equals_open_clips_bit_for_bit(resize_mode, interpolation):
    open_clip = import_open_clip()
    for size in (24, 33):
        theirs = open_clip.image_transform(
            size, is_train=False, resize_mode=resize_mode, interpolation=interpolation, mean=OPENAI_MEAN, std=OPENAI_STD
        )
        ours = ImageTransform(size, resize_mode=resize_mode, interpolation=interpolation)
        for width, height in SIZES:
            for content in (smooth(width, height), picture(1, width, height)):
                assert torch.equal(model_input(ours, content), theirs(Image.open(io.BytesIO(content))))


def rotated():
    """Return a JPEG file with an orientation in its EXIF data."""
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.open(io.BytesIO(smooth(40, 30))).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def transparent(mode):
    """Return a PNG file whose upper half is transparent, and the same file without transparency."""
    pixels, files = np.random.default_rng(0).integers(0, 256, (20, 30, len(mode)), dtype=np.uint8), []
    pixels[:10, :, -1] = 0
    for image in (Image.fromarray(pixels, mode), Image.fromarray(pixels[..., :-1].squeeze())):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


def test_other_colour_modes_transparency_and_orientation_are_treated_as_in_open_clip():
    """The colours under transparent pixels show; they are not blended with a background."""
    theirs = import_open_clip().image_transform(16, is_train=False)
    kinds = [("PNG", "L"), ("PNG", "P"), ("PNG", "1"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")]
    pairs = list(map(transparent, ("RGBA", "LA")))
    for content in [*(picture(3, 30, 20, *kind) for kind in kinds), rotated(), *(first for first, _ in pairs)]:
        assert torch.equal(model_input(ImageTransform(16), content), theirs(Image.open(io.BytesIO(content))))
    for first, opaque in pairs:
        assert torch.equal(
            *(ImageTransform(20, training=True)(content, seeds=(0, 0, 1)) for content in (first, opaque))
        )


def test_mean_and_standard_deviation_are_applied():
    content = smooth(8, 8, "PNG")
    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(content))).copy()).permute(2, 0, 1) / 255
    scaled = model_input(ImageTransform(8, mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 2.0)), content)
    expected = (pixels - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor([0.5, 0.5, 2.0])[:, None, None]
    assert_close(scaled, expected, WRITTEN)
    for wrong in ({"interpolation": "nearest"}, {"resize_mode": "longest"}, {"scale": (0.0, 1.0)}):
        with pytest.raises(ConfigError):
            ImageTransform(16, **wrong)


def test_the_crop_depends_on_seed_epoch_and_id_only():
    transform, content = ImageTransform(16, training=True, scale=(0.5, 0.9)), smooth(50, 40)
    base = transform(content, seeds=(1, 2, 3))
    assert torch.equal(base, transform(content, seeds=(1, 2, 3)))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(base, transform(content, seeds=other))


def test_crops_have_torchvisions_distribution():
    import_open_clip()
    from torchvision.transforms import RandomResizedCrop

    generator, image = np.random.default_rng(0), torch.zeros(3, 40, 60)
    ours = np.array([random_box((60, 40), (0.2, 0.9), generator) for _ in range(2000)], dtype=float)
    torch.manual_seed(0)
    theirs = [RandomResizedCrop.get_params(image, [0.2, 0.9], [3 / 4, 4 / 3]) for _ in range(2000)]
    expected = np.array([(left, top, width, height) for top, left, height, width in theirs], dtype=float)
    error = (ours.mean(0) - expected.mean(0)) / (expected.std(0) / np.sqrt(1000))
    assert (abs(error) < 4).all(), error
    assert (ours[:, 0] + ours[:, 2] <= 60).all() and (ours[:, 1] + ours[:, 3] <= 40).all()
    # images of extreme shape get a crop at the centre
    assert random_box((1000, 10), (0.9, 1.0), generator) == ((1000 - 13) // 2, 0, 13, 10)
    assert random_box((10, 1000), (0.9, 1.0), generator) == (0, (1000 - 13) // 2, 10, 13)


def test_draft_decoding_keeps_the_size_that_the_crop_needs():
    """The image must be decoded at full size, because the crop is less than twice the target.

    In noise, pixels that are lost by decoding at a smaller size are visible.
    """
    content = picture(5, 70, 70, "JPEG")
    left, top, width, height = random_box((70, 70), (0.5, 0.6), images_module._generator((0, 0, 1)))
    assert max(width, height) < 64
    whole = Image.open(io.BytesIO(content)).crop((left, top, left + width, top + height))
    buffer = io.BytesIO()
    whole.resize((32, 32), Image.BICUBIC).save(buffer, "PNG")
    expected = model_input(ImageTransform(32), buffer.getvalue())
    got = model_input(ImageTransform(32, training=True, scale=(0.5, 0.6)), content, seeds=(0, 0, 1))
    assert (got - expected).abs().mean() < 0.1  # 0.3 if decoded at half the size


@pytest.mark.parametrize("training", [False, True])
def test_files_that_cannot_be_decoded_are_bad_samples(training):
    transform = ImageTransform(16, training=training)
    jpeg, pcx = smooth(64, 64), smooth(20, 20, "PCX")  # Pillow would open it
    for content in (b"", b"text", jpeg[: len(jpeg) // 2], b"%!PS-Adobe EPSF-3.0\n", pcx, picture(0)[:40] + b"\0" * 40):
        with pytest.raises(BadSample) as caught:
            transform(content)
        assert caught.value.kind == "undecodable image"
        assert " object at 0x" not in caught.value.detail


# ------------------------------------------------------------------------------------------------ decoders


def photograph(width, height, kind="JPEG", mode="RGB", **options):
    """Return an image with coarse and fine content, as in a photograph."""
    generator = np.random.default_rng(width)
    pixels = np.zeros((height, width, 3))
    for cell in (2, 8, 32):
        coarse = generator.integers(0, 256, (height // cell + 2, width // cell + 2, 3), dtype=np.uint8)
        pixels += np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC), float) * cell / 42
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


JPEGS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "grey": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
    "restarts": {"restart_marker_blocks": 3},
}


@pytest.fixture
def crop_of(monkeypatch):
    """Return the function that crops a file: with Pillow alone, or with torch and, if `fast`, with simplejpeg."""

    def crop(content, size=64, *, torch_resizes=True, fast=True, interpolation="bicubic"):
        with monkeypatch.context() as patch:
            patch.setattr(images_module, "RESIZED_BY_TORCH", torch_resizes)
            if not fast:
                patch.setattr(images_module, "simplejpeg", None)
            transform = ImageTransform(size, training=True, scale=(0.5, 1.0), interpolation=interpolation)
            try:
                return transform(content, seeds=(0, 1, 2))
            except BadSample as bad:
                return bad.kind, bad.detail

    return crop


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("size", [(60, 40), (101, 111), (250, 170), (500, 300)])
def test_simplejpeg_gives_the_pixels_of_pillow(crop_of, size, options):
    """The sizes are decoded at 1, 1/2, 1/4 and 1/8."""
    pytest.importorskip("simplejpeg")
    content = photograph(*size, **options)
    by_simplejpeg = isinstance(images_module._decoded(images_module.open_image(content), content), np.ndarray)
    assert by_simplejpeg == (options.get("mode") != "CMYK")
    assert torch.equal(crop_of(content, 24), crop_of(content, 24, fast=False))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "P"), ("WEBP", "RGBA")])
def test_torch_and_pillow_resize_alike(crop_of, kind, mode, interpolation):
    for size in ((90, 70), (333, 222)):
        content = photograph(*size, kind, mode)
        ours, oracle = (
            crop_of(content, torch_resizes=by_torch, interpolation=interpolation).int() for by_torch in (True, False)
        )
        difference = (ours - oracle).abs()
        assert difference.max() <= 2 and difference.float().mean() < 0.02  # of 255


def test_damaged_files_are_found_as_by_pillow(crop_of):
    """A file is cut off, or a byte of its header or its data is changed: the same pixels or the same error."""
    generator = np.random.default_rng(0)
    found = {tuple: 0, torch.Tensor: 0}
    for options in JPEGS.values():
        whole = photograph(70, 50, **options)
        for change in range(30):
            content, place = bytearray(whole), int(generator.integers(3, len(whole) if change % 2 else 600))
            content[place] = generator.integers(256)
            content = bytes(content[:place] if change % 3 == 0 else content)
            ours, oracle = crop_of(content, 32), crop_of(content, 32, fast=False)
            assert type(ours) is type(oracle)
            assert torch.equal(ours, oracle) if isinstance(ours, torch.Tensor) else ours == oracle
            found[type(ours)] += 1
    assert min(found.values()) > 25


# ------------------------------------------------------------------------------------------------ hostile, unusual


def png(width, height, bit_depth, colour_type, rows=None):
    """Return a PNG made by hand: Pillow cannot write 16-bit colour. rows: raw bytes of each row; default zeros."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    if rows is None:
        channels = {0: 1, 2: 3, 6: 4}[colour_type]
        rows = [bytes(-(-width * channels * bit_depth // 8))] * height
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    packed = zlib.compressobj(9)
    content = b"".join(packed.compress(b"\0" + row) for row in rows) + packed.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (8200, 8200),  # just above the limit
        (11400, 11400),  # 130 megapixels in a small file, 1 GiB and 10 s to decode
        (60000, 60000),  # Pillow itself refuses it as a decompression bomb
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_images_of_too_many_pixels_are_refused_before_they_are_decoded(width, height, training, monkeypatch):
    content = png(width, height, 1, 0, rows=[b""])  # the header is checked; nothing is decoded
    monkeypatch.setattr(PngImageFile, "load", lambda *_: pytest.fail("the image was decoded"))
    with pytest.raises(BadSample, match=r"pixels.*; expected at most 67,108,864") as caught:
        ImageTransform(24, training=training)(content)
    assert caught.value.kind == "image too large"


def test_a_long_thin_image_is_not_enlarged_to_gigabytes():
    """open_clip resizes the shorter side to the target: 1 x 60,000 pixels become 224 x 13,440,000."""
    content = png(60000, 1, 8, 0)
    with pytest.raises(BadSample, match=r"60000 x 1 pixels, resized to 13440000 x 224 pixels") as caught:
        ImageTransform(224)(content)
    assert caught.value.kind == "image too large"
    for transform in (ImageTransform(224, training=True), ImageTransform(224, resize_mode="squash")):
        assert transform(content).shape == (3, 224, 224)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_images_equal_the_same_image_in_16_bit_colour(kind, training):
    """Pillow reads 16-bit colour PNGs correctly, by the high byte, but clips 16-bit grey to white."""
    grey = np.linspace(0, 65535, 30 * 20).astype(np.uint16).reshape(20, 30)
    colour = png(30, 20, 16, 2, [np.repeat(row, 3).astype(">u2").tobytes() for row in grey])
    buffer = io.BytesIO()
    Image.fromarray(grey).save(buffer, kind)
    transform = ImageTransform(16, training=training)
    theirs = import_open_clip().image_transform(16, is_train=False)(Image.open(io.BytesIO(colour)))
    if not training:
        assert torch.equal(model_input(transform, colour), theirs)
    assert torch.equal(transform(buffer.getvalue()), transform(colour))
    assert 120 < transform(colour).float().mean() < 135


@pytest.mark.parametrize("pixels", [np.full((8, 8), 0.5, np.float32), np.full((8, 8), 70000, np.int32)])
def test_images_without_a_known_range_of_values_are_bad_samples(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "TIFF")
    for training in (True, False):
        with pytest.raises(BadSample, match=r"unsupported pixel format: .*8 or 16 bits per channel"):
            ImageTransform(16, training=training)(buffer.getvalue())
