"""Draw *digit scenes*: captioned images for the demo, made in seconds from scikit-learn's handwritten digits.

A scene shows one to three coloured handwritten digits on a dark background, and its caption describes it: "a red three
to the left of a blue seven on a navy ground". The handwriting is real (1,797 digits of the UCI test set, scikit-learn's
`load_digits`). It is split by source image: no digit of a training scene occurs in a held-out scene.

    megaclip demo-data data/digit_scenes --train 76800 --held-out 1000

writes webdataset tar shards and a zero-shot set in CLIP_benchmark's layout:

    train/00000.tar ...       000000.jpg 000000.txt 000000.json   scenes in curriculum order, for "sequential" reading
    held_out/00000.tar        files of the same kind; every caption has a different meaning, so retrieval is unambiguous
    zero_shot/classnames.txt  zeroshot_classification_templates.txt  test/0.tar (s0000000.jpg, s0000000.cls)
    scenes.json               the settings; a second call with equal settings does nothing

The training scenes follow a `Curriculum`. At first captions name only digits, later more and more of them name colours.
At first most scenes show one digit that fills the image, later fewer do. The random numbers depend only on (seed,
split, shard), so the files do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

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
SPLITS = ("train", "held_out", "zero_shot")


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Shares of scenes at the beginning and at the end of the training set. They change linearly in between."""

    single: tuple[float, float] = (0.9, 0.4)
    """Share of scenes with one digit. Two thirds of the others show two digits, one third three."""
    colours_named: tuple[float, float] = (0.0, 1.0)
    """Share of captions that name the colours of the digits."""
    ground_named: tuple[float, float] = (0.0, 0.5)
    """Share of the captions with colours that name the background too."""

    def at(self, progress: float) -> Shares:
        """Return the shares after a fraction `progress` (0 to 1) of the training scenes."""
        values = ((1 - progress) * getattr(self, f.name)[0] + progress * getattr(self, f.name)[1] for f in FIELDS)
        return Shares(*values)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Probabilities for one scene; see `Curriculum`."""

    single: float
    colours_named: float
    ground_named: float


FIELDS = dataclasses.fields(Curriculum)
HELD_OUT_SHARES = Shares(single=0.2, colours_named=1.0, ground_named=1.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that the files depend on."""

    train: int
    held_out: int
    zero_shot: int
    size: int
    seed: int
    shard_size: int
    curriculum: Curriculum


@dataclasses.dataclass(frozen=True)
class Scene:
    """Contents of an image: its digits, from left to right or from top to bottom."""

    sources: tuple[int, ...]  # rows of load_digits
    digits: tuple[int, ...]
    colours: tuple[str, ...]
    ground: str
    direction: str  # "horizontal" or "vertical"


# ---------------------------------------------------------------- source images


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


# ---------------------------------------------------------------- one scene


def invent(generator: np.random.Generator, rows: tuple[np.ndarray, ...], single_share: float) -> Scene:
    """Return a random scene. It shows one digit with probability `single_share`."""
    count = 1 if generator.random() < single_share else int(generator.choice((2, 2, 3)))
    digits = tuple(int(d) for d in generator.integers(10, size=count))
    sources = tuple(int(rows[d][generator.integers(len(rows[d]))]) for d in digits)
    # The colours within a scene differ, so that a caption with colours identifies each digit.
    colours = tuple(list(COLOURS)[c] for c in generator.permutation(len(COLOURS))[:count])
    ground = list(GROUNDS)[generator.integers(len(GROUNDS))]
    return Scene(sources, digits, colours, ground, "vertical" if generator.random() < 0.5 else "horizontal")


def draw(scene: Scene, size: int, generator: np.random.Generator) -> Image.Image:
    """Draw the scene as a size x size RGB image: digits in a row or column, each at a random place in its cell."""
    canvas = np.empty((size, size, 3), dtype=np.float32)
    canvas[:] = GROUNDS[scene.ground]
    count = len(scene.digits)
    cell = size // count
    side = cell - (cell // 8 if count < 3 else 0)
    for position, (source, colour) in enumerate(zip(scene.sources, scene.colours, strict=True)):
        along = position * cell + int(generator.integers(cell - side + 1))
        across = int(generator.integers(size - side + 1))
        top, left = (along, across) if scene.direction == "vertical" else (across, along)
        opacity = ink(source, side)
        patch = canvas[top : top + side, left : left + side]
        patch += opacity * (np.array(COLOURS[colour], dtype=np.float32) - patch)
    return Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8))


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


# ---------------------------------------------------------------- shards


def train_samples(settings: Settings, shard: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and files of each scene of one training shard, in curriculum order."""
    generator = np.random.default_rng([settings.seed, 0, shard])
    rows = sources_by_digit("train", settings.seed)
    start = shard * settings.shard_size
    for index in range(start, min(start + settings.shard_size, settings.train)):
        shares = settings.curriculum.at(index / max(1, settings.train - 1))
        scene = invent(generator, rows, shares.single)
        yield f"{index:06d}", scene_files("train", index, scene, shares, settings.size, generator)


def held_out_samples(settings: Settings) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and files of each held-out scene. No two scenes have the same `meaning`."""
    generator = np.random.default_rng([settings.seed, 1])
    rows = sources_by_digit("held_out", settings.seed)
    seen: set[tuple] = set()
    while len(seen) < settings.held_out:
        scene = invent(generator, rows, HELD_OUT_SHARES.single)
        if meaning(scene) not in seen:
            index = len(seen)
            seen.add(meaning(scene))
            yield f"{index:06d}", scene_files("held_out", index, scene, HELD_OUT_SHARES, settings.size, generator)


def zero_shot_samples(settings: Settings) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and files of each single-digit image for classification: every held-out digit, in random colours."""
    generator = np.random.default_rng([settings.seed, 2])
    rows = sources_by_digit("held_out", settings.seed)
    pairs = [(int(row), digit) for digit in range(10) for row in rows[digit]]
    order = generator.permutation(len(pairs))
    for index in range(settings.zero_shot):
        row, digit = pairs[order[index % len(pairs)]]
        template = invent(generator, rows, 1.0)
        scene = dataclasses.replace(template, sources=(row,), digits=(digit,))
        yield f"s{index:07d}", {"jpg": _jpeg(draw(scene, settings.size, generator)), "cls": str(digit).encode()}


def scene_files(
    split: str, index: int, scene: Scene, shares: Shares, size: int, generator: np.random.Generator
) -> dict[str, bytes]:
    """Return the three files of a scene, by extension."""
    record = {"id": f"{split}-{index:06d}", "sources": scene.sources, "digits": scene.digits, "colours": scene.colours}
    return {
        "jpg": _jpeg(draw(scene, size, generator)),
        "txt": describe(scene, shares, generator).encode(),
        "json": json.dumps(record).encode(),
    }


def _jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **JPEG_OPTIONS)
    return buffer.getvalue()


def write_tar(path: Path, samples: Iterator[tuple[str, dict[str, bytes]]]) -> int:
    """Write samples to a tar file and return their number. The file gets its name when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    count = 0
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, files in samples:
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            count += 1
    os.replace(unfinished, path)
    return count


def _write_shard(settings: Settings, directory: Path, job: tuple[str, int]) -> int:
    split, shard = job
    if split == "train":
        return write_tar(directory / "train" / f"{shard:05d}.tar", train_samples(settings, shard))
    if split == "held_out":
        return write_tar(directory / "held_out" / "00000.tar", held_out_samples(settings))
    return write_tar(directory / "zero_shot" / "test" / "0.tar", zero_shot_samples(settings))


def write_all(settings: Settings, directory: Path, processes: int) -> None:
    """Write every split under `directory`. Scenes with other settings are replaced."""
    for split in SPLITS:
        shutil.rmtree(directory / split, ignore_errors=True)
        (directory / split / ("test" if split == "zero_shot" else "")).mkdir(parents=True)
    zero_shot = directory / "zero_shot"
    (zero_shot / "classnames.txt").write_text("\n".join(DIGITS) + "\n")
    (zero_shot / "zeroshot_classification_templates.txt").write_text("\n".join(ZERO_SHOT_TEMPLATES) + "\n")
    (zero_shot / "test" / "nshards.txt").write_text("1\n")

    jobs = [("train", shard) for shard in range(-(-settings.train // settings.shard_size))]
    jobs += [("held_out", 0), ("zero_shot", 0)]
    total = settings.train + settings.held_out + settings.zero_shot
    work = functools.partial(_write_shard, settings, directory)
    with multiprocessing.Pool(processes) as pool, tqdm(total=total, unit=" scenes", desc="digit scenes") as bar:
        for count in pool.imap_unordered(work, jobs):
            bar.update(count)


def fingerprint(settings: Settings) -> dict:
    """Return the settings and constants that the files depend on, as they are after a round trip through JSON."""
    constants = {"held_out_shares": dataclasses.asdict(HELD_OUT_SHARES), "held_out_share": HELD_OUT_SHARE}
    constants |= {"colours": COLOURS, "grounds": GROUNDS, "forms": PLAIN_FORMS, "templates": ZERO_SHOT_TEMPLATES}
    return json.loads(json.dumps({**dataclasses.asdict(settings), **constants, "jpeg": JPEG_OPTIONS}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder to write to")
    parser.add_argument("--train", type=int, default=76_800, help="number of training scenes (default: %(default)s)")
    parser.add_argument(
        "--held-out", type=int, default=1000, help="number of scenes for retrieval (default: %(default)s)"
    )
    parser.add_argument(
        "--zero-shot", type=int, default=1000, help="number of images for classification (default: %(default)s)"
    )
    parser.add_argument("--size", type=int, default=24, help="width and height in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", type=int, default=2560, help="scenes per training shard (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    for field in FIELDS:
        flag = "--" + field.name.replace("_", "-")
        note = f"share at the beginning and the end of the curriculum (default: {field.default})"
        parser.add_argument(flag, type=float, nargs=2, default=field.default, metavar=("BEGIN", "END"), help=note)
    arguments = parser.parse_args()
    for name, least in (("train", 1), ("held_out", 1), ("zero_shot", 1), ("shard_size", 1), ("size", 16)):
        value = getattr(arguments, name)
        if value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; use at least {least}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    curriculum = Curriculum(**{field.name: tuple(getattr(arguments, field.name)) for field in FIELDS})
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "curriculum"]
    settings = Settings(**{name: getattr(arguments, name) for name in names}, curriculum=curriculum)
    record = arguments.directory / "scenes.json"
    if record.exists() and json.loads(record.read_text()) == fingerprint(settings):
        print(f"{arguments.directory} already contains these scenes")
        return
    record.unlink(missing_ok=True)
    write_all(settings, arguments.directory, arguments.processes)
    record.write_text(json.dumps(fingerprint(settings), indent=1) + "\n")
    print(f"wrote {settings.train} training, {settings.held_out} held-out and {settings.zero_shot} zero-shot images")
