"""Write small datasets for the tests of megaclip.data, without any code of that package."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from megaclip.data.batch import BadSample

COUNT = 5
"""Number of samples of `texts` and `write_folder_of_pairs`."""


def picture(number: int, width: int = 12, height: int = 10, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an image file with random pixels; `number` is their seed."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar file with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def pair_members(numbers: Iterable[int]) -> list[tuple[str, bytes]]:
    """Return the members of pairs with these numbers, named as in webdataset. The caption contains the number."""
    return [
        member
        for number in numbers
        for member in ((f"{number:06d}.png", picture(number)), (f"{number:06d}.txt", f"caption {number}".encode()))
    ]


def write_shards(folder: Path, sizes: Iterable[int]) -> list[Path]:
    """Write tar shards of these sizes. The samples are numbered across all shards."""
    paths, start = [], 0
    for shard, size in enumerate(sizes):
        paths.append(write_tar(folder / f"{shard:05d}.tar", pair_members(range(start, start + size))))
        start += size
    return paths


def write_table(path: Path, rows: list[dict], separator: str = ",") -> str:
    """Write rows with equal keys as parquet, CSV, TSV or JSON lines. Return the path."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(
            "\n".join(separator.join(map(str, line)) for line in (rows[0], *(row.values() for row in rows)))
        )
    return str(path)


def write_json_pairs(folder: Path, records: Iterable[dict | bytes]) -> tuple[str, str]:
    """Write pictures, each with a JSON file, as img2dataset does: as a tar shard and as a folder. Return both."""
    members = []
    for number, record in enumerate(records):
        content = record if isinstance(record, bytes) else json.dumps(record).encode()
        members += [(f"{number:06d}.png", picture(number)), (f"{number:06d}.json", content)]
    (folder / "files").mkdir(parents=True)
    for name, content in members:
        (folder / "files" / name).write_bytes(content)
    return str(write_tar(folder / "tars" / "0.tar", members)), str(folder / "files")


def outcomes(dataset):
    """Return the caption of every sample, or the kind of a bad one."""
    found = []
    for number in range(len(dataset)):
        try:
            found.append(dataset.read(number).caption)
        except BadSample as bad:
            found.append(bad.kind)
    return found


def texts():
    return [f"caption {n}" for n in range(COUNT)]


def captions(dataset):
    return [dataset.read(number).caption for number in range(len(dataset))]


def images(dataset):
    return [dataset.read(number).image for number in range(len(dataset))]


def write_folder_of_pairs(folder):
    """Write a text file beside each picture, in folders of different depth."""
    for number, text in enumerate(texts()):
        place = folder / ("deep/er" if number > 2 else "")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.JPG").write_bytes(picture(number))
        (place / f"{number}.{('txt', 'caption', 'text')[number % 3]}").write_text(text)
    (folder / ".hidden.jpg").write_bytes(b"")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "0-checkpoint.jpg").write_bytes(picture(0))
    (folder / ".ipynb_checkpoints" / "metadata.csv").write_text("file_name,text\n")
    return str(folder)


class CountingTokenizer:
    """Stand-in for a tokenizer in tests that do not depend on tokens.

    The first token is 17 for "caption 17", and -1 for a text without a number.
    """

    vocab_size, eos_id, pad_id, context_length = 1000, 1, 0, 2

    def __call__(self, captions):
        import torch

        return torch.tensor([[int(caption.split()[-1]) if caption else -1, 1] for caption in captions])
