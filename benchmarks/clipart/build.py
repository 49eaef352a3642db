"""Build the clip-art benchmark: shards of real pictures with captions that people wrote, and its evaluation suites.

    python benchmarks/clipart/build.py clipart/                    train on some emoji, test on others
    python benchmarks/clipart/build.py clipart/ --split design     train on three designs, test on the fourth

The pictures are Debian's openclipart-png with the titles and keywords in openclipart-svg, and npm's
emoji-datasource-{apple,google,twitter,facebook} with names and short names. `apt-get download` and `npm pack` write
their archives to OUT/archives, where they are found the next time. The same archives always give the same shards.

OUT/train/*.tar, OUT/val.tar and OUT/test.tar hold `.webp` pictures on white and `.txt` captions. Every training shard
is a random sample of the training split. OUT/facts.jsonl has title, keywords, author and licence of every picture.
OUT/suite and OUT/suite_val hold sets for `megaclip evaluate --suite`, from the test and the validation split.
OUT/README.md and OUT/report.json list versions, licences, counts and what was left out. docs/results.md describes the
cleaning and the splits.

Requires apt-get, dpkg-deb and npm, Pillow and NumPy.
"""

import argparse
import hashlib
import html
import io
import json
import os
import re
import subprocess
import tarfile
import textwrap
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, UnidentifiedImageError

DESIGNS = ("apple", "google", "twitter", "facebook")
HELD_OUT_DESIGN = "facebook"
EMOJI_VERSION = "16.0.0"
LICENCES = {
    "clipart": "public domain, as stated in the metadata of every file",
    "apple": "copyright Apple Inc., not licensed for commercial usage",
    "google": "Apache License 2.0",
    "twitter": "Creative Commons Attribution 4.0",
    "facebook": "copyright Facebook Inc., no clear licence",
}
"""As the packages state them. The names of the emoji are under the MIT licence of emoji-datasource."""

SIZE = 112
"""Largest side of a clip art, in pixels. Emoji keep their 64 pixels."""
LARGEST_PIXELS = 40_000_000
SMALLEST_SIDE = 32
COLLECTION = 5
"""A title of more works than this is that of their collection."""
EQUAL_CAPTIONS = 4
"""Number of works that may have the same caption."""
KEYWORDS = 6
"""Largest number of keywords in a caption."""
NEAR = 6.0
"""Root mean square difference of two 16 x 16 thumbnails, in levels of 255, up to which pictures are near-duplicates."""
SHARES = {"test": 0.14, "val": 0.10}
"""Shares of the groups in each split. All other groups are for training."""
TRAIN_SHARDS = 30
LEAST_IMAGES = 24
"""Number of pictures, over all splits, that a folder needs to be a class."""
TEMPLATES = ["{c}", "a picture of {c}", "clip art of {c}", "an icon of {c}"]

NO_CLASSES = {"unsorted", "unsorted/duplicates", "computer/icons", "special/examples", "signs_and_symbols"}
"""Folders of openclipart that do not tell what a picture shows."""
NO_KEYWORDS = {"hash", "unsorted", "magick", "mapsym", "icons", "theme", "appicon", "special", "webpage"}
FOREIGN = frozenset(
    re.findall(
        r"\S+",
        "de des du la le les el los las del il lo gli di da con per una un une et sur avec pour au aux y para der die "
        "das und mit von ein eine het een van op na do dos em os um uma z w sans sin senza",
    )
)
"""Function words of the other languages in the metadata. One of them in a title leaves a work out."""
TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium-light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium-dark skin tone",
    "1F3FF": "dark skin tone",
}
NO_IDENTITY = frozenset(
    re.findall(
        r"\S+",
        "man woman men women male female person people boy girl skin tone light medium dark flag flags of the a an "
        "with in and sign symbol icon clipart clip art",
    )
)
"""Words that do not make two works different: works whose titles agree in all other words are in one split."""


@dataclass
class Picture:
    """One picture with its caption."""

    key: str
    """Unique name, with the collection first."""
    collection: str
    """`clipart`, or the design of an emoji."""
    title: str
    keywords: list[str]
    label: str
    """Folder of a clip art or group of an emoji. The classes of the suites are made of these."""
    facts: dict[str, str] = field(default_factory=dict)
    is_variant: bool = False
    """True for an emoji with a skin tone. These are not in the suites."""
    content: bytes = b""
    """The file, WebP."""
    thumbnail: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """16 x 16 RGB levels, flat, float32."""
    split: str = ""

    @property
    def caption(self) -> str:
        return ", ".join([self.title, *self.keywords])

    @property
    def is_clip_art(self) -> bool:
        return self.collection == "clipart"

    @property
    def order(self) -> bytes:
        """A random but fixed place in the shards."""
        return hashlib.sha256(self.key.encode()).digest()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the shards, created if it does not exist")
    parser.add_argument(
        "--split", choices=["emoji", "design"], default="emoji", help="what is held out (default emoji)"
    )
    parser.add_argument("--samples", type=Path, metavar="PNG", help="draw ten random training samples of free licences")
    arguments = parser.parse_args(argv)
    out, left_out = arguments.out, Counter[str]()
    archives = download(out / "archives")
    pictures = clip_arts(archives, left_out)
    for design in DESIGNS:
        pictures += emoji(archives[design], design, left_out)
    pictures = unique(pictures, left_out)
    groups = group(pictures)
    assign_splits(pictures, groups)
    if arguments.split == "design":
        for picture in pictures:
            if not picture.is_clip_art:
                picture.split = "test" if picture.collection == HELD_OUT_DESIGN else "train"
    write_shards(out, pictures)
    sets = {name: write_suite(out / name, pictures, split) for name, split in (("suite", "test"), ("suite_val", "val"))}
    write_report(out, pictures, len(set(groups)), archives, left_out, sets, arguments.split)
    if arguments.samples is not None:
        draw_samples(arguments.samples, pictures)
    print((out / "README.md").read_text(encoding="utf-8"))


def download(folder: Path) -> dict[str, Path]:
    """Return the archives by collection (`svg`, `clipart` and the designs). Download those that are not in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = {"svg": "openclipart-svg", "clipart": "openclipart-png"}
    packages |= {design: f"emoji-datasource-{design}" for design in DESIGNS}
    found = {}
    for name, package in packages.items():
        is_emoji = name in DESIGNS
        pattern = f"{package}-{EMOJI_VERSION}.tgz" if is_emoji else f"{package}_*.deb"
        if not list(folder.glob(pattern)):
            print(f"downloading {package}", flush=True)
            command = ["npm", "pack", "--silent", f"{package}@{EMOJI_VERSION}"] if is_emoji else None
            subprocess.run(command or ["apt-get", "download", "-q", package], cwd=folder, check=True)
        found[name] = sorted(folder.glob(pattern))[-1]
    return found


# --- clip art ---------------------------------------------------------------------------------------------------------


def clip_arts(archives: dict[str, Path], left_out: Counter[str]) -> list[Picture]:
    """Return the clip arts that have a usable title and a picture. left_out: receives the counts of the others."""
    works = [
        (name, metadata(content.decode("utf-8", "replace"))) for name, content in deb_files(archives["svg"], ".svg")
    ]
    shared = Counter(work.get("title", "") for _, work in works)
    captioned: dict[str, Picture] = {}
    seen = Counter[str]()
    for name, work in sorted(works, key=lambda entry: entry[0]):
        result = captioned_work(name, work, shared[work.get("title", "")] > COLLECTION)
        if isinstance(result, str):
            left_out[f"clip art: {result}"] += 1
        elif seen[result.caption] == EQUAL_CAPTIONS:
            left_out[f"clip art: caption of {EQUAL_CAPTIONS} earlier works"] += 1
        else:
            seen[result.caption] += 1
            captioned[name] = result
    files = ((name, content) for name, content in deb_files(archives["clipart"], ".png") if name in captioned)
    return drawn(captioned, files, left_out, "clip art")


def metadata(svg: str) -> dict[str, Any]:
    """Return title, keywords, author, licence and language in the metadata of an SVG; empty without metadata."""
    work = re.search(r"<cc:Work\b.*?</cc:Work>", svg, re.DOTALL)
    if work is None:
        return {}
    text = work.group(0)

    def first(pattern: str) -> str:
        match = re.search(pattern, text, re.DOTALL)
        return html.unescape(match.group(1)).strip() if match else ""

    return {
        "title": first(r"<dc:title>(.*?)</dc:title>"),
        "author": first(r"<dc:creator>.*?<dc:title>(.*?)</dc:title>"),
        "licence": first(r'<cc:license[^>]*resource="([^"]*)"'),
        "language": first(r"<dc:language>(.*?)</dc:language>"),
        "keywords": [html.unescape(word).strip() for word in re.findall(r"<rdf:li>(.*?)</rdf:li>", text, re.DOTALL)],
    }


def captioned_work(name: str, work: dict[str, Any], is_collection: bool) -> Picture | str:
    """Return the clip art with its caption, or the reason to leave it out.

    name: path of the file below `svg/`, without its extension. is_collection: the title is that of a collection; the
    words of the file's name then replace it.
    """
    if not work:
        return "no metadata"
    if not re.search(r"public.?domain", work["licence"], re.IGNORECASE):
        return "licence is not public domain"
    if work["language"][:2].lower() not in ("en", "al", ""):
        return "language is not English"
    author = set(words(work["author"]))
    is_collection |= bool(re.search(r"collection|icon.?set|theme|cliparts|clipart by", work["title"], re.IGNORECASE))
    title = words(name.rpartition("/")[2] if is_collection else work["title"])
    if is_collection:
        title = [word for word in title if len(word) > 2 and not any(part.startswith(word) for part in author)]
    if not title:
        return "no title"
    if not "".join(title).isascii() or FOREIGN & set(title):
        return "title is not English"
    keywords: list[str] = []
    for keyword in work["keywords"]:
        parts = words(keyword)
        usable = parts and "".join(parts).isascii() and not NO_KEYWORDS & set(parts) and not author & set(parts)
        if usable and " ".join(parts) not in [*keywords, " ".join(title)] and not set(parts) <= set(title):
            keywords.append(" ".join(parts))
    label = "/".join(name.split("/")[:-1][:2])
    facts = {"author": work["author"], "file": name}
    return Picture(f"clipart/{name}", "clipart", " ".join(title), keywords[:KEYWORDS], label, facts)


def words(text: str) -> list[str]:
    """Return the words of a title or file name in lower case: camel case is split, numbers are left out."""
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text) if " " not in text.strip() else text
    parts = re.split(r"[^\w']+|_+", text.lower())
    parts = [re.sub(r"\d+$", "", part) for part in parts]
    return [part for part in parts if part.strip("'") and not re.search(r"\d", part) and (len(part) > 1 or part == "a")]


def deb_files(archive: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path below the folder named as the suffix, without suffix; content) of the files of a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as files,
    ):
        for member in files:
            name = member.name.partition(f"/openclipart/{suffix[1:]}/")[2]
            if member.isfile() and name.endswith(suffix):
                yield name.removesuffix(suffix), files.extractfile(member).read()  # type: ignore[union-attr]  # not None: a file
    if process.returncode:
        raise SystemExit(f"dpkg-deb cannot read {archive}; remove it and start again")


# --- emoji ------------------------------------------------------------------------------------------------------------


def emoji(archive: Path, design: str, left_out: Counter[str]) -> list[Picture]:
    """Return the emoji of one design, with all skin tones. left_out: receives the counts of those without a picture."""
    with tarfile.open(archive) as files:
        entries = json.load(files.extractfile("package/emoji.json"))  # type: ignore[arg-type]  # not None: a file
    named: dict[str, Picture] = {}
    for entry in entries:
        if entry["category"] == "Component":  # swatches of skin tones
            continue
        name = entry["name"].lower()
        short = [short.replace("flag-", "").replace("-", " ").replace("_", " ") for short in entry["short_names"]]
        keywords = [text for text in short if len(text) > 2 and not set(text.split()) <= set(re.split(r"\W+", name))]
        for tone, image in [("", entry), *entry.get("skin_variations", {}).items()]:
            if image[f"has_img_{design}"]:
                tones = " and ".join(dict.fromkeys(TONES[part] for part in tone.split("-"))) if tone else ""
                title = f"{name}, {tones}" if tones else name
                facts = {"emoji": entry["unified"]}
                label = f"{entry['category']}/{entry['subcategory']}"
                key = f"{design}/{image['image'].removesuffix('.png')}"
                named[image["image"]] = Picture(key, design, title, keywords, label, facts, bool(tone))
            else:
                left_out[f"emoji: {design} has no picture"] += 1

    def read() -> Iterator[tuple[str, bytes]]:
        with tarfile.open(archive) as files:
            for member in files:
                folder, _, name = member.name.rpartition("/")
                if folder == f"package/img/{design}/64" and name in named:
                    yield name, files.extractfile(member).read()  # type: ignore[union-attr]  # not None: a file

    return drawn(named, read(), left_out, "emoji")


# --- pictures ---------------------------------------------------------------------------------------------------------


def drawn(
    captioned: dict[str, Picture], files: Iterable[tuple[str, bytes]], left_out: Counter[str], kind: str
) -> list[Picture]:
    """Return the pictures of `captioned` with their contents, in the order of their keys."""
    result = []
    with Pool(os.cpu_count()) as pool:
        for name, encoded in pool.imap(encode, files, chunksize=8):
            picture = captioned.pop(name)
            if isinstance(encoded, str):
                left_out[f"{kind}: {encoded}"] += 1
                continue
            picture.content, picture.thumbnail = encoded
            result.append(picture)
    left_out[f"{kind}: picture is a link to that of another work"] += len(captioned)
    return sorted(result, key=lambda picture: picture.key)


def encode(file: tuple[str, bytes]) -> tuple[str, tuple[bytes, np.ndarray] | str]:
    """Return the name of a PNG, and it on a white square as (WebP, thumbnail) or the reason to leave it out."""
    name, content = file
    Image.MAX_IMAGE_PIXELS = None  # the size is checked below
    try:
        image: Image.Image = Image.open(io.BytesIO(content))
        if image.width * image.height > LARGEST_PIXELS:
            return name, f"more than {LARGEST_PIXELS // 1_000_000} megapixels"
        if max(image.size) < SMALLEST_SIDE:
            return name, f"smaller than {SMALLEST_SIDE} pixels"
        if max(image.size) > 4 * SIZE:  # a thumbnail first, because most of the time is spent here
            image = image.convert("RGBA").reduce(max(image.size) // (2 * SIZE))
        image = image.convert("RGBA")
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError):
        return name, "picture cannot be decoded"
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    picture = square.convert("RGB")
    if side > SIZE:
        picture = picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    if np.asarray(picture).std() < 4:
        return name, "picture is blank"
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=90, method=4)
    thumbnail = picture.resize((16, 16), Image.Resampling.BOX)
    return name, (buffer.getvalue(), np.asarray(thumbnail, np.float32).ravel())


# --- splits -----------------------------------------------------------------------------------------------------------


def unique(pictures: list[Picture], left_out: Counter[str]) -> list[Picture]:
    """Return the pictures without those whose file equals an earlier one, such as emoji that one design borrows."""
    seen, result = set(), []
    for picture in pictures:
        digest = hashlib.sha256(picture.content).digest()
        if digest in seen:
            left_out[f"{'clip art' if picture.is_clip_art else 'emoji'}: equal to an earlier picture"] += 1
        else:
            seen.add(digest)
            result.append(picture)
    return result


def group(pictures: list[Picture]) -> list[int]:
    """Return the group of every picture: pictures of one emoji, with one title, or nearly equal are together."""
    parents = list(range(len(pictures)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    def join(first: int, second: int) -> None:
        first, second = sorted((root(first), root(second)))
        parents[second] = first

    same: dict[str, int] = {}
    for index, picture in enumerate(pictures):
        identity = " ".join(word for word in re.findall(r"[a-z']+", picture.title) if word not in NO_IDENTITY)
        keys = [f"title {identity}"] if identity else []
        keys += [] if picture.is_clip_art else [f"emoji {picture.facts['emoji']}"]
        for key in keys:
            join(same.setdefault(key, index), index)
    thumbnails = np.stack([picture.thumbnail for picture in pictures])
    squares = (thumbnails**2).sum(1)
    for start in range(0, len(pictures), 1024):
        block = slice(start, start + 1024)
        distances = squares[block, None] + squares[None, start:] - 2 * thumbnails[block] @ thumbnails[start:].T
        for row, column in np.argwhere(distances < NEAR**2 * thumbnails.shape[1]):
            if column > row:
                join(start + int(row), start + int(column))
    return [root(index) for index in range(len(pictures))]


def assign_splits(pictures: list[Picture], groups: list[int]) -> None:
    """Give every group a split, by the hash of the key of its first picture. The largest groups are for training."""
    sizes = Counter(groups)
    for picture, number in zip(pictures, groups, strict=True):
        digest = hashlib.sha256(f"split {pictures[number].key}".encode()).digest()
        place = int.from_bytes(digest[:4], "big") / 2**32
        picture.split = "train"
        if sizes[number] <= 200:
            picture.split = "test" if place < SHARES["test"] else "val" if place < sum(SHARES.values()) else "train"


# --- files ------------------------------------------------------------------------------------------------------------


def write_tar(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Write one tar shard. samples: (key, contents by extension). All times and owners are zero."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as files:
        for key, contents in samples:
            for extension, content in contents.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                files.addfile(member, io.BytesIO(content))


def write_shards(out: Path, pictures: list[Picture]) -> None:
    def sample(picture: Picture) -> tuple[str, dict[str, bytes]]:
        return picture.order.hex()[:12], {"webp": picture.content, "txt": picture.caption.encode()}

    def facts(picture: Picture) -> str:
        own = {"key": picture.order.hex()[:12], "split": picture.split, "collection": picture.collection}
        own |= {"title": picture.title, "keywords": ", ".join(picture.keywords), "label": picture.label}
        return json.dumps(own | {"licence": LICENCES[picture.collection]} | picture.facts) + "\n"

    ordered = sorted(pictures, key=lambda picture: picture.order)
    out.mkdir(parents=True, exist_ok=True)
    (out / "facts.jsonl").write_text("".join(map(facts, ordered)), encoding="utf-8")
    train = [picture for picture in ordered if picture.split == "train"]
    for shard in range(TRAIN_SHARDS):
        write_tar(out / "train" / f"{shard:02d}.tar", map(sample, train[shard::TRAIN_SHARDS]))
    for split in SHARES:
        write_tar(out / f"{split}.tar", (sample(picture) for picture in ordered if picture.split == split))


def write_suite(folder: Path, pictures: list[Picture], split: str) -> dict[str, str]:
    """Write the sets of one split in CLIP_benchmark's layout. Return their sizes, in words."""
    ordered = [picture for picture in sorted(pictures, key=lambda picture: picture.order) if not picture.is_variant]
    own = [picture for picture in ordered if picture.split == split]
    clip_art = [picture for picture in own if picture.is_clip_art]
    emoji_pictures = [picture for picture in own if not picture.is_clip_art]
    sizes: dict[str, str] = {}
    for kind, chosen in (("clipart", clip_art), ("emoji", emoji_pictures)):
        counts = Counter(picture.label for picture in ordered if picture.is_clip_art == (kind == "clipart"))
        labels = [label for label, count in sorted(counts.items()) if count >= LEAST_IMAGES and label not in NO_CLASSES]
        sizes |= write_classes(folder / f"wds_{kind}_folders_test", chosen, labels, class_name, lambda own: own.label)
        sizes |= write_retrieval(folder / f"wds_{kind}_retrieval_test", chosen)
    names = sorted({picture.title for picture in emoji_pictures})
    if emoji_pictures and {picture.collection for picture in emoji_pictures} == {HELD_OUT_DESIGN}:
        sizes |= write_classes(folder / "wds_emoji_names_test", emoji_pictures, names, str, lambda own: own.title)
    return sizes


def class_name(label: str) -> str:
    """Return "birds" for the folder animals/birds, and "animal, mammal" for the group animal-mammal of an emoji."""
    return label.rpartition("/")[2].replace("_", " ").replace("-", ", ")


def write_classes(
    folder: Path,
    pictures: list[Picture],
    labels: list[str],
    name: Callable[[str], str],
    label: Callable[[Picture], str],
) -> dict[str, str]:
    numbers = {text: number for number, text in enumerate(labels)}
    chosen = [picture for picture in pictures if label(picture) in numbers]
    if not chosen:
        return {}
    samples = [{"webp": own.content, "cls": str(numbers[label(own)]).encode()} for own in chosen]
    write_set(folder, samples)
    (folder / "classnames.txt").write_text("".join(f"{name(text)}\n" for text in labels), encoding="utf-8")
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{text}\n" for text in TEMPLATES))
    return {folder.name: f"{len(chosen)} pictures, {len(labels)} classes"}


def write_retrieval(folder: Path, pictures: list[Picture]) -> dict[str, str]:
    """Write pictures with different captions: of an emoji one design, because its caption is that of all designs."""
    chosen = list({picture.caption: picture for picture in pictures}.values())
    if not chosen:
        return {}
    write_set(folder, [{"webp": picture.content, "txt": picture.caption.encode()} for picture in chosen])
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return {folder.name: f"{len(chosen)} pairs"}


def write_set(folder: Path, samples: list[dict[str, bytes]]) -> None:
    write_tar(folder / "test" / "0.tar", ((f"s{row:07d}", sample) for row, sample in enumerate(samples)))
    (folder / "test" / "nshards.txt").write_text("1\n")


def write_report(
    out: Path,
    pictures: list[Picture],
    groups: int,
    archives: dict[str, Path],
    left_out: Counter[str],
    sets: dict[str, dict[str, str]],
    split: str,
) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for picture in pictures:
        counts[picture.collection][picture.split] += 1
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives.values()}
    shards = sorted([*out.glob("train/*.tar"), *out.glob("*.tar"), *out.glob("suite*/*/test/*.tar")])
    mib = sum(path.stat().st_size for path in shards) / 2**20
    report = {
        "split": split,
        "pictures": {name: dict(own) for name, own in counts.items()},
        "captions": len({picture.caption for picture in pictures}),
        "groups": groups,
        "left_out": dict(sorted(left_out.items())),
        "sets": sets,
        "mib": round(mib, 1),
        "archives": digests,
        "shards": {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in shards},
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = ["# Clip-art benchmark", "", f"Split by {split}, {mib:.1f} MiB.", ""]
    lines += ["| collection | train | val | test | licence |", "| --- | --- | --- | --- | --- |"]
    for name, own in counts.items():
        lines.append(f"| {name} | {own['train']:,} | {own['val']:,} | {own['test']:,} | {LICENCES[name]} |")
    total = sum(counts.values(), Counter[str]())
    lines.append(f"| all | {total['train']:,} | {total['val']:,} | {total['test']:,} | |")
    lines += ["", f"{report['captions']:,} different captions, {groups:,} groups that are not divided by a split.", ""]
    lines += [
        "| left out | count |",
        "| --- | --- |",
        *(f"| {name} | {n:,} |" for name, n in sorted(left_out.items()) if n),
    ]
    lines += ["", "| set | test | val |", "| --- | --- | --- |"]
    lines += [f"| {name} | {text} | {sets['suite_val'].get(name, '')} |" for name, text in sets["suite"].items()]
    lines += ["", "| archive | SHA-256 |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in digests.items())]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_samples(path: Path, pictures: list[Picture]) -> None:
    """Draw the first ten training samples, in the random order of the shards, that may be shown anywhere."""
    free = [own for own in pictures if own.split == "train" and own.collection in ("clipart", "google", "twitter")]
    width, height = 180, 184
    sheet = Image.new("RGB", (5 * width, 2 * height), "white")
    for place, picture in enumerate(sorted(free, key=lambda own: own.order)[:10]):
        left, top = place % 5 * width, place // 5 * height
        sheet.paste(Image.open(io.BytesIO(picture.content)), (left, top))
        lines = [picture.collection, *textwrap.wrap(picture.caption, 28)[:3]]
        ImageDraw.Draw(sheet).text((left, top + SIZE + 2), "\n".join(lines), fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    main()
