"""Draw *digit scenes*: captioned images for the demo, made in seconds from scikit-learn's handwritten digits.

A scene shows one to three coloured handwritten digits on a dark background, and its caption describes it: "a red three
to the left of a blue seven on a navy ground". The handwriting is real (1,797 digits of the UCI test set, scikit-learn's
`load_digits`). It is split by source image: no digit of a training scene occurs in a held-out scene.

    python make_scenes.py data/digit_scenes --train 76800 --held-out 1000

writes webdataset tar shards and a zero-shot set in CLIP_benchmark's layout:

    train/00000.tar ...       000000.jpg 000000.txt 000000.json   scenes in curriculum order, for "sequential" reading
    held_out/00000.tar        files of the same kind; every caption has a different meaning, so retrieval is unambiguous
    zero_shot/classnames.txt  zeroshot_classification_templates.txt  test/0.tar (s0000000.jpg, s0000000.cls)
    scenes.json               the settings; a second call with equal settings does nothing

The training scenes follow a curriculum. At first captions name only digits, later more and more of them name colours.
At first most scenes show one digit that fills the image, later fewer do. The random numbers depend only on (seed,
split, shard), so the files do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import multiprocessing
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from megaclip.commands.argument_types import CommandParser, integer

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Bright digits on few dark backgrounds. With arbitrary colours for both, a model learns colours but not digits
# (zero-shot accuracy 0.16).
COLOURS = {
    "red": (255, 64, 64),
    "green": (64, 240, 64),
    "blue": (96, 144, 255),
    "yellow": (255, 240, 64),
    "cyan": (64, 240, 240),
    "magenta": (255, 80, 255),
    "orange": (255, 160, 48),
    "white": (255, 255, 255),
}
GROUNDS = {"black": (0, 0, 0), "navy": (0, 0, 72), "maroon": (72, 0, 0), "moss": (16, 56, 16)}
# Beginnings of the caption of a single digit. They include the zero-shot templates.
PLAIN_FORMS = ("{article} {digit}", "a handwritten {digit}", "the digit {digit}", "the number {digit}")
ZERO_SHOT_TEMPLATES = ("a handwritten {c}", "the digit {c}", "the number {c}")
RELATIONS = {"horizontal": ("to the left of", "to the right of"), "vertical": ("above", "below")}

HELD_OUT_SHARE = 0.2  # share of the source images of each class
JPEG_OPTIONS = {"quality": 95, "subsampling": 0}
SIZE = 24  # width and height in pixels


class Shares(NamedTuple):
    """Probabilities for one scene. Those of training scenes change linearly from `BEGIN` to `END`."""

    single: float
    """Scenes with one digit. Two thirds of the others show two digits, one third three."""
    colours_named: float
    """Captions that name the colours of the digits."""
    ground_named: float
    """Captions with colours that name the background too."""


BEGIN, END = Shares(0.9, 0.0, 0.0), Shares(0.4, 1.0, 0.5)
HELD_OUT_SHARES = Shares(0.2, 1.0, 1.0)


class Scene(NamedTuple):
    """Contents of an image: its digits, from left to right or from top to bottom."""

    sources: tuple[int, ...]  # rows of load_digits
    digits: tuple[int, ...]
    colours: tuple[str, ...]
    ground: str
    direction: str  # "horizontal" or "vertical"


@functools.lru_cache(maxsize=1)
def load_handwriting() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8) uint8, with ink 255 and paper 0, and labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("error: scikit-learn is not installed; run pip install 'megaclip[demo]'")
    digits = load_digits()
    return np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target


@functools.lru_cache(maxsize=4)
def sources_by_digit(split: str, seed: int) -> tuple[np.ndarray, ...]:
    """Return, for each digit, the rows of load_digits that `split` draws. "train" shares no row with other splits."""
    _, labels = load_handwriting()
    generator = np.random.default_rng([seed, 1797])
    rows = []
    for digit in range(10):
        of_digit = generator.permutation(np.flatnonzero(labels == digit))
        cut = round(HELD_OUT_SHARE * len(of_digit))
        rows.append(of_digit[cut:] if split == "train" else of_digit[:cut])
    return tuple(rows)


@functools.cache
def ink(source: int, side: int) -> np.ndarray:
    """Return the opacity (side, side, 1) float32 in 0..1 of a source digit, scaled to `side` pixels."""
    glyph = Image.fromarray(load_handwriting()[0][source]).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(glyph, dtype=np.float32)[:, :, None] / 255


def invent(generator: np.random.Generator, rows: tuple[np.ndarray, ...], single_share: float) -> Scene:
    """Return a random scene. It shows one digit with probability `single_share`."""
    count = 1 if generator.random() < single_share else int(generator.choice((2, 2, 3)))
    digits = tuple(int(d) for d in generator.integers(10, size=count))
    sources = tuple(int(rows[d][generator.integers(len(rows[d]))]) for d in digits)
    # The colours within a scene differ, so that a caption with colours identifies each digit.
    colours = tuple(list(COLOURS)[c] for c in generator.permutation(len(COLOURS))[:count])
    ground = list(GROUNDS)[generator.integers(len(GROUNDS))]
    return Scene(sources, digits, colours, ground, "vertical" if generator.random() < 0.5 else "horizontal")


def draw(scene: Scene, generator: np.random.Generator) -> bytes:
    """Return the scene as a JPEG file: digits in a row or column, each at a random place in its cell."""
    canvas = np.empty((SIZE, SIZE, 3), dtype=np.float32)
    canvas[:] = GROUNDS[scene.ground]
    count = len(scene.digits)
    cell = SIZE // count
    side = cell - (cell // 8 if count < 3 else 0)
    for position, (source, colour) in enumerate(zip(scene.sources, scene.colours, strict=True)):
        along = position * cell + int(generator.integers(cell - side + 1))
        across = int(generator.integers(SIZE - side + 1))
        top, left = (along, across) if scene.direction == "vertical" else (across, along)
        opacity = ink(source, side)
        patch = canvas[top : top + side, left : left + side]
        patch += opacity * (np.array(COLOURS[colour], dtype=np.float32) - patch)
    file = io.BytesIO()
    Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8)).save(file, "JPEG", **JPEG_OPTIONS)
    return file.getvalue()


def describe(scene: Scene, shares: Shares, generator: np.random.Generator) -> str:
    """Return a caption. `generator` decides if it names colours and background, and from which digit it starts."""
    name_colours = generator.random() < shares.colours_named
    name_ground = name_colours and generator.random() < shares.ground_named
    nouns = [DIGITS[d] for d in scene.digits]
    if name_colours:
        nouns = [f"{colour} {noun}" for colour, noun in zip(scene.colours, nouns, strict=True)]
    phrases = [f"{_article(noun)} {noun}" for noun in nouns]
    if len(nouns) == 1:
        form = PLAIN_FORMS[generator.integers(len(PLAIN_FORMS))]
        caption = form.format(article=_article(nouns[0]), digit=nouns[0])
    elif len(nouns) == 2:
        backwards = int(generator.integers(2))
        first, second = phrases[::-1] if backwards else phrases
        caption = f"{first} {RELATIONS[scene.direction][backwards]} {second}"
    else:
        way = "from left to right" if scene.direction == "horizontal" else "from top to bottom"
        caption = f"{phrases[0]}, {phrases[1]} and {phrases[2]} {way}"
    return f"{caption} on a {scene.ground} ground" if name_ground else caption


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeio" and not noun.startswith("one") else "a"


def meaning(scene: Scene) -> tuple:
    """Return the facts of a scene that a full caption describes. A single digit has no direction."""
    direction = scene.direction if len(scene.digits) > 1 else ""
    return scene.digits, scene.colours, scene.ground, direction


Samples = Iterator[dict[str, bytes]]
"""The files of each sample, by name."""


def train_samples(options: argparse.Namespace, shard: int) -> Samples:
    """Yield the scenes of one training shard, in curriculum order."""
    generator = np.random.default_rng([options.seed, 0, shard])
    rows = sources_by_digit("train", options.seed)
    start = shard * options.shard_size
    for index in range(start, min(start + options.shard_size, options.train)):
        progress = index / max(1, options.train - 1)
        shares = Shares(*((1 - progress) * begin + progress * end for begin, end in zip(BEGIN, END, strict=True)))
        yield scene_files("train", index, invent(generator, rows, shares.single), shares, generator)


def held_out_samples(options: argparse.Namespace) -> Samples:
    """Yield the held-out scenes. No two of them have the same `meaning`."""
    generator = np.random.default_rng([options.seed, 1])
    rows = sources_by_digit("held_out", options.seed)
    seen: set[tuple] = set()
    while len(seen) < options.held_out:
        scene = invent(generator, rows, HELD_OUT_SHARES.single)
        if meaning(scene) not in seen:
            seen.add(meaning(scene))
            yield scene_files("held_out", len(seen) - 1, scene, HELD_OUT_SHARES, generator)


def zero_shot_samples(options: argparse.Namespace) -> Samples:
    """Yield the single-digit images for classification: every held-out digit, in random colours."""
    generator = np.random.default_rng([options.seed, 2])
    rows = sources_by_digit("held_out", options.seed)
    pairs = [(int(row), digit) for digit in range(10) for row in rows[digit]]
    order = generator.permutation(len(pairs))
    for index in range(options.zero_shot):
        row, digit = pairs[order[index % len(pairs)]]
        scene = invent(generator, rows, 1.0)._replace(sources=(row,), digits=(digit,))
        yield {f"s{index:07d}.jpg": draw(scene, generator), f"s{index:07d}.cls": str(digit).encode()}


def scene_files(
    split: str, index: int, scene: Scene, shares: Shares, generator: np.random.Generator
) -> dict[str, bytes]:
    """Return the three files of a scene, by name."""
    record = {"id": f"{split}-{index:06d}", "sources": scene.sources, "digits": scene.digits, "colours": scene.colours}
    return {
        f"{index:06d}.jpg": draw(scene, generator),
        f"{index:06d}.txt": describe(scene, shares, generator).encode(),
        f"{index:06d}.json": json.dumps(record).encode(),
    }


def write_tar(job: tuple[Path, Callable[[], Samples]]) -> int:
    """Write samples to a tar file and return their number."""
    path, samples = job
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for files in samples():
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            count += 1
    return count


def write_all(options: argparse.Namespace) -> None:
    """Write every split under `options.directory`. Scenes with other settings are replaced."""
    train, held_out, zero_shot = (options.directory / split for split in ("train", "held_out", "zero_shot"))
    for split in (train, held_out, zero_shot):
        shutil.rmtree(split, ignore_errors=True)
    for folder in (train, held_out, zero_shot / "test"):
        folder.mkdir(parents=True)
    (zero_shot / "classnames.txt").write_text("\n".join(DIGITS) + "\n")
    (zero_shot / "zeroshot_classification_templates.txt").write_text("\n".join(ZERO_SHOT_TEMPLATES) + "\n")
    (zero_shot / "test" / "nshards.txt").write_text("1\n")

    jobs: list[tuple[Path, Callable[[], Samples]]] = [
        (train / f"{shard:05d}.tar", functools.partial(train_samples, options, shard))
        for shard in range(-(-options.train // options.shard_size))
    ]
    jobs += [(held_out / "00000.tar", functools.partial(held_out_samples, options))]
    jobs += [(zero_shot / "test" / "0.tar", functools.partial(zero_shot_samples, options))]
    total = options.train + options.held_out + options.zero_shot
    with multiprocessing.Pool(2) as pool, tqdm(total=total, unit=" scenes", desc="digit scenes") as bar:
        for count in pool.imap_unordered(write_tar, jobs):
            bar.update(count)


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("directory", type=Path, help="folder to write to")
    for flag, default, meaning in (
        ("--train", 76_800, "number of training scenes"),
        ("--held-out", 1000, "number of scenes for retrieval"),
        ("--zero-shot", 1000, "number of images for classification"),
        ("--shard-size", 2560, "scenes per training shard"),
    ):
        parser.add_argument(flag, type=integer(1), default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--seed", type=integer(0), default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    directory, record = options.directory, options.directory / "scenes.json"
    settings = {name: value for name, value in vars(options).items() if name != "directory"}
    if record.exists() and json.loads(record.read_text()) == settings:
        print(f"{directory} already contains these scenes")
        return
    record.unlink(missing_ok=True)
    write_all(options)
    record.write_text(json.dumps(settings) + "\n")
    print(f"wrote {options.train} training, {options.held_out} held-out and {options.zero_shot} zero-shot images")


if __name__ == "__main__":
    main()
