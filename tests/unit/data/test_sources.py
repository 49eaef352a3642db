"""Sources: every file format yields equal pairs; file patterns, mixtures, and manifests that detect changed data."""

import csv
import datetime
import errno
import json
import logging
import os

import pyarrow
import pytest
from pyarrow import parquet

from megaclip.data import check_manifest, open_labelled, open_pairs, patterns
from megaclip.data.batch import BadSample
from megaclip.data.order import ROWS_PER_SHARD
from megaclip.data.patterns import expand_braces, expand_pattern
from megaclip.data.tables import parse_hub_name
from megaclip.errors import DataError
from tests.unit.data.data_samples import (
    COUNT,
    captions,
    images,
    pair_members,
    picture,
    texts,
    write_folder_of_pairs,
    write_shards,
    write_tar,
)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """Make `datasets` store its Arrow files in a folder of this test, without network access."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def make_tars(folder):
    write_shards(folder, [2, 3])
    return str(folder / "{00000..00001}.tar")


def make_parquet(folder):
    import datasets

    rows = {"image": [{"bytes": picture(n), "path": None} for n in range(COUNT)], "caption": texts()}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "part.parquet")
    return str(folder / "*.parquet")


def make_parquet_of_plain_bytes(folder):
    import datasets

    datasets.Dataset.from_dict({"jpg": [picture(n) for n in range(COUNT)], "text": texts()}).to_parquet(
        folder / "part.parquet"
    )
    return str(folder / "part.parquet")


def make_csv(folder, separator=",", name="pairs.csv"):
    fill(folder, PICTURES)
    with open(folder / name, "w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([["filepath", "title"], *([f"{n}.png", text] for n, text in enumerate(texts()))])
    return str(folder / name)


def make_json_lines(folder):
    fill(folder, PICTURES)
    lines = [json.dumps({"image": str(folder / f"{n}.png"), "text": text}) for n, text in enumerate(texts())]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "pairs.jsonl")


def make_image_folder(folder):
    fill(folder, PICTURES)
    lines = [json.dumps({"file_name": f"{n}.png", "caption": text}) for n, text in enumerate(texts())]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return str(folder)


def make_saved(folder):
    import datasets

    rows = {"image": [picture(n) for n in range(COUNT)], "caption": texts()}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(folder / "saved")
    return str(folder / "saved")


def make_hub(folder):
    """Load a folder of parquet files as `datasets` loads a repository of the hub."""
    make_parquet(folder)
    return f"hf:{folder}:train"


def fill(folder, files):
    """Write files by their paths in the folder: text, bytes, or the number of a picture. Return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = picture(content) if isinstance(content, int) else content
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


PICTURES = {f"{number}.png": number for number in range(COUNT)}


@pytest.mark.parametrize(
    "make",
    [
        make_tars,
        make_parquet,
        make_parquet_of_plain_bytes,
        make_csv,
        lambda folder: make_csv(folder, "\t", "pairs.tsv"),
        lambda folder: make_csv(folder, "\t"),  # open_clip's default: tabs in a file named .csv
        lambda folder: make_csv(folder, ";"),
        make_json_lines,
        make_image_folder,
        make_saved,
        make_hub,
        write_folder_of_pairs,
    ],
)
def test_every_source_yields_equal_pairs(tmp_path, make):
    folder = tmp_path / "data"
    folder.mkdir()
    dataset = open_pairs([make(folder)])
    assert captions(dataset) == texts()
    assert [dataset.caption(number) for number in range(COUNT)] == texts()
    assert images(dataset) == [picture(n) for n in range(COUNT)]
    assert dataset.shard_sizes.sum() == len(dataset) == COUNT
    check_manifest(json.loads(json.dumps(dataset.manifest())), dataset.manifest())


def test_a_folder_of_img2dataset_is_read_as_pictures(tmp_path):
    """img2dataset writes 00000.parquet and 00000_stats.json, which contain no images, beside the image folder 00000."""
    import datasets

    write_folder_of_pairs(tmp_path / "00000")
    rows = {"url": ["a"] * COUNT, "caption": texts(), "key": ["b"] * COUNT}
    (tmp_path / "00000_stats.json").write_text(json.dumps({"count": COUNT, "successes": COUNT}))
    assert captions(open_pairs([str(tmp_path)])) == texts()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "00000.parquet")
    assert captions(open_pairs([str(tmp_path)])) == texts()


def test_other_files_named_metadata_are_no_captions(tmp_path):
    """Only metadata files that `datasets` understands may change how a folder is read.

    For other files of this name, `datasets` would find no captions.
    """
    write_folder_of_pairs(tmp_path)
    (tmp_path / "metadata.txt").write_text("crawled in spring")
    (tmp_path / "deep" / "metadata.json").write_text("{}")
    assert captions(open_pairs([str(tmp_path)])) == texts()


@pytest.mark.parametrize(("other", "kind"), [("b-train-1.png", "csv"), ("b.png", "jsonl"), ("deep/b.png", "csv")])
def test_names_of_splits_in_the_names_of_pictures_leave_nothing_out(tmp_path, other, kind):
    """`datasets` assigns files such as a-test-0.png to the split "test". They must not be missing from "train"."""
    names = ["a-test-0.png", other, "test/c.png"]
    fill(tmp_path, {name: number for number, name in enumerate(names)})
    if kind == "csv":
        lines = ["file_name,text", *(f"{name},caption {number}" for number, name in enumerate(names))]
    else:
        lines = [json.dumps({"file_name": name, "text": f"caption {number}"}) for number, name in enumerate(names)]
    (tmp_path / f"metadata.{kind}").write_text("\n".join(lines))
    dataset = open_pairs([str(tmp_path)])
    pairs = sorted(zip(captions(dataset), images(dataset), strict=True))
    assert pairs == [(f"caption {number}", picture(number)) for number in range(3)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_tars, "00001.tar"),
        (make_parquet, "part.parquet"),
        (make_csv, "3.png"),
        (make_json_lines, "3.png"),
        (write_folder_of_pairs, "2.JPG"),
        (make_saved, "saved/train/data-00000-of-00001.arrow"),
    ],
)
def test_a_file_of_images_that_is_changed_in_place_is_noticed(tmp_path, make, name):
    """The manifest has no times. Copies of the data have other times, and a resumed run may use them."""
    spec = make(tmp_path)
    times, manifest = open_pairs([spec]).image_times(), open_pairs([spec]).manifest()
    assert open_pairs([spec]).image_times() == times
    os.utime(tmp_path / name, (1, 1))
    assert open_pairs([spec]).image_times() != times and open_pairs([spec]).manifest() == manifest


@pytest.mark.parametrize("name", ["0.tar", "0.csv"])
@pytest.mark.timeout(60)
def test_a_pipe_in_a_folder_of_shards_or_tables_is_an_error(tmp_path, name):
    """Reading a pipe that nobody writes to would never end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is neither a file nor a folder"):
        open_pairs([str(tmp_path)])


@pytest.mark.parametrize("name", ["._00000.tar", ".index.json", ".cache.csv"])
def test_hidden_files_in_a_folder_are_no_data(tmp_path, name):
    """macOS writes ._00000.tar beside 00000.tar on disks of other systems."""
    make_tars(tmp_path)
    (tmp_path / name).write_bytes(b"\0\5\26\7")
    assert open_pairs([str(tmp_path)]).accounts[0].problems == {}
    write_folder_of_pairs(tmp_path / "pictures")
    (tmp_path / "pictures" / name).write_bytes(b"\0\5\26\7")
    assert captions(open_pairs([str(tmp_path / "pictures")])) == texts()


def test_a_folder_stands_for_its_files(tmp_path):
    make_tars(tmp_path / "tars")
    assert len(open_pairs([str(tmp_path / "tars")])) == COUNT
    (tmp_path / "table").mkdir()
    make_parquet(tmp_path / "table")
    assert len(open_pairs([str(tmp_path / "table")], dataset_type="parquet")) == COUNT


@pytest.mark.parametrize("dataset_type", ["auto", "imagefolder", "saved", "webdataset", "csv"])
def test_a_pattern_of_several_folders_is_an_error(tmp_path, dataset_type):
    """Every folder that matches must be reported, for image folders and saved datasets too. None may be ignored."""
    for name in "ab":
        write_folder_of_pairs(tmp_path / name)
    with pytest.raises(DataError, match=r"matches 2 files or folders, .*; give each folder as a separate entry"):
        open_pairs([str(tmp_path / "*")], dataset_type=dataset_type)
    both = open_pairs([str(tmp_path / name) for name in "ab"])
    assert captions(both) == texts() * 2


def test_tables_in_several_folders_do_not_take_each_others_images(tmp_path):
    """The images of each table must be searched for in the folder of that table, not in the folder of the first one."""
    for name, number in (("a", 0), ("b", 1)):
        fill(tmp_path / name, {"0.png": number, "pairs.csv": f"filepath,title\n0.png,of {name}\n"})
        rows = pyarrow.table({"filepath": ["0.png"], "title": [f"of {name}"]})
        parquet.write_table(rows, tmp_path / name / "pairs.parquet")
    for kind in ("csv", "parquet"):
        dataset = open_pairs([str(tmp_path / "*" / f"pairs.{kind}")])
        assert images(dataset) == [picture(0), picture(1)]
        assert dataset.shard_name(1) == str(tmp_path / "b" / f"pairs.{kind}")


def test_the_folder_of_the_images_of_a_table(tmp_path):
    """A table beside or far from the folder of its images. Equal names beside the table must not be used instead."""
    fill(tmp_path, {"pictures/0.png": 1, "0.png": 0, "pairs.csv": "filename,caption\n0.png,a\n"})
    rows = pyarrow.table({"filename": ["0.png"], "caption": ["a"]})
    parquet.write_table(rows, tmp_path / "pairs.parquet")
    for name in ("pairs.csv", "pairs.parquet"):
        assert images(open_pairs([str(tmp_path / name)])) == [picture(0)]
        dataset = open_pairs([str(tmp_path / name)], image_root=str(tmp_path / "pictures"))
        assert images(dataset) == [picture(1)]
    with pytest.raises(DataError, match=r"--image-root '.*/no' is not a folder; give"):
        open_pairs([str(tmp_path / "pairs.csv")], image_root=str(tmp_path / "no"))
    (tmp_path / "pictures" / "0.png").unlink()
    with pytest.raises(BadSample, match=r"missing image: .*0\.png' is not a file; --image-root"):
        dataset.read(0)
    (tmp_path / "0.png").unlink()
    with pytest.raises(BadSample, match=r"pairs.csv row 1: '0.png' is.*; --image-root names another folder"):
        open_pairs([str(tmp_path / "pairs.csv")]).read(0)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_with_reordered_rows_is_not_resumed(tmp_path, kind):
    """Its name, size and number of rows are those of the checkpoint. FastCLIP keeps a state per row."""
    rows = [("0.png", "red"), ("1.png", "sky")]
    saved = None
    for order in (rows, rows[::-1]):
        path = tmp_path / f"x.{kind}"
        if kind == "parquet":
            parquet.write_table(
                pyarrow.table({"image": [name for name, _ in order], "text": [t for _, t in order]}), path
            )
        elif kind == "csv":
            path.write_text("image,text\n" + "".join(f"{name},{text}\n" for name, text in order))
        else:
            path.write_text("".join(json.dumps({"image": name, "text": text}) + "\n" for name, text in order))
        os.utime(path, (len(str(order)), order is rows))
        now = open_pairs([str(path)]).manifest()
        saved = saved or json.loads(json.dumps(now))
    check_manifest(saved, saved)
    with pytest.raises(DataError, match="as checksum of the order and the captions of dataset 0"):
        check_manifest(saved, now | {"sources": [now["sources"][0] | {"files": saved["sources"][0]["files"]}]})
    for source in saved["sources"]:  # of an earlier version
        del source["checksum"]
    check_manifest(saved, now | {"sources": [now["sources"][0] | {"files": saved["sources"][0]["files"]}]})


def test_a_saved_dataset_with_several_splits_needs_a_choice(tmp_path):
    """--val-data must not silently read the split "train" of such a folder."""
    import datasets

    rows = {"image": [picture(n) for n in range(COUNT)], "caption": texts()}
    splits = {name: datasets.Dataset.from_dict(rows) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"has the splits test, train; give the folder of one of them, .*saved/te"):
        open_pairs([str(tmp_path / "saved")])
    assert captions(open_pairs([str(tmp_path / "saved" / "test")])) == texts()


@pytest.mark.parametrize(
    ("files", "pairs"),
    [
        # pandas reads these captions as missing
        (PICTURES | {"x.csv": "filepath,title\n0.png,NA\n1.png,null\n2.png,None\n"}, {"NA": 0, "null": 1, "None": 2}),
        # 007 and 1.50 must not become 7.0 and 1.5, and the file name 0 must stay a file name
        ({"0": 0, "x.csv": "filepath,title,score\n0,007,1\n0,1.50,2\n0,true,3\n"}, {"007": 0, "1.50": 0, "true": 0}),
        # R writes a column of row numbers without a name when it saves a subset of a table
        (PICTURES | {"x.csv": '"filepath","title"\n"1","0.png","red, blue"\n"5","1.png","green"\n'},
         {"red, blue": 0, "green": 1}),
        (PICTURES | {"metadata.csv": "file_name,text\n0.png,NA\n1.png,007\n"}, {"NA": 0, "007": 1}),
        # a metadata file per folder
        ({f"{place}{name}": content for place, number in (("", 0), ("deep/", 1)) for name, content in
          (("a.png", number), ("metadata.csv", f"file_name,text\na.png,caption {number}\n"))},
         {"caption 0": 0, "caption 1": 1}),
        # quotation marks that do not enclose cells are text: two rows must not become one with the rows between them
        (PICTURES | {"x.tsv": 'filepath\ttitle\n0.png\t"the red one\n1.png\tb\n2.png\t"another\n3.png\td\n'},
         {'"the red one': 0, "b": 1, '"another': 2, "d": 3}),
        (PICTURES | {"x.tsv": 'filepath\ttitle\n0.png\t"red\n1.png\tb\n2.png\tblue"\n3.png\t"a" b\n'},
         {'"red': 0, "b": 1, 'blue"': 2, '"a" b': 3}),
        (PICTURES | {"x.csv": 'title,filepath\n"red,0.png\nb,1.png\nblue",2.png\n'}, {'"red': 0, "b": 1, 'blue"': 2}),
        (PICTURES | {"x.csv": 'filepath,title\n0.png,"no end\n1.png,b\n'}, {'"no end': 0, "b": 1}),
        # quotation marks that enclose cells with separators, line breaks and quotation marks
        (PICTURES | {"x.csv": 'filepath,title\r\n0.png,"A ""cat"", red.\r\nIt runs, fast"\r\n1.png,b\r\n'},
         {'A "cat", red. It runs, fast': 0, "b": 1}),
        # blank lines, byte order marks and UTF-16
        (PICTURES | {"x.csv": "\n\nfilepath,title\n0.png,000\n\n1.png,b\n"}, {"000": 0, "b": 1}),
        (PICTURES | {"x.csv": "\ufefffilepath,title\n0.png,grün\n"}, {"grün": 0}),
        (PICTURES | {"x.csv": "filepath,title\n0.png,grün\n".encode("utf-16")}, {"grün": 0}),
        # Flickr30k
        (PICTURES | {"x.csv": "image_name| comment_number| comment\n0.png| 0| A dog , a cat .\n"},
         {"A dog , a cat .": 0}),
        (PICTURES | {"x.csv": "filename,caption\n0.png,a\n"}, {"a": 0}),
        # JSON: numbers and dates stay as written; a list of objects
        (PICTURES | {"x.jsonl": '{"image": "0.png", "text": "2021-03-01"}\n\n{"image": "1.png", "text": 1.50}\n'},
         {"2021-03-01": 0, "1.50": 1}),
        (PICTURES | {"x.json": '[{"image": "0.png",\n "text": true}, {"image": "1.png", "text": "12:30"}]'},
         {"true": 0, "12:30": 1}),
        # a table beside the folder of its images
        ({"train/0.png": 0, "train.csv": "filepath,title\ntrain/0.png,caption 0\n"}, {"caption 0": 0}),
    ],
)  # fmt: skip
def test_text_in_tables_is_kept(tmp_path, files, pairs):
    dataset = open_pairs([str(fill(tmp_path, files))])
    found = dict(zip(captions(dataset), images(dataset), strict=True))
    assert found == {caption: picture(number) for caption, number in pairs.items()}
    if files.keys() >= {"metadata.csv", "0.png"}:
        for key in ("image", "file_name"):
            assert sorted(captions(open_pairs([str(tmp_path)], image_key=key))) == sorted(pairs)


def test_metadata_behind_a_link_is_read(tmp_path):
    """Images that the metadata describe must not be left out silently. The captions are texts: 000 is not 0."""
    for name, number in (("elsewhere", 0), ("pairs/a", 1)):
        fill(tmp_path / name, {"a.png": number, "metadata.csv": f"file_name,text\na.png,00{number}\n"})
    (tmp_path / "link").symlink_to(tmp_path / "pairs")
    assert captions(open_pairs([str(tmp_path / "link")])) == ["001"]
    (tmp_path / "pairs" / "b").symlink_to(tmp_path / "elsewhere")
    dataset = open_pairs([str(tmp_path / "pairs")])
    assert (captions(dataset), images(dataset)) == (["001", "000"], [picture(1), picture(0)])
    assert dataset.shard_name(1).endswith("pairs/b/metadata.csv")


def test_pictures_that_no_row_names_are_counted(tmp_path):
    fill(tmp_path, PICTURES | {"metadata.jsonl": '{"file_name": "0.png", "text": "2021-03-01"}\n'})
    dataset = open_pairs([str(tmp_path)])
    assert captions(dataset) == ["2021-03-01"]
    assert [entry[:2] for entry in dataset.accounts[0].left_out.values()] == [[COUNT - 1, 0]]


def test_a_csv_may_have_words_after_thousands_of_numbers(tmp_path):
    """`datasets` infers the type of a column from its first 10,000 rows. Words in later rows must still be readable."""
    rows = ["0.png,7,1"] * 20_000 + ["0.png,seven,0.5"]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title,score", *rows]))
    dataset = open_pairs([str(tmp_path / "pairs.csv")])
    assert (dataset.caption(0), dataset.caption(20_000)) == ("7", "seven")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # not the text "b'gr\\xc3\\xbcn'"
        (["grün".encode(), b"gr\xfcn"],
         ["grün", "caption is not UTF-8: pairs.parquet row 2: byte 0xfc at position 2; convert it to UTF-8"]),
        ([1.5, float("nan")], ["1.5", "missing caption: pairs.parquet row 2"]),  # not the text "nan"
        # COCO on the Hugging Face hub has a list of dictionaries
        ([[{"raw": "a dog", "id": 1}]], ["missing caption: pairs.parquet row 1: expected text, got dict"]),
    ],
)  # fmt: skip
def test_cells_that_are_no_text(tmp_path, cells, expected):
    parquet.write_table(
        pyarrow.table({"image": [picture(0)] * len(cells), "caption": cells}), tmp_path / "pairs.parquet"
    )
    dataset = open_pairs([str(tmp_path / "pairs.parquet")])
    found = []
    for row in range(len(cells)):
        try:
            found.append(dataset.caption(row))
        except BadSample as bad:
            found.append(str(bad))
    assert found == expected
    assert open_pairs([str(tmp_path / "pairs.parquet")]).manifest() == dataset.manifest()


@pytest.mark.parametrize(("column", "kind"), [([datetime.date(2021, 3, 1)], "date32"), ([True], "bool")])
def test_captions_whose_text_is_not_known_are_refused(tmp_path, column, kind):
    parquet.write_table(pyarrow.table({"image": ["0.png"], "caption": column}), tmp_path / "pairs.parquet")
    with pytest.raises(DataError, match=rf"the captions in column caption are of type {kind}.*; store them as text"):
        open_pairs([str(tmp_path / "pairs.parquet")])


def test_tables_whose_text_is_not_utf_8_can_be_described(tmp_path):
    """Only the rows with such text are bad samples."""
    texts = pyarrow.array([b"a", b"gr\xfcn"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"image": texts, "caption": texts}), tmp_path / "pairs.parquet")
    dataset = open_pairs([str(tmp_path / "pairs.parquet")])
    assert dataset.manifest() and dataset.columns == [{"image": "image", "caption": "caption"}]
    with pytest.raises(BadSample, match="not UTF-8"):
        dataset.read(1)


def test_numbers_of_classes_are_read_as_their_names(tmp_path):
    """`datasets` stores the labels of CIFAR10 as numbers. The captions must not be "0" and "1"."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": picture(0)}] * 4, "label": [1, 0, -1, None]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    dataset = open_pairs([str(tmp_path / "saved")], caption_key="label")
    assert [dataset.caption(0), dataset.read(1).caption] == ["dog", "cat"]
    for row in (2, 3):
        with pytest.raises(BadSample, match="missing caption"):
            dataset.read(row)


@pytest.mark.parametrize("name", ["0.csv", "1.csv", "2.jsonl", "3.jsonl", "4.parquet", "saved"])
def test_a_table_without_rows_is_refused(tmp_path, name):
    """The error must be ours, not one of `datasets` such as "StopIteration: " or "BatchSize must be greater than 0"."""
    import datasets

    fill(tmp_path, {"0.csv": "", "1.csv": "filepath,title\n", "2.jsonl": "", "3.jsonl": "\n\n"})
    parquet.write_table(pyarrow.table({"image": [b""], "caption": ["red"]}).slice(1), tmp_path / "4.parquet")
    datasets.Dataset.from_dict({"image": [], "caption": []}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=rf"data '.*{name}': no rows; give tables with one row per sample"):
        open_pairs([str(tmp_path / name)])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_tables_without_rows_among_others_add_none(tmp_path, kind):
    """Spark writes such parts. They must not make the other files an error."""
    rows = pyarrow.table({"image": [picture(0)], "caption": ["red"]})
    for number in range(3):
        path = tmp_path / f"{number}.{kind}"
        if number == 1 and kind == "parquet":
            parquet.write_table(rows, path)
        elif number == 1:
            path.write_text("image,caption\n0.png,red\n" if kind == "csv" else '{"image": "0.png", "caption": "red"}\n')
        elif kind == "parquet":
            parquet.write_table(rows.slice(1), path)
        else:
            path.write_text("")
    (tmp_path / "0.png").write_bytes(picture(0))
    assert captions(open_pairs([str(tmp_path / f"*.{kind}")])) == ["red"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x.csv": b"filepath,title\n0.png,gr\xfcn\n"}, r"x.csv: byte 0xfc is not utf-8; .* iconv -f CP1252"),
        ({"x.csv": "filepath,title\n0.png,a\n".encode("utf-16-le")}, "it contains null bytes .* iconv -f UTF-16LE"),
        ({"x.csv": 'filepath,title\n0.png,"red"\n1.png,"no end\n'}, "the row in line 3 has a quotation mark"),
        ({"x.tsv": 'image\ttext\n0.png\t"red\n1.png\ta\n2.png\tx\tend"\n'}, "the row in line 2 has a quotation mark"),
        # the row with the open quotation mark is named, not a correct row in which reading fails
        ({"x.csv": 'filepath,title\n0.png,"no end\n1.png,"a, b"\n'}, "the row in line 2 has a quotation mark"),
        ({"x.csv": "filepath,title\n0.png,red, blue\n1.png,a, b\n"}, "line 2 has more cells than the first .*quot"),
        ({"x.jsonl": '{"image": "0.png", "text": "a"}\n{"image": "1'}, "x.jsonl: line 2: .*; write one JSON obj"),
        ({"x.json": '{"annotations":\n []}'}, "x.json: line 1: .*; write one JSON object per line"),
        ({"x.csv": "id,Photo,Words\n0,0.png,a\n"}, "it has id, Photo, Words; set --image-key to one of them"),
        ({"x.csv": "image,Words\n0.png,a\n"}, "it has image, Words; set --caption-key to one of them"),
        ({"0.csv": "image,caption\n0.png,a\n", "1.csv": "image,words\n0.png,a\n"}, "1.csv' has no caption .*words"),
        (PICTURES, r"has no captions; put a text file .* or add a metadata.csv"),
    ],
)  # fmt: skip
def test_the_error_for_unreadable_data_is_one_line_with_the_reason(tmp_path, files, message):
    with pytest.raises(DataError, match=message) as caught:
        open_pairs([str(fill(tmp_path, files))])
    assert "\n" not in str(caught.value)


def test_rows_without_image_or_caption_are_bad_samples(tmp_path):
    fill(tmp_path, PICTURES)
    rows = [{"image": "0.png", "caption": None}, {"image": "gone.png", "caption": "a"}, {"image": None, "caption": "b"}]
    rows += [{"image": "0.png", "caption": "c"}, {"image": "../0\0.png", "caption": "d"}]
    rows += [{"image": "/dev/zero", "caption": "e"}]  # reading it would never end
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    dataset = open_pairs([str(tmp_path / "pairs.jsonl")])
    kinds = []
    for row in range(len(rows)):
        try:
            kinds.append(dataset.read(row).caption)
        except BadSample as bad:
            kinds.append(bad.kind)
    assert kinds == ["missing caption", "missing image", "missing image", "c", "missing image", "missing image"]


def test_several_captions_of_an_image_are_kept_separately(tmp_path):
    line = json.dumps({"image": "0.png", "caption": ["a  dog", "an\nanimal"]})
    sample = open_pairs([str(fill(tmp_path, PICTURES | {"pairs.jsonl": line}))]).read(0)
    assert sample.alternatives == ("a dog", "an animal") and sample.caption == "a dog\nan animal"


@pytest.mark.parametrize("kind", ["numpy", "pandas", "torch"])
def test_the_format_of_a_saved_dataset_does_not_change_its_captions(tmp_path, kind):
    """`datasets` saves its format. With the format NumPy, the caption must not be the text "['a dog' 'an animal']"."""
    import datasets

    rows = {"image": [picture(0)], "caption": [["a dog", "an animal"]]}
    datasets.Dataset.from_dict(rows).with_format(kind).save_to_disk(tmp_path / "saved")
    sample = open_pairs([str(tmp_path / "saved")]).read(0)
    assert sample.alternatives == ("a dog", "an animal") and sample.image == picture(0)


def test_a_table_is_divided_into_runs_of_rows_as_shards(tmp_path):
    import datasets

    rows = 2 * ROWS_PER_SHARD + 5
    datasets.Dataset.from_dict({"image": [b"x"] * rows, "text": ["y"] * rows}).save_to_disk(tmp_path / "saved")
    assert open_pairs([str(tmp_path / "saved")]).shard_sizes.tolist() == [ROWS_PER_SHARD, ROWS_PER_SHARD, 5]


def test_keys_select_columns_and_members(tmp_path):
    members = [("0.png", picture(0)), ("0.jpg", picture(1)), ("0.txt", b"no"), ("0.alt", b"yes")]
    path = write_tar(tmp_path / "shard.tar", members)
    other = write_tar(tmp_path / "other.tar", [*members, ("README", b"no picture")])
    assert len(open_pairs([str(other)], image_key="png;", caption_key="alt;")) == 1
    sample = open_pairs([str(path)], image_key="webp;png", caption_key="alt").read(0)
    assert sample.caption == "yes" and sample.image == picture(0)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "a", "caption": "no", "other": "yes"}))
    assert open_pairs([str(tmp_path / "pairs.jsonl")], caption_key="other").caption(0) == "yes"
    (tmp_path / "twice.csv").write_text("image,caption,caption\na.png,a,b\n")
    with pytest.raises(DataError, match="has 2 columns named caption; give each column its own name"):
        open_pairs([str(tmp_path / "twice.csv")])
    with pytest.raises(DataError, match="no caption column nothing; it has image, caption, other"):
        open_pairs([str(tmp_path / "pairs.jsonl")], caption_key="nothing")


def test_braces_expand_as_in_bash():
    cases = {
        "a{1..3}": ["a1", "a2", "a3"],
        "{08..11}.tar": ["08.tar", "09.tar", "10.tar", "11.tar"],
        "{000..002}": ["000", "001", "002"],
        "{9..10}": ["9", "10"],
        "{2..0}": ["2", "1", "0"],
        "{0..10..5}": ["0", "5", "10"],
        "{a,b}/{0..1}": ["a/0", "a/1", "b/0", "b/1"],
        "{a,b{0..1}}": ["a", "b0", "b1"],
        "plain": ["plain"],
        "{one}": ["{one}"],
        r"\{a,b\}": ["{a,b}"],
        r"{a\,b,c}": ["a,b", "c"],
    }
    for pattern, expected in cases.items():
        assert expand_braces(pattern) == expected
    assert len(expand_braces("{00000..00331}.tar")) == 332


@pytest.mark.parametrize("pattern", ["{a", "{a,{b}", "a}", "{a}}"])
def test_unbalanced_braces_are_an_error(pattern):
    with pytest.raises(DataError, match="not balanced"):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [("{1..1000000000000}", patterns.MAX_FILES), ("{a,{-5..200}}", 100), ("{0..3}{0..3}{0..3}", 60)],
)
def test_braces_that_stand_for_too_many_files_are_an_error(pattern, limit, monkeypatch):
    """Each range of the last pattern is short, but their product is too large."""
    monkeypatch.setattr(patterns, "MAX_FILES", limit)
    with pytest.raises(DataError, match=r"more than .* files; use shorter ranges"):
        expand_braces(pattern)


@pytest.mark.parametrize("name", ["a{0..1}.tar", "{unbalanced.tar", r"back\slash.tar", "[0-9].tar"])
def test_a_file_with_the_name_of_the_pattern_is_used_as_it_is(tmp_path, name):
    path = write_tar(tmp_path / name, pair_members([0]))
    assert expand_pattern(str(path)) == [str(path)]


def test_patterns_find_files_or_name_the_missing_ones(tmp_path):
    write_shards(tmp_path, [1, 1, 1])
    assert [path[-9:] for path in expand_pattern(str(tmp_path / "*.tar"))] == ["00000.tar", "00001.tar", "00002.tar"]
    with pytest.raises(DataError, match=r"2 of 5 files are missing, first .*00003\.tar"):
        expand_pattern(str(tmp_path / "{00000..00004}.tar"))
    with pytest.raises(DataError, match="no file matches"):
        open_pairs([str(tmp_path / "none*.tar")])
    with pytest.raises(DataError, match="no data was given"):
        open_pairs([])
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(DataError, match=r"known type.*set --dataset-type"):
        open_pairs([str(tmp_path / "notes.md")])
    with pytest.raises(DataError, match="--dataset-type is 'zip'; use one of auto"):
        open_pairs([str(tmp_path / "*.tar")], dataset_type="zip")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot read"):
        open_pairs([str(tmp_path / "bad.parquet")])


def test_a_glob_among_braces_that_matches_nothing_is_an_error(tmp_path):
    """A dataset with a mistyped name must not be left out silently."""
    write_shards(tmp_path / "first", [1, 1])
    with pytest.raises(DataError, match=r"1 of 3 files are missing, first .*/secnod/\*\.tar"):
        expand_pattern(str(tmp_path / "{first,secnod}" / "*.tar"))


@pytest.mark.parametrize("make", [make_csv, make_json_lines, make_parquet_of_plain_bytes, make_image_folder])
def test_names_of_tables_may_contain_characters_of_patterns(tmp_path, make):
    """`datasets` interprets file names as patterns too."""
    folder = tmp_path / "crawl [2] {a,b} ?"
    folder.mkdir()
    make(folder)
    assert images(open_pairs([str(folder)])) == [picture(n) for n in range(COUNT)]


def test_sources_are_concatenated_and_ids_have_bounds(tmp_path):
    first, second = write_shards(tmp_path, [2, 3])
    dataset = open_pairs([str(second), str(first)])
    assert captions(dataset) == [f"caption {n}" for n in (2, 3, 4, 0, 1)]
    assert dataset.siblings(1) == (0, 3) and dataset.siblings(4) == (3, 2)
    assert dataset.shard_name(4) == str(first)
    with pytest.raises(IndexError):
        dataset.read(5)
    with pytest.raises(DataError, match="1 weights for 2 datasets; give one per dataset"):
        open_pairs([str(first), str(second)], weights=[1.0])


def test_changed_data_is_an_error_that_names_the_difference(tmp_path):
    paths = write_shards(tmp_path, [2, 3])
    specs = [str(path) for path in paths]
    saved = open_pairs(specs).manifest()
    (tmp_path / "moved").mkdir()
    moved = [str(path.rename(tmp_path / "moved" / path.name)) for path in paths]
    check_manifest(saved, open_pairs(moved).manifest())  # equal data in another folder
    cases = {
        "with 2 as number of datasets, now it is 1": open_pairs(moved[:1]),
        "mixture weights": open_pairs(moved, weights=[1, 2]),
        "with 00000.tar, .* as a file of dataset 0, now it is 00001.tar": open_pairs(moved[::-1]),
    }
    write_tar(tmp_path / "moved" / "00001.tar", pair_members(range(2, 6)))
    cases["00001.tar, 10240 bytes, 3 samples as a file of dataset 1, now.* 4 samples"] = open_pairs(moved)
    for message, dataset in cases.items():
        with pytest.raises(DataError, match=message):
            check_manifest(saved, dataset.manifest())


def test_labelled_datasets_in_both_layouts(tmp_path):
    shards = tmp_path / "wds"
    members = [m for n in range(4) for m in ((f"s{n}.png", picture(n)), (f"s{n}.cls", str(n % 2).encode()))]
    write_tar(shards / "test" / "10.tar", members[4:])
    write_tar(shards / "test" / "2.tar", members[:4])
    with pytest.raises(DataError, match=r"classnames\.txt"):
        open_labelled(shards)
    for text, message in (
        ("tabby cat\n", "2 classes or more, got 1"),
        ("\ncat\ndog\n", "line 1 is empty"),
        ("a\n\nb", "line 2"),
    ):
        (shards / "classnames.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            open_labelled(shards)
    (shards / "classnames.txt").write_text("\ufefftabby cat\r\nbig dog\r\n\r\n")
    (shards / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n{c}\n")
    folder = tmp_path / "folder"
    for number in range(4):
        place = folder / ("big_dog" if number % 2 else "a_cat")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.PNG").write_bytes(picture(number))
    (shards / "test" / "._2.tar").write_bytes(b"\0\5\26\7")  # macOS writes it
    by_shard, by_folder = open_labelled(shards), open_labelled(folder)
    assert by_shard.account.problems == {}
    assert by_shard.class_names == ["tabby cat", "big dog"] and by_shard.templates == ["a photo of a {c}.", "{c}"]
    assert by_folder.class_names == ["a cat", "big dog"] and by_folder.templates == ["a photo of a {c}."]
    assert [by_shard.read(n).caption for n in range(4)] == ["0", "1", "0", "1"]
    assert images(by_shard) == [picture(n) for n in range(4)]
    assert [by_folder.read(n).caption for n in range(4)] == ["0", "0", "1", "1"]
    # int() raises a ValueError for the first two labels
    for label in (b"9" * 5000, "²".encode(), b"2"):
        write_tar(shards / "test" / "²0.tar", [("0.png", picture(0)), ("0.cls", label)])
        with pytest.raises(BadSample, match="outside"):
            open_labelled(shards).read(0)
    (folder / "classnames.txt").write_text("one\n")
    with pytest.raises(DataError, match="1 class names for 2 folders"):
        open_labelled(folder)
    with pytest.raises(DataError, match="expected a folder"):
        open_labelled(tmp_path / "nowhere")


def test_links_to_folders_are_followed_once(tmp_path):
    """Images behind a link to a folder must not be left out silently."""
    write_folder_of_pairs(tmp_path / "elsewhere")
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "part").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "pairs")
    assert captions(open_pairs([str(tmp_path / "pairs")])) == texts()
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "part").symlink_to(tmp_path / "elsewhere")
    labelled = open_labelled(tmp_path / "classes")
    assert [labelled.read(n).caption for n in range(len(labelled))] == ["0"] * COUNT + ["1"] * COUNT


def test_a_sub_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Its images must not be left out silently. The test simulates the error, because root may read any folder."""
    write_folder_of_pairs(tmp_path)
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("deep"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read the folder .*/deep: Permission denied"):
        open_pairs([str(tmp_path)], dataset_type="imagefolder")


def test_data_that_may_not_be_read_is_one_error(tmp_path, monkeypatch):
    """The test simulates the error, because root may read any file."""
    (tmp_path / "tables" / "0.csv").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot read .*0\.csv.*directory"):
        open_pairs([str(tmp_path / "tables")])

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read data '.*/tables': .*tables: Permission denied"):
        open_pairs([str(tmp_path / "tables")])
    with pytest.raises(DataError, match=r"cannot read zero-shot data '.*/tables': .*tables: Permission denied"):
        open_labelled(tmp_path / "tables")


def test_hidden_files_in_a_class_are_no_images(tmp_path):
    """macOS writes ._0.png beside 0.png on disks of other systems."""
    for number, name in enumerate(("cat", "dog")):
        hidden = {"._0.png": b"\0\5\26\7", ".ipynb_checkpoints/0-checkpoint.png": number}
        fill(tmp_path / name, {"0.png": number, **hidden})
    assert images(open_labelled(tmp_path)) == [picture(0), picture(1)]


def test_classes_without_images_or_with_the_name_of_another_are_reported(tmp_path, caplog, monkeypatch):
    """open_clip's class names for ImageNet have two such pairs: their images are never correct at top-1.

    Archives made on macOS contain a folder __MACOSX. It must not silently become a class.
    """
    monkeypatch.setattr(logging.getLogger("megaclip"), "propagate", True)
    open_labelled(fill(tmp_path, {"crane_bird/0.png": 0, "crane_machine/0.png": 1, "dog/0.png": 2}))
    assert "WARNING" not in caplog.text
    open_labelled(fill(tmp_path, {"__MACOSX/cat/._0.png": b"\0\5\26\7"}))
    assert f"zero-shot data {tmp_path}: 1 of 4 folders have no images ('__MACOSX') and count as" in caplog.text
    caplog.clear()
    open_labelled(fill(tmp_path, {"classnames.txt": "no class\ncrane\ncrane\ndog\n"}))
    assert "have no images" not in caplog.text
    assert f"zero-shot data {tmp_path}: 2 of 4 classes share their names ('crane'); ties count" in caplog.text


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("name", ("name", "train", None)),
        ("name:test", ("name", "test", None)),
        ("name:test:de", ("name", "test", "de")),
        ("name::de", ("name", "train", "de")),
    ],
)
def test_names_of_hub_datasets(spec, expected):
    """`hf:NAME::CONFIG` omits the split. The default is "train", as for `hf:NAME`."""
    assert parse_hub_name(spec) == expected


@pytest.mark.parametrize(
    ("files", "message", "more", "names"),
    [
        ({"images/0.png": 0}, "only one class, 'images'", {"other/0.png": 1}, ["images", "other"]),
        # imagenet/ in place of imagenet/val must not be evaluated with the two classes "train" and "val"
        ({"train/cat/0.png": 0, "val/cat/0.png": 0},
         r"the folders 'train', 'val' are splits; .* give one split, such as .*/val$",
         None, None),
        # a vehicle and a split may have the same name; the images decide
        ({"train/cat/0.png": 0, "train/dog/0.png": 0, "cat/0.png": 0, "dog/0.png": 0},
         "images lie in .*/dog and in .*/train/cat, so folders of classes are nested", None, None),
        ({"train/0.png": 0, "boat/0.png": 0, "preview.PNG": 0, "a.jfif": 1, "notes": "x"},
         r"2 images \('a\.jfif', 'preview\.PNG'\) lie beside the folders",
         None, None),
        # SUN397, and two folds of equal classes
        ({"a/abbey/0.png": 0, "o/oasis/indoor/0.png": 0}, "images lie in .*/abbey and in .*/indoor, so", None, None),
        ({"fold1/cat/0.png": 0, "fold1/dog/0.png": 0, "fold2/cat/0.png": 0, "fold2/dog/0.png": 0},
         "move or link the folders of all classes there", None, None),
        # an unrelated folder must not make the ids acceptable
        ({"n01440764/1.png": 1, "n01443537/1.png": 1, "lost+found/.x": ""}, r"WordNet ids .* to classnames\.txt",
         {"classnames.txt": "lost\ntench\ngoldfish\n"}, ["lost", "tench", "goldfish"]),
        # --image-key and --caption-key apply to pairs only
        ({"classnames.txt": "cat\ndog\n", "0.tar": b"\0" * 10240},
         r"no samples .* such as 000000\.jpg and 000000\.cls$", None, None),
    ],
)  # fmt: skip
def test_folders_that_are_no_classes_are_refused(tmp_path, files, message, more, names):
    with pytest.raises(DataError, match=message):
        open_labelled(fill(tmp_path, files))
    if more is not None:
        assert open_labelled(fill(tmp_path, more)).class_names == names


@pytest.mark.parametrize(
    ("names", "how"),
    [
        ([f"{number}" for number in range(12)], "number"),
        ([f"{number:02}" for number in range(12)], "number"),
        (["0", "1", "002", "10", "0011"], "number"),
        ([f"class_{number}" for number in range(12)], "number"),
        (["Class 2", "a", "b10"], "name"),
        (["2", "10", "background"], None),
        (["cat", "dog9", "dog10", "owl"], None),
    ],
)
@pytest.mark.parametrize("inside", ["", "images/"])
def test_the_lines_of_class_names_belong_to_the_numbers_of_folders(tmp_path, caplog, monkeypatch, names, how, inside):
    """`names` are in the order of their numbers. If they could also be in another one, they are refused."""
    monkeypatch.setattr(logging.getLogger("megaclip"), "propagate", True)
    fill(tmp_path, {f"{name}/{inside}0.png": number for number, name in enumerate(names)})
    assert len(open_labelled(tmp_path)) == len(names)  # without names in a file, the order has no effect
    (tmp_path / "classnames.txt").write_text("".join(f"no. {number}\n" for number in range(len(names))))
    if how is None:
        with pytest.raises(DataError, match=r"the order of the folders, .*, depends on"):
            open_labelled(tmp_path)
        return
    with caplog.at_level(logging.INFO, "megaclip"):
        labelled = open_labelled(tmp_path)
    found = {labelled.read(row).key: labelled.class_names[int(labelled.read(row).caption)] for row in range(len(names))}
    assert found == {f"{tmp_path}/{name}/{inside}0.png": f"no. {number}" for number, name in enumerate(names)}
    assert (
        f"sorted by {how}: 'no. 0' for {names[0]!r}, 'no. 1' for {names[1]!r}, 'no. 2' for {names[2]!r}, ..."
        in caplog.text
    )


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("a.tar::b/{0..3}.tar", "separate several datasets by spaces: a.tar b/{0..3}.tar"),
        ("ftp://host/{00..09}.tar", "use s3://, gs://, hf://, http://, https://, abfs://, or copy or mount the data"),
        (
            "pipe:aws s3 cp s3://bucket/0.tar -",
            "pipes are not read: give the URL itself, such as s3://bucket/00000.tar",
        ),
    ],
)
def test_urls_pipes_and_lists_are_errors_with_advice(spec, advice):
    with pytest.raises(DataError) as error:
        open_pairs([spec])
    assert advice in str(error.value)
