"""Captions in JSON fields and in files beside images. Texts, images and shards that cannot be used."""

import json
import os

import pytest

from megaclip.data import open_labelled, open_pairs
from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.reading import check_caption
from megaclip.errors import DataError
from tests.unit.data.data_samples import (
    COUNT,
    captions,
    images,
    outcomes,
    pair_members,
    picture,
    texts,
    write_folder_of_pairs,
    write_json_pairs,
    write_table,
    write_tar,
)

RECORDS = [{"url": "http://x", "caption": text, "width": 12} for text in texts()]


@pytest.mark.parametrize("key", ["caption", "json.caption", "alt;json.caption", "json.title;json.caption"])
def test_captions_in_a_field_of_json_are_read(tmp_path, key):
    for spec in write_json_pairs(tmp_path, RECORDS):
        dataset = open_pairs([spec], caption_key=key)
        assert captions(dataset) == texts() == [dataset.caption(number) for number in range(COUNT)]
        assert images(dataset) == [picture(n) for n in range(COUNT)] and dataset.accounts[0].problems == {}


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
def test_the_error_for_captions_in_json_names_the_fields(tmp_path, key, message):
    """--caption-key json must not train on the text of the members. Without the flag, no sample may lack a caption."""
    for spec in write_json_pairs(tmp_path, RECORDS):
        with pytest.raises(DataError) as caught:
            open_pairs([spec], caption_key=key)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    (spec, *_) = write_json_pairs(tmp_path / "nested", [{"url": "x", "captions": {"long": "a dog"}}])
    with pytest.raises(
        DataError, match=r"has the fields url \(fields inside captions are not read; write them outside\)"
    ):
        open_pairs([spec], caption_key="json.captions.long")


def test_shards_without_captions_or_images_name_the_members_that_they_have(tmp_path):
    path = write_tar(tmp_path / "shard.tar", [("._0.foo", b""), ("0.foo", b"raw"), ("0.words", b"a"), ("0.txt", b"b")])
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
    "half of a surrogate pair": b'{"caption": "a \\ud800"}',
    "list": b"[1, 2]",
    "broken": b'{"caption": "x',
    "nested": b"[" * 200_000,
    "byte order mark": b'\xef\xbb\xbf{"caption": "a cat"}',
    "not UTF-8": b'{"caption": "gr\xfcn"}',
}


def test_a_json_caption_that_is_no_text_is_a_bad_sample(tmp_path):
    for spec in write_json_pairs(tmp_path, JSON_CAPTIONS.values()):
        dataset = open_pairs([spec], caption_key="json.caption")
        assert dataset.read(0).captions.texts == ("a b", "c")
        bad = ["missing caption"] * 3 + ["undecodable JSON"] * 3
        assert outcomes(dataset)[1:] == [*bad, "a cat", "caption is not UTF-8"]


def test_empty_captions_in_a_list_are_left_out(tmp_path):
    """No sample may be trained on one of its empty captions."""
    lists = [["", "a  cat", "   ", None, "\0"], '["", " "]']  # the second one as a text in JSON
    records = [{"image": f"{n:06d}.png", "caption": captions} for n, captions in enumerate(lists)]
    shard, folder = write_json_pairs(tmp_path, records)
    table = write_table(tmp_path / "files" / "table.jsonl", records)
    for spec, key in ((table, "caption"), (shard, "json.caption"), (folder, "json.caption")):
        dataset = open_pairs([spec], dataset_type="imagefolder" if spec == folder else "auto", caption_key=key)
        assert dataset.read(0).captions.texts == ("a cat",) and outcomes(dataset) == ["a cat", "empty caption"]


def test_captions_that_are_not_utf_8_are_bad_samples(tmp_path):
    """Latin-1 bytes must not silently become replacement characters. A byte order mark is no part of a caption."""
    write_tar(tmp_path / "marked.tar", [("0.png", picture(0)), ("0.txt", "\ufeffred".encode())])
    assert open_pairs([str(tmp_path / "marked.tar")]).caption(0) == "red"
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
    (tmp_path / "folder" / "0.txt").write_text("red", encoding="utf-16")
    with pytest.raises(BadSample, match="byte 0xff at position 0; convert it from UTF-16 to UTF-8"):
        dataset.caption(0)


@pytest.mark.parametrize("name", ["0.tar.gz", "0.tgz", "0.TAR.zst"])
def test_compressed_shards_are_refused_with_the_command(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    for spec, kind in ((tmp_path / name, "auto"), (tmp_path, "auto"), (tmp_path, "webdataset")):
        with pytest.raises(DataError, match=rf"{name} is compressed.*gunzip shards/\*\.tar\.gz"):
            open_pairs([str(spec)], dataset_type=kind)


def test_pipes_and_devices_in_a_folder_are_bad_samples(tmp_path):
    """Reading them would block or never end."""
    write_folder_of_pairs(tmp_path / "pairs")
    for number, name in enumerate(("0.txt", "1.JPG", "2.JPG")):
        path = tmp_path / "pairs" / name
        path.unlink()
        os.mkfifo(path) if number < 2 else path.symlink_to("/dev/zero")
    (tmp_path / "pairs" / "deep" / "er" / "3.txt").unlink()
    dataset = open_pairs([str(tmp_path / "pairs")])
    bad = ["missing caption", "missing image", "missing image", "missing caption"]
    assert outcomes(dataset) == [*bad, "caption 4"]
    assert dataset.accounts[0].problems == {"missing caption": 1}
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "classes" / name / "0.png")
    with pytest.raises(BadSample, match="is not a file"):
        open_labelled(tmp_path / "classes").read(0)
    (tmp_path / "classes" / "classnames.txt").write_bytes(b"gr\xfcn\nrot\n")
    with pytest.raises(DataError, match=r"classnames\.txt is not UTF-8"):
        open_labelled(tmp_path / "classes")


SHOWS_NOTHING = ["", " \n", "\0", "\u00a0", "\u3000\n", "\ufeff \n", "&nbsp;", "&amp;nbsp; &#160;", "\x01\x02"]
SHOWS_NOTHING += ["\u2800", "\u200b\u200d", "&#8203;\t&zwj;", "&#x7f;"]


@pytest.mark.parametrize("text", SHOWS_NOTHING)
def test_a_caption_that_shows_nothing_is_a_bad_sample_in_every_source(tmp_path, text):
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "x.jsonl").write_text(json.dumps({"image": "0.png", "text": text}))
    shard = write_tar(tmp_path / "0.tar", [("0.png", picture(0)), ("0.txt", text.encode())])
    for spec in (tmp_path / "x.jsonl", shard):
        with pytest.raises(BadSample, match="empty caption: .*only spaces" if text else "empty caption: .*no text"):
            check_caption(open_pairs([str(spec)]).read(0))
    check_caption(RawSample(b"", Captions((f"{text}\u00e9",)), "a"))


def test_shards_in_sub_folders_are_refused_with_the_pattern(tmp_path):
    for name in ("deep/0.tar", "0.tar"):
        write_tar(tmp_path / name, pair_members([0]))
        with pytest.raises(DataError, match=r"deep/0\.tar is in a sub-folder; give '.*/\*\*/\*\.tar' for the files of"):
            open_pairs([str(tmp_path)])
    assert len(open_pairs([str(tmp_path / "**" / "*.tar")])) == 2
