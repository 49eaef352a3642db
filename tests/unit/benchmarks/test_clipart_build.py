"""The clip-art benchmark: captions from metadata, and splits that cannot leak (benchmarks/clipart/build.py)."""

import importlib.util
import io
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PATH = Path(__file__).parents[3] / "benchmarks" / "clipart" / "build.py"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("clipart_build", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SVG = """<svg><metadata><cc:Work rdf:about=""><dc:title>{title}</dc:title><dc:subject><rdf:Bag><rdf:li>mammal</rdf:li>
<rdf:li></rdf:li><rdf:li>hash</rdf:li><rdf:li>dog</rdf:li></rdf:Bag></dc:subject><dc:creator><cc:Agent>
<dc:title>Jos Archer</dc:title></cc:Agent></dc:creator><cc:license rdf:resource="http://web.resource.org/cc/{licence}"/>
<dc:language>{language}</dc:language></cc:Work></metadata></svg>"""


@pytest.mark.parametrize(
    "title, is_collection, licence, language, expected",
    [
        ("BoredDog3", False, "PublicDomain", "en", "bored dog, mammal"),
        (" Cat &amp; mouse_01", False, "PublicDomain", "en", "cat mouse, mammal, dog"),
        ("Lemon SVG theme", False, "PublicDomain", "en", "brown bear, mammal, dog"),
        ("card", True, "PublicDomain", "en", "brown bear, mammal, dog"),
        ("12", False, "PublicDomain", "en", "no title"),
        ("le chien", False, "PublicDomain", "en", "title is not English"),
        ("Fähre", False, "PublicDomain", "en", "title is not English"),
        ("dog", False, "PublicDomain", "nl", "language is not English"),
        ("dog", False, "GPL", "en", "licence is not public domain"),
    ],
)
def test_captions_are_titles_and_keywords(build, title, is_collection, licence, language, expected):
    work = build.metadata(SVG.format(title=title, licence=licence, language=language))
    found = build.captioned_work("animals/mammals/brown_bear_archer_01", work, is_collection)
    assert (found if isinstance(found, str) else found.caption) == expected


def test_no_split_divides_a_group(build):
    generator = np.random.default_rng(0)
    pictures = []
    for number in range(60):
        thumbnail = generator.uniform(0, 255, 768).astype(np.float32)
        for design in ("apple", "google"):  # two designs of one emoji look different
            facts = {"emoji": str(number)}
            own = build.Picture(f"{design}/{number}", design, f"emoji {chr(97 + number // 26)}", [], "x", facts)
            own.thumbnail = generator.uniform(0, 255, 768).astype(np.float32)
            pictures.append(own)
        for copy in range(2):  # nearly the same picture under two titles
            title = f"{'abcdefghij'[number % 10]}{'klmnopqrst'[number // 10]}{'xy'[copy]}"
            own = build.Picture(f"clipart/{number}-{copy}", "clipart", title, [], "x")
            own.thumbnail = thumbnail + generator.normal(0, 3, 768).astype(np.float32)
            pictures.append(own)
    groups = build.group(pictures)
    build.assign_splits(pictures, groups)
    splits = defaultdict(set)
    for picture in pictures:
        number = picture.key.partition("/")[2].partition("-")[0]
        splits["clip art" if picture.is_clip_art else "emoji", number].add(picture.split)
    assert all(len(own) == 1 for own in splits.values())
    assert {picture.split for picture in pictures} == {"train", "val", "test"}
    assert len({group for group, own in zip(groups, pictures, strict=True) if own.is_clip_art}) == 60


def test_pictures_are_on_a_white_square_and_blank_ones_are_left_out(build):
    def encoded(image):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return build.encode(("name", buffer.getvalue()))[1]

    content, thumbnail = encoded(Image.new("RGBA", (300, 100), (255, 0, 0, 255)))
    picture = Image.open(io.BytesIO(content))
    assert picture.size == (112, 112) and thumbnail.shape == (768,)
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    assert np.abs(pixels[5, 56] - 255).max() < 8 and np.abs(pixels[56, 56] - [255, 0, 0]).max() < 8
    assert encoded(Image.new("RGBA", (64, 64), (0, 0, 0, 0))) == "picture is blank"
    assert encoded(Image.new("RGBA", (20, 20), "red")) == "smaller than 32 pixels"
    assert build.encode(("name", b"no picture"))[1] == "picture cannot be decoded"
