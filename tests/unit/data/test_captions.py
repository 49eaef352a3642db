"""Captions in JSON fields and in files beside images. Texts, images and shards that cannot be used."""

import json
import os

import pytest

from megaclip.data import open_labelled, open_pairs
from megaclip.data.batch import BadSample, RawSample
from megaclip.data.reading import check_caption
from megaclip.data.text_cleaning import clean_caption
from megaclip.errors import DataError
from tests.unit.data.data_samples import (
    COUNT,
    captions,
    images,
    pair_members,
    picture,
    texts,
    write_folder_of_pairs,
    write_tar,
)


def make_tars_with_json(folder):
    """Write img2dataset's webdataset layout, without the .txt members."""
    for shard, numbers in enumerate(([0, 1], [2, 3, 4])):
        write_tar(folder / f"{shard:05d}.tar", [member for n in numbers for member in _with_json(n)])
    return str(folder / "*.tar")


def make_folder_with_json(folder):
    """Write img2dataset's `--output_format files` layout, without the .txt files."""
    for number in range(COUNT):
        for name, content in _with_json(number):
            (folder / name).write_bytes(content)
    return str(folder)


def _with_json(number):
    record = {"url": "http://x", "caption": f"caption {number}", "width": 12}
    return [(f"{number:06d}.png", picture(number)), (f"{number:06d}.json", json.dumps(record).encode())]


@pytest.mark.parametrize("make", [make_tars_with_json, make_folder_with_json])
@pytest.mark.parametrize("key", ["caption", "json.caption", "alt;json.caption", "json.title;json.caption"])
def test_captions_in_a_field_of_json_are_read(tmp_path, make, key):
    spec = make(tmp_path)
    dataset = open_pairs([spec], caption_key=key)
    assert captions(dataset) == texts() == [dataset.caption(number) for number in range(COUNT)]
    assert images(dataset) == [picture(n) for n in range(COUNT)] and dataset.accounts[0].problems == {}


@pytest.mark.parametrize("make", [make_tars_with_json, make_folder_with_json])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "the fields url, caption: set --caption-key to one of them, as in json.caption"),
        ("json", "--caption-key 'json' names whole JSON files; add the field, such as json.caption"),
        ("meta.JSON", "--caption-key 'meta.JSON' names whole JSON files; add the field, such as json.caption"),
        ("json.title", "have no field title; the first one has the fields url, caption"),
        ("title;words", "have no field title or words; the first one has the fields url, caption"),
    ],
)
def test_the_error_for_captions_in_json_names_the_fields(tmp_path, make, key, message):
    """The error must list the fields of the JSON members.

    --caption-key json must not train on the raw text of the members. Without the flag, no sample may lack a caption.
    """
    spec = make(tmp_path)
    with pytest.raises(DataError) as caught:
        open_pairs([spec], caption_key=key)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_shards_without_captions_or_images_name_the_members_that_they_have(tmp_path):
    path = write_tar(tmp_path / "shard.tar", [("0.foo", b"raw"), ("0.words", b"a"), ("0.txt", b"b")])
    with pytest.raises(DataError, match=r"has an image .*they have \.foo, \.words members: set --image-key to one"):
        open_pairs([str(path)])
    with pytest.raises(DataError, match=r"has a caption .*they have \.txt, \.words members: set --caption-key to one"):
        open_pairs([str(path)], image_key="foo", caption_key="title")
    path = write_tar(tmp_path / "dotted.tar", [("0.jpg", b"raw"), ("1.1.jpg", b"raw"), ("1.1.json", b"{}")])
    with pytest.raises(DataError, match=r"\.1\.json members: set --caption-key to one of them; a dot before the ext"):
        open_pairs([str(path)])


JSON_CAPTIONS = {
    "two captions": b'{"caption": ["a  b", "c"]}',
    "number": b'{"caption": 3}',
    "null": b'{"caption": null}',
    "list": b"[1, 2]",
    "broken": b'{"caption": "x',
    "nested": b"[" * 200_000,
    "not UTF-8": b'{"caption": "gr\xfcn"}',
}


def test_a_json_caption_that_is_no_text_is_a_bad_sample(tmp_path):
    members = [
        m for n, text in enumerate(JSON_CAPTIONS.values()) for m in ((f"{n}.png", picture(n)), (f"{n}.json", text))
    ]
    write_tar(tmp_path / "shard.tar", members)
    for name, content in members:
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    for spec in (tmp_path / "shard.tar", tmp_path / "folder"):
        dataset = open_pairs([str(spec)], caption_key="json.caption")
        assert dataset.read(0).alternatives == ("a b", "c")
        kinds = []
        for row in range(1, len(JSON_CAPTIONS)):
            with pytest.raises(BadSample) as caught:
                dataset.read(row)
            kinds.append(caught.value.kind)
        assert kinds == ["missing caption"] * 2 + ["undecodable JSON"] * 3 + ["caption is not UTF-8"]


def test_empty_captions_in_a_list_are_left_out(tmp_path):
    """No sample may be trained on one of its empty captions."""
    lists = [["", "a  cat", "   ", None, "\0"], ["", " "]]
    records = [{"image": f"{n}.png", "caption": captions} for n, captions in enumerate(lists)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(picture(n))
    members = [
        member
        for n, record in enumerate(records)
        for member in ((f"{n}.png", picture(n)), (f"{n}.json", json.dumps(record).encode()))
    ]
    write_tar(tmp_path / "shard.tar", members)
    for dataset in (
        open_pairs([str(tmp_path / "table.jsonl")]),
        open_pairs([str(tmp_path / "shard.tar")], caption_key="json.caption"),
    ):
        assert (dataset.read(0).alternatives or (dataset.read(0).caption,)) == ("a cat",)
        assert dataset.caption(0) == "a cat"
        with pytest.raises(BadSample) as caught:
            dataset.read(1)
        assert caught.value.kind == "empty caption"


def test_captions_that_are_not_utf_8_are_bad_samples(tmp_path):
    """Latin-1 bytes must not silently become replacement characters."""
    write_tar(tmp_path / "shard.tar", [("0.png", picture(0)), ("0.txt", "gr\xfcn".encode("latin-1"))])
    write_folder_of_pairs(tmp_path / "folder")
    (tmp_path / "folder" / "0.txt").write_bytes("gr\xfcn".encode("latin-1"))
    for spec in ("shard.tar", "folder"):
        dataset = open_pairs([str(tmp_path / spec)])
        for read in (dataset.read, dataset.caption):
            with pytest.raises(
                BadSample, match=r"caption is not UTF-8: .*byte 0xfc at position 2; convert it to UTF-8"
            ):
                read(0)


@pytest.mark.parametrize("name", ["0.tar.gz", "0.tgz", "0.TAR.zst"])
def test_compressed_shards_are_refused_with_the_command(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    for spec, kind in ((tmp_path / name, "auto"), (tmp_path, "auto"), (tmp_path, "webdataset")):
        with pytest.raises(DataError, match=rf"{name} is compressed.*gunzip shards/\*\.tar\.gz"):
            open_pairs([str(spec)], dataset_type=kind)


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    """Some programs on Windows write one."""
    content = b"\xef\xbb\xbf" + json.dumps({"caption": "a cat"}).encode()
    shard = write_tar(tmp_path / "0.tar", [("0.png", picture(0)), ("0.json", content)])
    assert open_pairs([str(shard)], caption_key="json.caption").caption(0) == "a cat"


@pytest.mark.parametrize("text", ["", " \n", "\0", "\u00a0", "\u3000\n", "\ufeff", "\ufeff \n"])
def test_a_caption_that_cleaning_makes_empty_is_a_bad_sample(text):
    """The text U+00A0, a no-break space, is empty after cleaning. No sample may be trained on without a caption."""
    assert clean_caption(text) == ""
    with pytest.raises(BadSample, match="empty caption: a: only spaces" if text else "empty caption: a: no text"):
        check_caption(RawSample(b"", text, "a"))


def test_pipes_and_devices_in_a_folder_are_bad_samples(tmp_path):
    """Reading them would block or never end."""
    write_folder_of_pairs(tmp_path / "pairs")
    for number, where in enumerate((tmp_path / "pairs", tmp_path / "pairs", tmp_path / "pairs")):
        path = where / f"{number}.{'txt' if number == 0 else 'JPG'}"
        path.unlink()
        os.mkfifo(path) if number < 2 else path.symlink_to("/dev/zero")
    dataset = open_pairs([str(tmp_path / "pairs")])
    kinds = []
    for row in range(3):
        with pytest.raises(BadSample) as caught:
            dataset.read(row)
        kinds.append(caught.value.kind)
    assert kinds == ["missing caption", "missing image", "missing image"]
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "classes" / name / "0.png")
    with pytest.raises(BadSample, match="is not a file"):
        open_labelled(tmp_path / "classes").read(0)
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match=r"pipe\.tar is neither a file nor a folder"):
        open_pairs([str(tmp_path / "pipe.tar")])


def test_class_names_that_are_not_utf_8_are_an_error(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(picture(1))
    (tmp_path / "classnames.txt").write_bytes(b"gr\xfcn\nrot\n")
    with pytest.raises(DataError, match=r"classnames\.txt is not UTF-8"):
        open_labelled(tmp_path)


def test_a_picture_without_a_caption_is_counted(tmp_path):
    write_folder_of_pairs(tmp_path / "pairs")
    (tmp_path / "pairs" / "1.txt").unlink()
    write_tar(tmp_path / "shard.tar", [*pair_members([0]), ("1.png", picture(1)), ("2.txt", b"caption 2")])
    assert open_pairs([str(tmp_path / "pairs")]).accounts[0].problems == {"missing caption": 1}
    problems = open_pairs([str(tmp_path / "shard.tar")]).accounts[0].problems
    assert problems == {"missing caption": 1, "missing image": 1}


@pytest.mark.parametrize(
    "text", ["&nbsp;", "&amp;nbsp; &#160;", "\x01\x02", "\u200b\u200d", "&#8203;\t&zwj;", "&#x7f;"]
)
def test_a_caption_that_shows_nothing_is_a_bad_sample_in_every_source(tmp_path, text):
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "x.jsonl").write_text(json.dumps({"image": "0.png", "text": text}))
    shard = write_tar(tmp_path / "0.tar", [("0.png", picture(0)), ("0.txt", text.encode())])
    for spec in (tmp_path / "x.jsonl", shard):
        with pytest.raises(BadSample, match="empty caption"):
            check_caption(open_pairs([str(spec)]).read(0))
    check_caption(RawSample(b"", f"{text}\u00e9", "a"))


def test_shards_in_sub_folders_are_refused_with_the_pattern(tmp_path):
    for name in ("deep/0.tar", "0.tar"):
        write_tar(tmp_path / name, pair_members([0]))
        with pytest.raises(DataError, match=r"deep/0\.tar is in a sub-folder; give '.*/\*\*/\*\.tar' for the files of"):
            open_pairs([str(tmp_path)])
    assert len(open_pairs([str(tmp_path / "**" / "*.tar")])) == 2
