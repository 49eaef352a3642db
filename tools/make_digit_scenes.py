"""Draw *digit scenes*: real images with captions for the demo, made in seconds from scikit-learn's handwritten digits.

A scene shows one to three coloured handwritten digits on a dark ground, and its caption says so: "a red three to the
left of a blue seven on a navy ground". The handwriting is real (1,797 digits of the UCI test set, scikit-learn's
`load_digits`) and is split by source image: no digit drawn in a training scene is ever drawn in a held-out one.

    python tools/make_digit_scenes.py data/digit_scenes --train 76800 --held-out 1000

writes webdataset tar shards and a zero-shot set in CLIP_benchmark's layout:

    train/00000.tar ...       000000.jpg 000000.txt 000000.json   scenes in curriculum order: read them "sequential"
    held_out/00000.tar        the same; every caption means something else, so retrieval has one right answer
    zero_shot/classnames.txt  zeroshot_classification_templates.txt  test/0.tar (s0000000.jpg, s0000000.cls)
    scenes.json               the settings; a second call with the same settings does nothing

Order of the training scenes (`Curriculum`): captions name only digits at first, and colours more and more; most scenes
show one digit that fills the frame at first, and fewer later. Everything is drawn from (seed, split, shard), so the
bytes do not depend on the number of processes.
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
# Bright digits on few dark grounds: with arbitrary colours for both, colour drowns the digits (zero-shot 0.16).
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
# How the caption of a single digit may begin; the zero-shot templates are among these forms.
PLAIN_FORMS = ("{article} {digit}", "a handwritten {digit}", "the digit {digit}", "the number {digit}")
ZERO_SHOT_TEMPLATES = ("a handwritten {c}", "the digit {c}", "the number {c}")
RELATIONS = {"horizontal": ("to the left of", "to the right of"), "vertical": ("above", "below")}

HELD_OUT_SHARE = 0.2  # of the source images, per class
JPEG_OPTIONS = {"quality": 95, "subsampling": 0}
SPLITS = ("train", "held_out", "zero_shot")


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Shares of scenes at the beginning and the end of the training set; linear in between."""

    # Scenes with one digit; of the others, two thirds show two digits and one third three.
    single: tuple[float, float] = (0.9, 0.4)
    # Captions that name the colours of the digits, and of these the ones that name the ground as well.
    colours_named: tuple[float, float] = (0.0, 1.0)
    ground_named: tuple[float, float] = (0.0, 0.5)

    def at(self, progress: float) -> Shares:
        """The shares after a fraction `progress` (0 to 1) of the training scenes."""
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
    """Everything the files depend on."""

    train: int
    held_out: int
    zero_shot: int
    size: int
    seed: int
    shard_size: int
    curriculum: Curriculum


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is drawn: digits in reading order (left to right, or top to bottom)."""

    sources: tuple[int, ...]  # rows of load_digits
    digits: tuple[int, ...]
    colours: tuple[str, ...]
    ground: str
    direction: str  # "horizontal" or "vertical"


# ---------------------------------------------------------------- the handwriting


@functools.lru_cache(maxsize=1)
def load_handwriting() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) uint8, ink is 255, and labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("make_digit_scenes needs scikit-learn's digits: pip install 'megaclip[demo]'")
    digits = load_digits()
    return np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target


@functools.lru_cache(maxsize=4)
def sources_by_digit(split: str, seed: int) -> tuple[np.ndarray, ...]:
    """For each digit, the rows of load_digits that `split` may draw; "train" shares no row with the other splits."""
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
    """Opacity (side, side, 1) float32 in 0..1 of a source digit scaled to `side` pixels."""
    glyph = Image.fromarray(load_handwriting()[0][source]).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(glyph, dtype=np.float32)[:, :, None] / 255


# ---------------------------------------------------------------- one scene


def invent(generator: np.random.Generator, rows: tuple[np.ndarray, ...], single_share: float) -> Scene:
    """A random scene; a share of them shows one digit."""
    count = 1 if generator.random() < single_share else int(generator.choice((2, 2, 3)))
    digits = tuple(int(d) for d in generator.integers(10, size=count))
    sources = tuple(int(rows[d][generator.integers(len(rows[d]))]) for d in digits)
    # Different colours within a scene: the caption then says which digit is which.
    colours = tuple(list(COLOURS)[c] for c in generator.permutation(len(COLOURS))[:count])
    ground = list(GROUNDS)[generator.integers(len(GROUNDS))]
    return Scene(sources, digits, colours, ground, "vertical" if generator.random() < 0.5 else "horizontal")


def draw(scene: Scene, size: int, generator: np.random.Generator) -> Image.Image:
    """The scene as a size x size RGB image: digits in a row or column, each jittered inside its cell."""
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
    """A caption; whether it names colours and ground, and from which digit it starts, is drawn from `generator`."""
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
    """What a full caption says of a scene, however it is worded; the direction of a single digit says nothing."""
    direction = scene.direction if len(scene.digits) > 1 else ""
    return scene.digits, scene.colours, scene.ground, direction


# ---------------------------------------------------------------- shards


def train_samples(settings: Settings, shard: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and files of each scene of one training shard, in curriculum order."""
    generator = np.random.default_rng([settings.seed, 0, shard])
    rows = sources_by_digit("train", settings.seed)
    start = shard * settings.shard_size
    for index in range(start, min(start + settings.shard_size, settings.train)):
        shares = settings.curriculum.at(index / max(1, settings.train - 1))
        scene = invent(generator, rows, shares.single)
        yield f"{index:06d}", scene_files("train", index, scene, shares, settings.size, generator)


def held_out_samples(settings: Settings) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and files of each held-out scene; no two captions mean the same."""
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
    """Key and files of each single-digit image for classification: every held-out digit in turn, newly coloured."""
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
    """The three files of a scene, by extension."""
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
    """Write samples as one tar file, which appears under its name only when it is whole; the number of samples."""
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
    """Write every split under `directory`, replacing scenes made with other settings."""
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
    """The settings and constants the files depend on, as JSON would give them back."""
    constants = {"held_out_shares": dataclasses.asdict(HELD_OUT_SHARES), "held_out_share": HELD_OUT_SHARE}
    constants |= {"colours": COLOURS, "grounds": GROUNDS, "forms": PLAIN_FORMS, "templates": ZERO_SHOT_TEMPLATES}
    return json.loads(json.dumps({**dataclasses.asdict(settings), **constants, "jpeg": JPEG_OPTIONS}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder to write")
    parser.add_argument("--train", type=int, default=76_800, help="training scenes (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=1000, help="scenes for retrieval (default: %(default)s)")
    parser.add_argument("--zero-shot", type=int, default=1000, help="held-out single digits (default: %(default)s)")
    parser.add_argument("--size", type=int, default=24, help="width and height in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", type=int, default=2560, help="scenes per training shard (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    for field in FIELDS:
        flag = "--" + field.name.replace("_", "-")
        note = f"share at the beginning and the end of the curriculum (default: {field.default})"
        parser.add_argument(flag, type=float, nargs=2, default=field.default, metavar=("BEGIN", "END"), help=note)
    arguments = parser.parse_args()
    if min(arguments.train, arguments.held_out, arguments.zero_shot, arguments.shard_size) < 1 or arguments.size < 16:
        parser.error("counts must be at least 1 and --size at least 16")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    curriculum = Curriculum(**{field.name: tuple(getattr(arguments, field.name)) for field in FIELDS})
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "curriculum"]
    settings = Settings(**{name: getattr(arguments, name) for name in names}, curriculum=curriculum)
    record = arguments.directory / "scenes.json"
    if record.exists() and json.loads(record.read_text()) == fingerprint(settings):
        print(f"{arguments.directory} already holds these scenes")
        return
    record.unlink(missing_ok=True)
    write_all(settings, arguments.directory, arguments.processes)
    record.write_text(json.dumps(fingerprint(settings), indent=1) + "\n")
    print(f"wrote {settings.train} training, {settings.held_out} held-out and {settings.zero_shot} zero-shot images")


if __name__ == "__main__":
    main()
