"""Decoding on the GPU, with simplejpeg in place of nvJPEG: the batches are those of the CPU for every kind of file.

tests/gpu/test_gpu_decoder_gpu.py decodes with nvJPEG.
"""

import contextlib
import io

import numpy as np
import pytest
import torch
from PIL import Image

from megaclip.data import GpuDecoder, ImageTransform, TrainLoader, open_gpu_decoder, open_pairs
from megaclip.data import gpu_decoder as gpu_decoder_module
from megaclip.data import loader as loader_module
from megaclip.data.batch import BadSample
from megaclip.data.images import JpegCrop
from megaclip.errors import ConfigError
from tests.unit.data.data_samples import CountingTokenizer, picture, write_tar

simplejpeg = pytest.importorskip("simplejpeg")
SIZE, STEP = 24, 16


def jpeg(number, width=40, height=30, mode="RGB", **options):
    """Return a JPEG file of a smooth picture."""
    coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    image.save(buffer, "jpeg", quality=85, **options)
    return buffer.getvalue()


def without_quantization_tables(content):
    """Return a file that Pillow refuses, and that shows it in its header."""
    while (start := content.find(b"\xff\xdb")) > 0:
        content = content[:start] + content[start + 2 + int.from_bytes(content[start + 2 : start + 4], "big") :]
    return content


def without_a_huffman_table(content):
    """Return a file that Pillow refuses, and that shows it in its data."""
    scan = content.index(b"\xff\xda")  # marker, length, number of components, number and tables of the first one
    return content[: scan + 6] + b"\x33" + content[scan + 7 :]


def scrambled(content):
    """Return a file that simplejpeg refuses and Pillow decodes."""
    return content[:-60] + bytes(40) + content[-20:]


FILES = {
    "large file": lambda n: jpeg(n, 40, 30)[:-2] + bytes(3 * SIZE**2) + b"\xff\xd9",
    "many pixels": lambda n: jpeg(n, 90, 80),
    "grey": lambda n: jpeg(n, mode="L"),
    "RGB": lambda n: jpeg(n, keep_rgb=True),
    "CMYK": lambda n: jpeg(n, mode="CMYK"),
    "progressive": lambda n: jpeg(n, progressive=True),
    "PNG": picture,
    "cut off": lambda n: jpeg(n)[:-40],
    "damaged": lambda n: scrambled(jpeg(n)),
    "useless": lambda n: without_quantization_tables(jpeg(n)),
    "refused": lambda n: without_a_huffman_table(jpeg(n)),
    "tall": lambda n: jpeg(n, 24, 61),
}
"""Kind of a file -> a function that makes one."""


def decode(files):
    """Decode files as nvJPEG does: one that it refuses is an error for all of them."""
    try:
        return [torch.from_numpy(simplejpeg.decode_jpeg(file.numpy().tobytes())).permute(2, 0, 1) for file in files]
    except ValueError as error:
        raise RuntimeError(f"refused: {error}") from error


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """48 samples; every third one is one of FILES, and the others are usual JPEG files."""
    folder, members, odd = tmp_path_factory.mktemp("pairs"), [], list(FILES.values())
    for number in range(48):
        content = odd[number // 3 % len(odd)](number) if number % 3 == 0 else jpeg(number, 33 + number, 41)
        members += [(f"{number:03d}.jpg", content), (f"{number:03d}.txt", f"caption {number}".encode())]
    write_tar(folder / "0.tar", members)
    return open_pairs([str(folder)])


def loader_of(pairs, *, micro_batches=1, **options):
    return TrainLoader(
        pairs,
        ImageTransform(SIZE, training=True),
        CountingTokenizer(),
        micro_batch_size=STEP // micro_batches,
        micro_batches_per_step=micro_batches,
        seed=3,
        max_bad_fraction=1.0,
        **options,
    )


@pytest.mark.parametrize(("workers", "settings"), [(0, {}), (3, {"micro_batches": 2, "reread_from": 1})])
def test_batches_captions_and_bad_samples_are_those_of_the_cpu(pairs, workers, settings, monkeypatch):
    """The stand-in computes the CPU's pixels, so batches are equal to the bit, and after a resume too."""
    monkeypatch.setattr(gpu_decoder_module, "GROUP_FILES", 5)
    monkeypatch.setattr(gpu_decoder_module, "GROUP_BYTES", 3 * 33 * 41 * 4)
    monkeypatch.setattr("megaclip.data.images.LARGEST_ON_GPU", 85 * 41)
    monkeypatch.setattr(loader_module, "SMALLEST_PART", 1)
    groups = []

    def noted(files):
        groups.append(len(files))
        return decode(files)

    decoder = GpuDecoder(torch.device("cpu"), "bicubic", noted)
    loader = loader_of(pairs, num_workers=workers, gpu_decoder=decoder, **settings)
    expected = loader_of(pairs, **settings)
    for _ in range(4 * loader.readings_per_step):  # into the second epoch
        batch, other = next(loader), next(expected)
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.tokens, other.tokens) and torch.equal(batch.pair_ids, other.pair_ids)
        assert loader.bad_counts == expected.bad_counts
    assert loader.bad_counts["undecodable image"] >= 3  # the cut-off, the useless and the refused one
    assert 1 < max(groups) <= 5
    consumed = loader.samples_consumed
    loader.close()
    resumed = loader_of(pairs, samples_consumed=consumed, gpu_decoder=decoder, **settings)
    assert torch.equal(next(resumed).images, next(expected).images)


def test_workers_leave_usable_baseline_files_to_the_gpu(monkeypatch):
    """The stand-in computes the CPU's pixels of every file. nvJPEG takes RGB for YCbCr."""
    monkeypatch.setattr("megaclip.data.images.LARGEST_ON_GPU", 85 * 41)
    left = set()
    for kind, make in FILES.items():
        with contextlib.suppress(BadSample):
            found = ImageTransform(SIZE, training=True).prepare(make(1), (0, 0, 1), gpu_bytes=3 * SIZE**2)
            left |= {kind} if isinstance(found, JpegCrop) else set()
    assert left == {"grey", "damaged", "refused", "tall"}


def test_a_decoder_that_is_set_or_removed_later_takes_whole_steps(pairs, monkeypatch):
    """--image-decoder auto changes it while the workers read ahead. Both readings of a step are by one decoder."""
    monkeypatch.setattr(loader_module, "SMALLEST_PART", 4)
    settings = {"micro_batches": 2, "reread_from": 0}
    dark = GpuDecoder(torch.device("cpu"), "bicubic", lambda files: [torch.zeros_like(one) for one in decode(files)])
    loader, expected = loader_of(pairs, num_workers=2, **settings), loader_of(pairs, **settings)
    changed = []
    for number in range(40):
        if number == 3:
            loader.decode_on(dark)
        if number == 21:
            loader.decode_on(None)
        changed.append(not torch.equal(next(loader).images, next(expected).images))
    loader.close()
    first, last = changed.index(True), 40 - changed[::-1].index(True)
    assert first % 4 == last % 4 == 0 and 3 < first < 21 < last < 40 and all(changed[first:last])


def test_pixels_of_another_size_than_the_header_names_are_not_used():
    """The kernel would read outside of the image."""
    content, images = jpeg(0), torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8)
    images[0].view(-1)[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    decoder = GpuDecoder(torch.device("cpu"), "bicubic", decode)
    assert decoder(images, [(0, JpegCrop(len(content), (40, 31), (0, 0, 40, 31)))]) == [0]


def test_a_machine_without_a_decoding_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"--image-decoder gpu requires a CUDA GPU .* or use --image-decoder cpu$"):
        open_gpu_decoder(torch.device("cpu"), "bicubic")
