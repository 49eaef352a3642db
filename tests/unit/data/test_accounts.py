"""Everything that a source sees is in a sample or left out for a reason, for any content of folders and tar shards.

The oracle counts files and members itself, by the rules of docs/data.md, without any code of megaclip.data.
"""

import csv
import dataclasses
import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaclip.data import open_labelled, open_pairs
from megaclip.data.batch import BadSample
from megaclip.data.captions import CaptionKeys
from megaclip.data.image_folder import ImageFolder
from megaclip.data.tar_shards import TarShards
from megaclip.errors import DataError
from tests.unit.data.data_samples import picture

CONTENTS = {
    "jpeg": picture(0, kind="JPEG"),
    "avif": picture(1, kind="AVIF"),
    "heic": b"\0\0\0\x18ftypheic" + bytes(99),
    "text": b"a cat",
    "page": b"<html>not found</html>",
}
STEMS = ("a", "b", "b.1", "b.2", ".c", "d e")
EXTENSIONS = ("jpg", "JPG", "jfif", "avif", "txt", "TXT", "json", "orig", "heic", "seg.png", "")
FILES = st.dictionaries(
    st.builds(lambda folder, stem, extension: f"{folder}{stem}{'.' * bool(extension)}{extension}",
              st.sampled_from(("", "deep/")), st.sampled_from(STEMS), st.sampled_from(EXTENSIONS)),
    st.sampled_from(sorted(CONTENTS)), max_size=14,
)  # fmt: skip


def write_members(path: Path, files: dict[str, str], links: list[str], repeated: list[str]) -> int:
    """Write a tar shard with these members. Return their number."""
    members = [(name, CONTENTS[kind]) for name, kind in files.items()] + [(name, b"again") for name in repeated]
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for number, name in enumerate(links):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, tarfile.LNKTYPE)[number % 2], "a.jpg"
            tar.addfile(member)
    return len(members) + len(links)


def parts_in_samples(source) -> int:
    """Return how many files or members the samples have: two, or one if an image or caption is missing."""
    count = 0
    for row in range(len(source)):
        for read, missing in ((source.captions, "missing caption"), (source.read, "missing image")):
            try:
                read(row)
                count += 1
            except BadSample as bad:
                count += bad.kind != missing
    return count


def check_sum(source, seen: int) -> None:
    account = source.account
    left_out = sum(count for count, *_ in account.left_out.values())
    assert account.seen == seen == account.in_samples + left_out
    assert account.in_samples == parts_in_samples(source)


@settings(max_examples=60, deadline=None)
@example({"a.jpg": "jpeg", "a.txt": "text", "b.1.jpg": "jpeg", "b.1.txt": "text"}, [], [])
@given(FILES, st.lists(st.sampled_from(("x.jpg", "y.txt", "a.jpg", "z.json")), max_size=3),
       st.lists(st.sampled_from(("a.jpg", "a.txt", "q.jpg")), max_size=3))  # fmt: skip
def test_the_sum_over_the_members_of_a_shard(files, links, repeated):
    with tempfile.TemporaryDirectory() as folder:
        seen = write_members(Path(folder) / "0.tar", files, links, repeated)
        try:
            source = TarShards([Path(folder) / "0.tar"])
        except DataError as error:
            assert "\n" not in str(error)
        else:
            check_sum(source, seen)


@settings(max_examples=50, deadline=None)
@example({"a.jfif": "jpeg", "a.txt": "text", "b.orig": "avif", "b.txt": "text", "d e.heic": "heic", "d e.txt": "text"})
@given(FILES)
def test_the_sum_over_the_files_of_a_folder(files):
    with tempfile.TemporaryDirectory() as place:
        for name, kind in files.items():
            path = Path(place, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(CONTENTS[kind])
        try:
            source = ImageFolder(place, caption_keys=[CaptionKeys()])
        except DataError as error:
            assert "\n" not in str(error)
        else:
            check_sum(source, len(files))
        classes = [(Path(place, name), kind) for name, kind in files.items() if name.startswith("deep/")]
        Path(place, "other").mkdir()
        Path(place, "other", "0.jpg").write_bytes(CONTENTS["jpeg"])
        for name in files:
            if "/" not in name:
                Path(place, name).unlink()
        if not classes:
            return
        try:
            labelled = open_labelled(place, max_bad_fraction=1.0)
        except DataError as error:
            assert "\n" not in str(error)
        else:
            images = sum(
                not path.name.startswith(".")
                and (path.suffix.lower() in (".jpg", ".jfif", ".avif", ".png") or kind in ("jpeg", "avif"))
                for path, kind in classes
            )
            assert len(labelled) == labelled.account.in_samples == images + 1
            assert labelled.account.seen == len(classes) + 1


@pytest.mark.parametrize(
    ("files", "samples", "lost", "reason"),
    [
        # webdataset's rule ends the name of a sample at its first dot
        ({"a.jpg": "jpeg", "a.txt": "text", "b.1.jpg": "jpeg", "b.1.txt": "text"}, 1, 1, "a dot before"),
        ({"b.jpg": "jpeg", "b.txt": "text", "b.1.jpg": "jpeg", "b.1.txt": "text"}, 1, 1, "a dot before"),
        ({"b.jpg": "jpeg", "b.txt": "text", "b.seg.png": "jpeg"}, 1, 0, "neither an image"),
        ({"a.orig": "jpeg", "a.txt": "text"}, 1, 0, ""),
        # two images of one possible sample
        ({"a.jpg": "jpeg", "a.txt": "text", "b.1.jpg": "jpeg", "b.1.png": "jpeg", "b.1.txt": "text"}, 1, 1, "a dot b"),
        ({"a.jpg": "jpeg", "a.txt": "text", "b.heic": "heic", "b.heif": "heic"}, 1, 1, "cannot read, such as HEIC"),
        # a bad sample without an image
        ({"a.heic": "heic", "a.txt": "text", "b.jpg": "jpeg", "b.txt": "text"}, 2, 0, "cannot read, such as HEIC"),
        ({"a.avif": "avif", "a.txt": "text"}, 1, 0, ""),
        ({"a.jpg": "jpeg", "a.txt": "text", "b.heic": "heic"}, 1, 1, "cannot read, such as HEIC"),
    ],
)  # fmt: skip
def test_members_that_could_have_been_samples(tmp_path, files, samples, lost, reason):
    write_members(tmp_path / "0.tar", files, [], [])
    source = TarShards([tmp_path / "0.tar"])
    assert (len(source), source.account.lost) == (samples, lost)
    assert any(found.startswith(reason) or reason in found for found in source.account.left_out) == bool(reason)


@pytest.mark.parametrize("kind", ["shard", "folder", "classes"])
def test_too_many_possible_samples_that_are_left_out_are_an_error(tmp_path, kind):
    """6 of 30 must not disappear in a log. A larger --max-bad-fraction accepts them."""
    if kind == "shard":
        files = {f"{n}.{5 if n < 6 else ''}{'.' * (n < 6)}{end}": end for n in range(30) for end in ("jpg", "txt")}
        files = {name: {"jpg": "jpeg", "txt": "text"}[end] for name, end in files.items()}
        write_members(tmp_path / "0.tar", files, [], [])
    else:
        for n in range(30):
            place = tmp_path / (f"class {n % 2}" if kind == "classes" else "")
            place.mkdir(exist_ok=True)
            name, content = (f"{n}.heic", "heic") if n < 6 else (f"{n}.jfif", "jpeg")
            (place / name).write_bytes(CONTENTS[content])
            if kind == "folder":
                (place / f"{n}.txt").write_bytes(b"a cat")
    spec = str(tmp_path / "0.tar" if kind == "shard" else tmp_path)

    def open_them(**limit):
        return open_labelled(spec, **limit) if kind == "classes" else open_pairs([spec], **limit)

    with pytest.raises(DataError, match=r"6 of 30 possible samples are left out, .* more than the limit 0\.01: repair"):
        open_them()
    with pytest.raises(
        DataError, match=r"more than --max-bad-fraction 0\.1: repair the data, or set a larger --max-bad"
    ):
        open_them(max_bad_fraction=0.1)
    assert len(open_them(max_bad_fraction=0.2)) == 24


@pytest.mark.parametrize(("kind", "counts"), [("tar", (6, 2, 1)), ("csv", (4, 2, 0))])
def test_files_of_another_type_beside_the_data_are_counted(tmp_path, kind, counts):
    """A picture with a caption beside shards is a possible sample. Pictures beside a table are its own."""
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / name).write_bytes(CONTENTS["jpeg"])
    for name in ("notes.md", "1.txt"):
        (tmp_path / name).write_text("crawled in spring")
    if kind == "tar":
        write_members(tmp_path / "0.tar", {"a.jpg": "jpeg", "a.txt": "text"}, [], [])
    else:
        (tmp_path / "0.csv").write_text("image,text\n0.jpg,a\n1.jpg,b\n")
    (account,) = open_pairs([str(tmp_path)], max_bad_fraction=1.0).accounts
    assert (account.seen, account.in_samples, account.lost) == counts


CELLS = st.sampled_from(
    ("0.png", "", "a cat", '"red"', '"', 'a "b" c', "x,y", "two\nlines", "re\rturn", "\ttab", "ü", "1.png\n0.png,end")
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6),
    st.sampled_from(",\t;|"),
    st.booleans(),
    st.sampled_from(("\n", "\r\n")),
)
def test_the_rows_of_a_csv_file_are_read_as_the_csv_module_wrote_them_or_refused(rows, separator, quote_all, end):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            quoting = csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
            writer = csv.writer(file, delimiter=separator, quoting=quoting, lineterminator=end)
            writer.writerows([("filepath", "title"), *rows])
        try:
            dataset = open_pairs([str(path)])
        except DataError as error:
            assert "mark that is not closed" in str(error) and any("1.png" in cell for row in rows for cell in row)
            return
        if any("1.png" in cell for row in rows for cell in row):  # a caption that holds a row cannot be recognised
            return
        assert len(dataset) == len(rows) == dataset.accounts[0].seen
        for number, (_, caption) in enumerate(rows):
            try:
                assert dataset.caption(number) == " ".join(caption.split())
            except BadSample as bad:
                assert bad.kind in ("empty caption", "missing caption") and not caption.strip()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(("a cat", '"red', 'blue"', '"', 'a "b" c', "x,y", '"whole"')), min_size=1, max_size=6))
def test_lines_that_were_joined_by_tabs_are_all_read_or_refused(texts):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.tsv")
        path.write_text("filepath\ttitle\n" + "".join(f"{n}.png\t{text}\n" for n, text in enumerate(texts)))
        try:
            dataset = open_pairs([str(path)])
        except DataError as error:
            assert "mark that is not closed" in str(error) and '"whole"' in texts + ['"whole"'] * ('"' in texts)
            return
        assert len(dataset) == len(texts)
        for number, text in enumerate(texts):
            assert dataset.caption(number) in (text, text.strip('"'))


def test_the_account_is_kept_in_the_index(tmp_path):
    seen = write_members(tmp_path / "0.tar", {"a.jpg": "jpeg", "a.txt": "text", "a.json": "page"}, ["b.jpg"], [])
    first, again = (TarShards([tmp_path / "0.tar"]).account for _ in range(2))
    assert dataclasses.asdict(first) == dataclasses.asdict(again) and first.seen == seen and first.lost == 1
    with pytest.raises(DataError, match="--image-key and --caption-key both name txt"):
        open_pairs([str(tmp_path / "0.tar")], image_key="txt")
    write_members(tmp_path / "1.tar", {"a.heic": "heic", "a.txt": "text"}, [], [])
    with pytest.raises(DataError, match=r"members with an image format .*HEIC \(convert them to JPEG\)"):
        open_pairs([str(tmp_path / "1.tar")])
