"""Digit scenes: reproducible, split by source image, captions match images."""

import contextlib
import io
import json
import tarfile
from argparse import Namespace
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from examples.digits import make_scenes
from megaclip.data import open_labelled, open_pairs


def make(folder, *options):
    """Run the script in this process and return its output. A new process would take seconds to import scikit-learn."""
    command = ["make_scenes.py", str(folder), "--train", "600", "--held-out", "120", "--zero-shot", "50", *options]
    printed = io.StringIO()
    with mock.patch("sys.argv", command), contextlib.redirect_stdout(printed):
        make_scenes.main()
    return printed.getvalue()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "scenes"
    make(folder, "--shard-size", "200")
    return folder


def members(folder, extension):
    contents = []
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            contents += [tar.extractfile(m).read() for m in tar if m.name.endswith("." + extension)]
    return contents


def test_files_depend_on_the_seed_only(scenes, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    make(again, "--shard-size", "200")
    make(other, "--shard-size", "200", "--seed", "1")
    names = [path.relative_to(scenes) for path in sorted(scenes.rglob("*.tar"))]
    assert len(names) == 3 + 1 + 1
    for name in names:
        assert (scenes / name).read_bytes() == (again / name).read_bytes() != (other / name).read_bytes()


def test_train_and_held_out_scenes_share_no_handwritten_digit(scenes):
    drawn = {
        split: {source for record in members(scenes / split, "json") for source in json.loads(record)["sources"]}
        for split in ("train", "held_out")
    }
    assert drawn["train"] and drawn["held_out"] and not drawn["train"] & drawn["held_out"]


def test_held_out_captions_are_distinct():
    """Otherwise retrieval would be ambiguous. Of so many scenes, some would be equal by chance."""
    samples = make_scenes.held_out_samples(Namespace(seed=0, held_out=600))
    captions = [content for files in samples for name, content in files.items() if name.endswith(".txt")]
    assert len(set(captions)) == len(captions) == 600


def test_captions_name_the_digits_of_scikit_learns_labels(scenes):
    labels = make_scenes.load_handwriting()[1]
    for split in ("train", "held_out"):
        for record, caption in zip(members(scenes / split, "json"), members(scenes / split, "txt"), strict=True):
            words = [word.strip(",") for word in caption.decode().split()]
            named_digits = Counter(word for word in words if word in make_scenes.DIGITS)
            assert named_digits == Counter(
                make_scenes.DIGITS[labels[source]] for source in json.loads(record)["sources"]
            )


def test_positions_and_colours_match_the_caption():
    """The reference is the position of each colour's pixels in the image."""
    generator = np.random.default_rng(0)
    rows = make_scenes.sources_by_digit("train", 0)
    shares = make_scenes.Shares(single=0.0, colours_named=1.0, ground_named=1.0)
    checked = Counter()
    for _ in range(200):
        scene = make_scenes.invent(generator, rows, 0.0)
        if len(scene.digits) != 2 or scene.ground != "black":
            continue
        pixels = np.asarray(Image.open(io.BytesIO(make_scenes.draw(scene, generator))), dtype=float)
        words = make_scenes.describe(scene, shares, generator).split()
        first, second = (colour for colour in words if colour in make_scenes.COLOURS)
        centres = []
        for colour in (first, second):
            direction = np.array(make_scenes.COLOURS[colour]) / np.linalg.norm(make_scenes.COLOURS[colour])
            length = np.linalg.norm(pixels, axis=2)
            likeness = (pixels @ direction) / np.maximum(length, 1)
            y, x = np.nonzero((likeness > 0.99) & (length > 100))
            centres.append((x.mean(), y.mean()))
        (x1, y1), (x2, y2) = centres
        true = {"left": x1 < x2, "right": x1 > x2, "above": y1 < y2, "below": y1 > y2}
        (relation,) = [word for word in words if word in true]
        assert true[relation], words
        checked[relation] += 1
    assert len(checked) == 4


def test_captions_name_digits_first_and_colours_later(scenes):
    def share(captions, words):
        return np.mean([bool(words & set(caption.decode().split())) for caption in captions])

    captions = members(scenes / "train", "txt")
    colours = set(make_scenes.COLOURS)
    assert share(captions[:100], colours) < 0.25 and share(captions[-100:], colours) > 0.75
    single = [len(json.loads(record)["digits"]) == 1 for record in members(scenes / "train", "json")]
    assert np.mean(single[:100]) > 0.75 > 0.55 > np.mean(single[-100:])


def test_the_written_files_open_as_pairs_and_as_labelled_images(scenes):
    pairs = open_pairs([str(scenes / "train" / "*.tar")])
    assert len(pairs) == 600 and pairs.shard_sizes.tolist() == [200] * 3
    labelled = open_labelled(scenes / "zero_shot")
    assert labelled.class_names == list(make_scenes.DIGITS) and len(labelled) == 50
    assert all("{c}" in template for template in labelled.templates)
    image = Image.open(io.BytesIO(labelled.read(0).image))
    assert image.size == (24, 24) and image.format == "JPEG"


def test_equal_settings_change_nothing_and_other_settings_replace_the_scenes(tmp_path):
    folder = tmp_path / "scenes"
    assert "wrote 600 training" in make(folder, "--shard-size", "100")
    assert "already" in make(folder, "--shard-size", "100")
    assert "wrote 600 training" in make(folder, "--shard-size", "300")
    assert len(list((folder / "train").glob("*.tar"))) == 2
