"""Images: evaluation equals open_clip's transform, crops have torchvision's distribution, unsafe files are errors."""

import io

import numpy as np
import pytest
import torch
from data_samples import picture
from PIL import Image

from megaclip.data import OPENAI_MEAN, OPENAI_STD, ImageTransform
from megaclip.data import images as images_module
from megaclip.data.batch import BadSample
from megaclip.data.images import random_box
from megaclip.errors import ConfigError
from megaclip.open_clip_package import import_open_clip
from tests.tolerances import WRITTEN, assert_close

SIZES = [(24, 24), (31, 57), (57, 31), (224, 100), (9, 9), (5, 40), (300, 301)]


def smooth(width, height, kind="JPEG", mode="RGB"):
    """Return an image with low frequencies only, as in a photograph, so that resampling is well conditioned."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = [127 + 120 * np.sin(x / width * 5 + c) * np.cos(y / height * 4 - c) for c in range(3)]
    buffer = io.BytesIO()
    Image.fromarray(np.stack(pixels, -1).astype(np.uint8)).convert(mode).save(buffer, kind)
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


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "L"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")],
)
def test_other_colour_modes_are_converted_as_in_open_clip(kind, mode):
    theirs = import_open_clip().image_transform(16, is_train=False)
    content = picture(3, 30, 20, kind, mode)
    assert torch.equal(model_input(ImageTransform(16), content), theirs(Image.open(io.BytesIO(content))))


def test_mean_and_standard_deviation_are_applied():
    content = smooth(8, 8, "PNG")
    plain = model_input(ImageTransform(8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)), content)
    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(content))).copy()).permute(2, 0, 1) / 255
    assert_close(plain, pixels, WRITTEN)
    scaled = model_input(ImageTransform(8, mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 2.0)), content)
    expected = (pixels - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor([0.5, 0.5, 2.0])[:, None, None]
    assert_close(scaled, expected, WRITTEN)


def test_the_training_crop_shows_the_region_of_its_box():
    """The reference crops the same box with Pillow and resizes it. JPEG draft decoding causes small differences."""
    for width, height, kind in [(60, 40, "PNG"), (500, 300, "JPEG"), (40, 60, "JPEG")]:
        content = smooth(width, height, kind)
        transform = ImageTransform(32, training=True, scale=(0.3, 0.6))
        box = random_box((width, height), (0.3, 0.6), images_module._generator((1, 2, 3)))
        left, top, w, h = box
        cropped = Image.open(io.BytesIO(content)).crop((left, top, left + w, top + h)).resize((32, 32), Image.BICUBIC)
        buffer = io.BytesIO()
        cropped.save(buffer, "PNG")
        expected = model_input(ImageTransform(32, resize_mode="squash"), buffer.getvalue())
        assert (model_input(transform, content, seeds=(1, 2, 3)) - expected).abs().max() < 0.12  # of a range of about 4


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
    ours = np.array([random_box((60, 40), (0.2, 0.9), generator) for _ in range(4000)], dtype=float)
    torch.manual_seed(0)
    theirs = [RandomResizedCrop.get_params(image, [0.2, 0.9], [3 / 4, 4 / 3]) for _ in range(4000)]
    expected = np.array([(left, top, width, height) for top, left, height, width in theirs], dtype=float)
    error = (ours.mean(0) - expected.mean(0)) / (expected.std(0) / np.sqrt(2000))
    assert (abs(error) < 4).all(), error
    assert (ours[:, 0] + ours[:, 2] <= 60).all() and (ours[:, 1] + ours[:, 3] <= 40).all()


def test_images_of_extreme_shape_get_a_crop_at_the_centre():
    generator = np.random.default_rng(0)
    assert random_box((1000, 10), (0.9, 1.0), generator) == ((1000 - 13) // 2, 0, 13, 10)
    assert random_box((10, 1000), (0.9, 1.0), generator) == (0, (1000 - 13) // 2, 10, 13)


def test_draft_decoding_keeps_the_size_that_the_crop_needs():
    """The crop is less than twice the target, so it must be decoded at full size. On noise, lost pixels are visible."""
    content = picture(5, 70, 70, "JPEG")
    left, top, width, height = random_box((70, 70), (0.5, 0.6), images_module._generator((0, 0, 1)))
    assert max(width, height) < 64
    whole = Image.open(io.BytesIO(content)).crop((left, top, left + width, top + height))
    buffer = io.BytesIO()
    whole.resize((32, 32), Image.BICUBIC).save(buffer, "PNG")
    expected = model_input(ImageTransform(32), buffer.getvalue())
    got = model_input(ImageTransform(32, training=True, scale=(0.5, 0.6)), content, seeds=(0, 0, 1))
    assert (got - expected).abs().mean() < 0.1  # 0.3 if decoded at half the size


def test_other_image_formats_are_bad_samples():
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20)).save(buffer, "PCX")
    assert Image.open(io.BytesIO(buffer.getvalue())).size == (20, 20)
    with pytest.raises(BadSample):
        ImageTransform(16)(buffer.getvalue())


@pytest.mark.parametrize("training", [False, True])
def test_files_that_cannot_be_decoded_are_bad_samples(training):
    transform = ImageTransform(16, training=training)
    jpeg = smooth(64, 64)
    for content in (b"", b"text", jpeg[: len(jpeg) // 2], b"%!PS-Adobe EPSF-3.0\n", picture(0)[:40] + b"\0" * 40):
        with pytest.raises(BadSample) as caught:
            transform(content)
        assert caught.value.kind == "undecodable image"
        assert " object at 0x" not in caught.value.detail


def test_decompression_bombs_are_bad_samples_before_decoding():
    """The headers of files of a few kilobytes specify 40,000 x 40,000 and 12,000 x 12,000 pixels."""
    header = picture(0, kind="PNG")
    bomb = header[:16] + (40_000).to_bytes(4, "big") * 2 + header[24:]
    import zlib

    bomb = bomb[:29] + zlib.crc32(bomb[12:29]).to_bytes(4, "big") + bomb[33:]
    with pytest.raises(BadSample):
        ImageTransform(16)(bomb)
    large = picture(0, kind="PNG")
    large = large[:16] + (12_000).to_bytes(4, "big") * 2 + large[24:]
    large = large[:29] + zlib.crc32(large[12:29]).to_bytes(4, "big") + large[33:]
    with pytest.raises(BadSample) as caught:
        ImageTransform(16)(large)
    assert caught.value.kind == "image too large"


def test_unknown_settings_are_errors():
    for wrong in ({"interpolation": "nearest"}, {"resize_mode": "longest"}, {"scale": (0.0, 1.0)}):
        with pytest.raises(ConfigError):
            ImageTransform(16, **wrong)
