"""Sources: every file format yields equal pairs; file patterns, mixtures, and manifests that detect changed data."""

import datetime
import errno
import json
import logging
import os

import pyarrow
import pytest
from pyarrow import parquet

from megaclip.data import check_image_root, check_manifest, open_labelled, open_pairs, patterns
from megaclip.data.batch import BadSample
from megaclip.data.order import ROWS_PER_SHARD
from megaclip.data.patterns import expand_braces, expand_pattern
from megaclip.data.tables import UNNAMED, parse_hub_name
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
    write_shards,
    write_table,
    write_tar,
)


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
    rows = [{"jpg": picture(n), "text": text} for n, text in enumerate(texts())]
    return write_table(folder / "part.parquet", rows)


def make_csv(folder, separator=",", name="pairs.csv"):
    fill(folder, PICTURES)
    return write_table(
        folder / name, [{"filepath": f"{n}.png", "title": text} for n, text in enumerate(texts())], separator
    )


def make_json_lines(folder):
    fill(folder, PICTURES)
    rows = [{"image": str(folder / f"{n}.png"), "text": text} for n, text in enumerate(texts())]
    return write_table(folder / "pairs.jsonl", rows)


def make_image_folder(folder):
    fill(folder, PICTURES)
    write_table(
        folder / "metadata.jsonl", [{"file_name": f"{n}.png", "caption": text} for n, text in enumerate(texts())]
    )
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
    """The name of the folder has characters of patterns, which `datasets` interprets too."""
    folder = tmp_path / ("data" if make in (make_tars, make_parquet, make_hub) else "crawl [2] {a,b} ?")
    folder.mkdir()
    dataset = open_pairs([make(folder)])
    assert captions(dataset) == texts()
    assert [dataset.caption(number) for number in range(COUNT)] == texts()
    assert images(dataset) == [picture(n) for n in range(COUNT)]
    assert dataset.shard_sizes.sum() == len(dataset) == COUNT
    check_manifest(json.loads(json.dumps(dataset.manifest())), dataset.manifest())


def test_a_folder_of_img2dataset_is_read_as_pictures(tmp_path):
    """img2dataset writes 00000.parquet and 00000_stats.json, which contain no images, beside the image folder 00000.

    Only metadata files that `datasets` understands may change how a folder is read.
    """
    import datasets

    write_folder_of_pairs(tmp_path / "00000")
    fill(tmp_path, {"00000_stats.json": '{"count": 5}', "metadata.txt": "crawled", "00000/deep/metadata.json": "{}"})
    assert captions(open_pairs([str(tmp_path)])) == texts()
    rows = {"url": ["a"] * COUNT, "caption": texts(), "key": ["b"] * COUNT}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "00000.parquet")
    assert captions(open_pairs([str(tmp_path)])) == texts()


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


@pytest.mark.parametrize("name", ["._00000.tar", ".index.json", ".cache.csv"])
def test_hidden_files_in_a_folder_are_no_data(tmp_path, name):
    """macOS writes ._00000.tar beside 00000.tar on disks of other systems."""
    make_tars(tmp_path)
    (tmp_path / name).write_bytes(b"\0\5\26\7")
    assert open_pairs([str(tmp_path)]).accounts[0].problems == {}
    write_folder_of_pairs(tmp_path / "pictures")
    (tmp_path / "pictures" / name).write_bytes(b"\0\5\26\7")
    assert captions(open_pairs([str(tmp_path / "pictures")])) == texts()
    for number, place in enumerate(("cat", "dog")):
        hidden = {"._0.png": b"\0\5\26\7", ".ipynb_checkpoints/0-checkpoint.png": number}
        fill(tmp_path / "classes" / place, {"0.png": number, **hidden})
    assert images(open_labelled(tmp_path / "classes")) == [picture(0), picture(1)]


@pytest.mark.parametrize("dataset_type", ["auto", "imagefolder", "csv"])
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
    assert len(open_pairs([str(tmp_path / "a")], dataset_type="parquet")) == 1  # a folder stands for its files


def test_the_folder_of_the_images_of_a_table(tmp_path, monkeypatch):
    """A table beside or far from the folder of its images. Equal names beside the table must not be used instead."""
    fill(tmp_path, {"pictures/0.png": 1, "0.png": 0, "pairs.csv": "filename,caption\n0.png,a\n"})
    rows = pyarrow.table({"filename": ["0.png"], "caption": ["a"]})
    parquet.write_table(rows, tmp_path / "pairs.parquet")
    write_tar(tmp_path / "pairs.tar", [("0.png", picture(0)), ("0.txt", b"a")])
    parquet.write_table(pyarrow.table({"image": [picture(0)], "text": ["a"]}), tmp_path / "images.parquet")
    fill(tmp_path, {"folder/0.png": 0, "folder/metadata.csv": "file_name,text\n0.png,a\n"})
    places = [str(tmp_path / name) for name in ("pairs.tar", "images.parquet", "folder")]
    pictures = open_pairs(places, image_root=str(tmp_path))
    for name in ("pairs.csv", "pairs.parquet"):
        assert images(open_pairs([str(tmp_path / name)])) == [picture(0)]
        dataset = open_pairs([str(tmp_path / name)], image_root=str(tmp_path / "pictures"))
        assert images(dataset) == [picture(1)]
        check_image_root("pictures", None, pictures, dataset)
    with pytest.raises(DataError, match=r"--image-root 'pictures' has no effect: .*; leave it out"):
        check_image_root("pictures", pictures, None)
    with pytest.raises(DataError, match=r"--image-root '.*/no' is not a folder; give"):
        open_pairs([str(tmp_path / "pairs.csv")], image_root=str(tmp_path / "no"))
    (tmp_path / "pictures" / "0.png").unlink()
    with pytest.raises(BadSample, match=r"missing image: .*0\.png' is not a file; --image-root"):
        dataset.read(0)
    fill(tmp_path, {"windows.csv": "filename,caption\nfolder\\0.png,a\n"})
    with pytest.raises(BadSample, match="is not a file, but would be one with / instead of"):
        open_pairs([str(tmp_path / "windows.csv")]).read(0)
    (tmp_path / "0.png").unlink()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "pairs.csv", "pairs.csv"):
        with pytest.raises(BadSample, match=r"pairs.csv row 1: '0.png' is.*; --image-root names another folder"):
            open_pairs([str(path)]).read(0)
    (tmp_path / "absolute.csv").write_text(f"filename,caption\n{tmp_path}/0.png,a\n")
    with pytest.raises(BadSample, match=r"0.png' is not a file$"):
        open_pairs(["absolute.csv"], image_root="pictures").read(0)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_with_reordered_rows_is_not_resumed(tmp_path, kind):
    """Its name, size and number of rows are those of the checkpoint. FastCLIP keeps a state per row."""
    path, saved = tmp_path / f"x.{kind}", None
    rows = [{"image": "0.png", "text": "red"}, {"image": "1.png", "text": "sky"}]
    for number, order in enumerate((rows, rows[::-1])):
        write_table(path, order)
        os.utime(path, (number, number))
        now = open_pairs([str(path)]).manifest()
        saved = saved or json.loads(json.dumps(now))
    check_manifest(saved, saved)
    now["sources"][0]["files"] = saved["sources"][0]["files"]
    with pytest.raises(DataError, match="as checksum of the order and the captions of dataset 0"):
        check_manifest(saved, now)


def test_a_saved_dataset_with_several_splits_needs_a_choice(tmp_path):
    """--val-data must not silently read the split "train" of such a folder."""
    import datasets

    rows = {"image": [picture(n) for n in range(COUNT)], "caption": texts()}
    splits = {name: datasets.Dataset.from_dict(rows) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"has the splits test, train; give the folder of one of them, .*saved/te"):
        open_pairs([str(tmp_path / "saved")])
    assert captions(open_pairs([str(tmp_path / "saved" / "test")])) == texts()


def test_captions_of_a_saved_dataset_are_texts(tmp_path):
    """The labels of CIFAR10 are numbers with names; the captions must not be "0" and "1".

    `datasets` saves its format. With the format NumPy, the captions must not be the text "['a dog' 'an animal']".
    """
    import datasets

    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": label, "labels": datasets.List(label)})
    rows = {"image": [{"bytes": picture(0)}] * 4, "label": [1, 0, -1, None], "labels": [[1, -1, 0], [1], [-1], None]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "classes")
    assert open_pairs([str(tmp_path / "classes")], caption_key="labels").read(0).captions.texts == ("dog", "cat")
    dataset = open_pairs([str(tmp_path / "classes")], caption_key="label")
    assert [dataset.caption(0), dataset.read(1).caption] == ["dog", "cat"]
    for row in (2, 3):
        with pytest.raises(BadSample, match="missing caption"):
            dataset.read(row)
    count = 2 * ROWS_PER_SHARD + 5
    rows = {"image": [picture(0)] * count, "caption": [["a dog", "an animal"]] * count}
    datasets.Dataset.from_dict(rows).with_format("numpy").save_to_disk(tmp_path / "numpy")
    dataset = open_pairs([str(tmp_path / "numpy")])
    assert dataset.read(0).captions.texts == ("a dog", "an animal") and dataset.read(0).image == picture(0)
    assert dataset.shard_sizes.tolist() == [ROWS_PER_SHARD, ROWS_PER_SHARD, 5]


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
        # blank lines, carriage returns, byte order marks and UTF-16
        (PICTURES | {"x.csv": "filepath,title\r0.png,old\r1.png,b\r"}, {"old": 0, "b": 1}),
        (PICTURES | {"x.csv": "\n\nfilepath,title\n0.png,000\n\n1.png,b\n"}, {"000": 0, "b": 1}),
        (PICTURES | {"x.csv": "\ufefffilepath,title\n0.png,grün\n"}, {"grün": 0}),
        (PICTURES | {"x.csv": "filepath,title\n0.png,grün\n".encode("utf-16")}, {"grün": 0}),
        # Flickr30k
        (PICTURES | {"x.csv": "image_name| comment_number| comment\n0.png| 0| A dog , a cat .\n"},
         {"A dog , a cat .": 0}),
        (PICTURES | {"x.csv": "filename,caption\n0.png,a\n"}, {"a": 0}),
        # lists of captions, as on the Hugging Face hub and as pandas writes them
        (PICTURES | {"x.tsv": """image\ttext\n0.png\t["a", "it's \\u00fc", null]\n1.png\t['b', "c's"]\n2.png\t[d]\n"""},
         {"a\nit's ü": 0, "b\nc's": 1, "[d]": 2}),
        (PICTURES | {"x.tsv": """image\ttext\n0.png\t['a, b' "it's" None]\n1.png\t['c', ' "d" ', 'e']\n"""},
         {"a, b\nit's": 0, 'c\n"d"\ne': 1}),
        # JSON: numbers and dates stay as written; a list of objects
        (PICTURES | {"x.jsonl": '{"image": "0.png", "text": "2021-03-01"}\n\n{"image": "1.png", "text": 1.50}\n'},
         {"2021-03-01": 0, "1.50": 1}),
        (PICTURES | {"x.json": '[{"image": "0.png",\n "text": true}, {"image": "1.png", "text": "12:30"}]'},
         {"true": 0, "12:30": 1}),
        # a table beside the folder of its images
        ({"train/0.png": 0, "train.csv": "filepath,title\ntrain/0.png,caption 0\n"}, {"caption 0": 0}),
        # objects without fields are rows without a caption
        ({"0.png": 0, "a.jsonl": "{}\n{}\n", "b.jsonl": '{"image": "0.png", "text": "a cat"}\n'}, {"a cat": 0}),
    ],
)  # fmt: skip
def test_text_in_tables_is_kept(tmp_path, files, pairs):
    dataset = open_pairs([str(fill(tmp_path, files))])
    assert len(dataset) == len(pairs) + 2 * ("a.jsonl" in files)
    found = {
        sample.caption: sample.image for sample in map(dataset.read, range(len(dataset) - len(pairs), len(dataset)))
    }
    assert found == {caption: picture(number) for caption, number in pairs.items()}
    unnamed = [count for reason, (count, *_) in dataset.accounts[0].left_out.items() if reason == UNNAMED]
    assert unnamed == ([COUNT - len(pairs)] if files.keys() >= {"metadata.csv", "4.png"} else [])
    if files.keys() >= {"metadata.csv", "0.png"}:
        for key in ("image", "file_name"):
            assert sorted(captions(open_pairs([str(tmp_path)], image_key=key))) == sorted(pairs)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # not the text "b'gr\\xc3\\xbcn'"
        (["grün".encode(), b"gr\xfcn"],
         ["grün", "caption is not UTF-8: pairs.parquet row 2: byte 0xfc at position 2; convert it to UTF-8"]),
        (pyarrow.array([b"a", b"gr\xfcn"]).view(pyarrow.string()),
         ["a", "caption is not UTF-8: pairs.parquet row 2: byte 0xfc at position 2; convert the table to UTF-8"]),
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
    assert dataset.sources[0].columns == {"image": "image", "caption": "caption"}


@pytest.mark.parametrize(
    ("column", "kind"), [([datetime.date(2021, 3, 1)], "date32"), ([True], "bool"), ([[True]], "bool")]
)
def test_captions_whose_text_is_not_known_are_refused(tmp_path, column, kind):
    parquet.write_table(pyarrow.table({"image": ["0.png"], "caption": column}), tmp_path / "pairs.parquet")
    with pytest.raises(DataError, match=rf"the captions in column caption are of type {kind}.*; store them as text"):
        open_pairs([str(tmp_path / "pairs.parquet")])


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
    row = {"image": "0.png", "caption": "red"}
    write_table(tmp_path / f"1.{kind}", [row])
    for number in (0, 2):
        empty = tmp_path / f"{number}.{kind}"
        parquet.write_table(pyarrow.Table.from_pylist([row])[1:], empty) if kind == "parquet" else empty.touch()
    assert open_pairs([str(tmp_path / f"*.{kind}")]).caption(0) == "red"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x.csv": b"filepath,title\n0.png,gr\xfcn\n"}, r"x.csv: byte 0xfc is not utf-8; .* iconv -f CP1252"),
        ({"x.csv": "filepath,title\n0.png,a\n".encode("utf-16-le")}, "null bytes .* decompress it, or .* iconv"),
        ({"x.csv": 'filepath,title\n0.png,"red"\n1.png,"no end\n'}, "the row in line 3 has a quotation mark"),
        ({"x.tsv": 'image\ttext\n0.png\t"red\n1.png\ta\n2.png\tx\tend"\n'}, "the row in line 2 has a quotation mark"),
        # the row with the open quotation mark is named, not a correct row in which reading fails
        ({"x.csv": 'filepath,title\n0.png,"no end\n1.png,"a, b"\n'}, "the row in line 2 has a quotation mark"),
        ({"x.csv": "filepath,title\n0.png,red, blue\n1.png,a, b\n"}, r"line 2 has more .*0\.png,red,.*quot"),
        ({"x.jsonl": '{"image": "0.png", "text": "a"}\n{"image": "1'}, "x.jsonl: line 2: .*; write one JSON obj"),
        ({"x.jsonl": '\n\n\n{"image": "0.png", "text": "a"}\n{"image": "1'}, "x.jsonl: line 5: "),
        ({"x.json": '{"annotations":\n []}'}, "x.json: line 1: .*; write one JSON object per line"),
        ({"x.jsonl": "{}\n{}\n"}, "x.jsonl' has only rows without fields"),
        ({"x.csv": "id,Photo,Words\n0,0.png,a\n"}, "it has id, Photo, Words; set --image-key to one of them"),
        ({"x.csv": "image,caption,caption\na.png,a,b\n"}, "has 2 columns named caption; give each column its own name"),
        ({"x.csv": "image,Words\n0.png,a\n"}, "it has image, Words; set --caption-key to one of them"),
        ({"0.csv": "image,caption\n0.png,a\n", "1.csv": "image,words\n0.png,a\n"}, "1.csv' has no caption .*words"),
        ({"x.csv": f"image,caption\n0.png,a\n1.png,{'a' * (17 << 20)}\n"}, r"x\.csv: line 3: field larger than"),
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
    rows += [{"image": "0.png", "caption": ["a  dog", "an\nanimal"]}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    no_image, found = "missing image", outcomes(open_pairs([str(tmp_path / "pairs.jsonl")]))
    assert found == ["missing caption", no_image, no_image, "c", no_image, no_image, "a dog\nan animal"]
    parquet.write_table(pyarrow.table({"image": [[picture(0)]], "caption": ["a"]}), tmp_path / "list.parquet")
    with pytest.raises(BadSample, match=r"missing image: list\.parquet row 1: expected the bytes or .*, got list"):
        open_pairs([str(tmp_path / "list.parquet")]).read(0)


def test_parquet_files_with_different_columns_are_one_error(tmp_path):
    for name in ("caption", "text"):
        parquet.write_table(pyarrow.table({"image": [picture(0)], name: ["a"]}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        DataError, match=r"caption\.parquet and 1 more file: CastError: the files have different columns;"
    ):
        open_pairs([str(tmp_path / "*.parquet")], dataset_type="parquet")


def test_keys_select_columns_and_members(tmp_path):
    members = [("0.png", picture(0)), ("0.jpg", picture(1)), ("0.txt", b"no"), ("0.alt", b"yes")]
    path = write_tar(tmp_path / "shard.tar", members)
    other = write_tar(tmp_path / "other.tar", [*members, ("README", b"no picture")])
    assert len(open_pairs([str(other)], image_key="png;", caption_key="alt;")) == 1
    sample = open_pairs([str(path)], image_key="webp;png", caption_key="alt").read(0)
    assert sample.caption == "yes" and sample.image == picture(0)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "a", "caption": "no", "other": "yes"}))
    assert open_pairs([str(tmp_path / "pairs.jsonl")], caption_key="other").caption(0) == "yes"
    with pytest.raises(DataError, match="no caption column nothing; it has image, caption, other"):
        open_pairs([str(tmp_path / "pairs.jsonl")], caption_key="nothing")


def test_braces_expand_as_in_bash(monkeypatch):
    cases = {
        "a{1..3}": ["a1", "a2", "a3"],
        "{08..11}.tar": ["08.tar", "09.tar", "10.tar", "11.tar"],
        "{9..10}": ["9", "10"],
        "{2..0}": ["2", "1", "0"],
        "{0..10..5}": ["0", "5", "10"],
        "{a,b{0..1}}/{0..1}": ["a/0", "a/1", "b0/0", "b0/1", "b1/0", "b1/1"],
        "plain": ["plain"],
        "{one}": ["{one}"],
        r"\{a,b\}": ["{a,b}"],
        r"{a\,b,c}": ["a,b", "c"],
    }
    for pattern, expected in cases.items():
        assert expand_braces(pattern) == expected
    for pattern in ("{a", "{a,{b}", "a}", "{a}}"):
        with pytest.raises(DataError, match="not balanced"):
            expand_braces(pattern)
    # each range of the last pattern is short, but their product is too large
    for pattern, limit in (
        ("{1..1000000000000}", patterns.MAX_FILES),
        ("{a,{-5..200}}", 100),
        ("{0..3}{0..3}{0..3}", 60),
    ):
        monkeypatch.setattr(patterns, "MAX_FILES", limit)
        with pytest.raises(DataError, match=r"more than .* files; use shorter ranges"):
            expand_braces(pattern)


@pytest.mark.parametrize("name", ["a{0..1}.tar", "{unbalanced.tar", r"back\slash.tar", "[0-9].tar"])
def test_a_file_with_the_name_of_the_pattern_is_used_as_it_is(tmp_path, name):
    path = write_tar(tmp_path / name, pair_members([0]))
    assert expand_pattern(str(path)) == [str(path)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{00000..00004}.tar", r"2 of 5 files are missing, first .*00003\.tar"),
        # a dataset with a mistyped name must not be left out silently
        ("{,secnod/}*.tar", r"1 of 4 files are missing, first .*/secnod/\*\.tar"),
        ("none*.tar", "no file matches"),
        ("notes.md", r"known type.*set --dataset-type"),
        ("bad.parquet", "cannot read"),
        ("0.csv", r"0\.csv is neither a file nor a folder"),
        ("pipes", r"0\.tar is neither a file nor a folder"),
        ("tables", r"cannot read .*0\.csv.*directory"),
        ("a.tar::b/{0..3}.tar", r"separate several datasets by spaces: .*a.tar b/\{0..3\}.tar"),
        ("ftp://host/{00..09}.tar", "use s3://, gs://, hf://, http://, https://, abfs://, or copy or mount the data"),
        (
            "pipe:aws s3 cp s3://bucket/0.tar -",
            "pipes are not read: give the URL itself, such as s3://bucket/00000.tar",
        ),
    ],
)
@pytest.mark.timeout(60)
def test_what_a_pattern_does_not_find_or_cannot_read_is_one_error(tmp_path, spec, message):
    """Reading a pipe that nobody writes to would never end."""
    write_shards(tmp_path, [1, 1, 1])
    fill(tmp_path, {"notes.md": "", "bad.parquet": "no parquet"})
    (tmp_path / "pipes").mkdir()
    (tmp_path / "tables" / "0.csv").mkdir(parents=True)
    for name in ("0.csv", "pipes/0.tar"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        open_pairs([spec if ":/" in spec else str(tmp_path / spec)])
    assert "\n" not in str(caught.value)


def test_sources_are_concatenated_and_ids_have_bounds(tmp_path):
    first, second = write_shards(tmp_path, [2, 3])
    dataset = open_pairs([str(second), str(first)])
    assert captions(dataset) == [f"caption {n}" for n in (2, 3, 4, 0, 1)]
    assert dataset.siblings(1) == (0, 3) and dataset.siblings(4) == (3, 2)
    assert dataset.shard_name(4) == str(first)
    with pytest.raises(IndexError):
        dataset.read(5)
    for specs, options, message in (
        ([str(first), str(second)], {"weights": [1.0]}, "1 weights for 2 datasets; give one per dataset"),
        ([], {}, "no data was given"),
        ([str(first)], {"dataset_type": "zip"}, "--dataset-type is 'zip'; use one of auto"),
    ):
        with pytest.raises(DataError, match=message):
            open_pairs(specs, **options)


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
    (shards / "classnames.txt").write_text("\ufefftabby\u2028\fcat\r\nbig dog\r\n\r\n")
    (shards / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n{c}\n")
    folder = tmp_path / "folder"
    for number in range(4):
        place = folder / ("big_dog" if number % 2 else "a_cat")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.PNG").write_bytes(picture(number))
    (shards / "test" / "._2.tar").write_bytes(b"\0\5\26\7")  # macOS writes it
    by_shard, by_folder = open_labelled(shards), open_labelled(folder)
    assert by_shard.account.problems == {}
    assert by_shard.class_names == ["tabby\u2028\fcat", "big dog"] and by_shard.templates == [
        "a photo of a {c}.",
        "{c}",
    ]
    assert by_folder.class_names == ["a cat", "big dog"] and by_folder.templates == ["a photo of a {c}."]
    assert [by_shard.read(n).caption for n in range(4)] == ["0", "1", "0", "1"]
    assert images(by_shard) == [picture(n) for n in range(4)]
    assert [by_folder.read(n).caption for n in range(4)] == ["0", "0", "1", "1"]
    # int() raises a ValueError for the first two labels; labels from 1 to 2 would all be wrong
    for label, error in (
        (b"9" * 5000, BadSample("label is no number", "")),
        ("²".encode(), BadSample("label is no number", "")),
        (b"2", DataError(r"the label 2, and classnames\.txt has 2 classes")),
    ):
        write_tar(shards / "test" / "²0.tar", [("0.png", picture(0)), ("0.cls", label)])
        with pytest.raises(type(error), match=str(error)):
            open_labelled(shards).read(4)  # the last shard
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
    assert captions(labelled) == ["0"] * COUNT + ["1"] * COUNT
    (tmp_path / "elsewhere" / "metadata.csv").write_text("file_name,text\n0.JPG,00\n")
    dataset = open_pairs([str(tmp_path / "pairs")], dataset_type="imagefolder")
    assert captions(dataset) == ["00"] and dataset.shard_name(0).endswith("pairs/part/metadata.csv")


def test_data_that_may_not_be_read_is_one_error(tmp_path, monkeypatch):
    """No image may be left out silently. The test simulates the error, because root may read any file."""
    write_folder_of_pairs(tmp_path / "pairs")
    scandir, refused = os.scandir, [str(tmp_path / "pairs" / "deep")]

    def refuse(path):
        if os.fspath(path) in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read the folder .*/deep: Permission denied"):
        open_pairs([str(tmp_path / "pairs")], dataset_type="imagefolder")
    refused.append(str(tmp_path / "pairs"))
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(DataError, match=r"cannot read data '.*/pairs': Permission denied"):
        open_pairs([str(tmp_path / "pairs")])
    with pytest.raises(DataError, match=r"cannot read zero-shot data '.*/pairs': Permission denied"):
        open_labelled(tmp_path / "pairs")


def test_classes_without_images_or_with_the_name_of_another_are_reported(tmp_path, caplog):
    """open_clip's class names for ImageNet have two such pairs: their images are never correct at top-1.

    Archives made on macOS contain a folder __MACOSX. It must not silently become a class.
    """
    open_labelled(fill(tmp_path, {"crane_bird/0.png": 0, "crane_machine/0.png": 1, "dog/0.png": 2}))
    assert "WARNING" not in caplog.text
    open_labelled(fill(tmp_path, {"__MACOSX/cat/._0.png": b"\0\5\26\7"}))
    assert f"zero-shot data {tmp_path}: 1 of 4 folders have no images ('__MACOSX') and count as" in caplog.text
    caplog.clear()
    open_labelled(fill(tmp_path, {"classnames.txt": "no class\ncrane\ncrane\ndog\n"}))
    assert "have no images" not in caplog.text
    assert f"zero-shot data {tmp_path}: 2 of 4 classes share their names ('crane'); ties count" in caplog.text


def test_names_of_hub_datasets():
    """`hf:NAME::CONFIG` omits the split. The default is "train", as for `hf:NAME`."""
    assert parse_hub_name("name") == ("name", "train", None)
    assert parse_hub_name("name:test:de") == ("name", "test", "de")
    assert parse_hub_name("name::de") == ("name", "train", "de")


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
         r"images beside the folders of the classes: 2 \('a\.jfif', 'preview\.PNG'\)",
         None, None),
        # SUN397, and two folds of equal classes
        ({"a/abbey/0.png": 0, "o/oasis/indoor/0.png": 0}, "images lie in .*/abbey and in .*/indoor, so", None, None),
        ({"fold1/cat/0.png": 0, "fold1/dog/0.png": 0, "fold2/cat/0.png": 0, "fold2/dog/0.png": 0},
         "move or link the folders of all classes there", None, None),
        # an unrelated folder must not make the ids acceptable
        ({"n01440764/1.png": 1, "n01443537/1.png": 1, "lost+found/.x": ""}, r"WordNet ids .* to classnames\.txt",
         {"classnames.txt": "lost\ntench\ngoldfish\n"}, ["lost", "tench", "goldfish"]),
        ({"big_cat/0.png": 0, "dog/0.png": 0, "classnames.txt": "dog\nBig cat\n"},
         "has the name 'dog' for the folder 'big_cat', and another folder",
         {"classnames.txt": "Big Cat\nwolf\n"}, ["Big Cat", "wolf"]),
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
def test_the_lines_of_class_names_belong_to_the_numbers_of_folders(tmp_path, caplog, names, how, inside):
    """`names` are in the order of their numbers. If they could also be in another one, they are refused."""
    fill(tmp_path, {f"{name}/{inside}0.png": number for number, name in enumerate(names)})
    assert len(open_labelled(tmp_path)) == len(names)  # without names in a file, the order has no effect
    assert ("the prompts name the classes by numbers" in caplog.text) == all(map(str.isdecimal, names))
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
