"""`megaclip inspect` always prints a report, describes the data, and its exit code agrees with training."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from megaclip.commands import inspect_data
from megaclip.data import ImageTransform, TrainLoader, load_tokenizer, open_pairs
from megaclip.engine.inputs import model_preprocessing
from megaclip.errors import DataError, MegaclipError
from tests.unit.data.data_samples import pair_members, picture, write_shards, write_tar


@pytest.fixture
def inspect(monkeypatch, capsys):
    """Return a function that runs the tool in this process and returns (exit code or error, output)."""

    monkeypatch.setattr(inspect_data, "DEFAULT_MODEL", "demo-tiny")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["inspect_data.py", *map(str, arguments), "--seconds", "0"])
        try:
            code = inspect_data.main()
        except SystemExit as error:
            code = error.code
        except MegaclipError as error:
            code = f"error: {error}"
        return code, capsys.readouterr().out

    return run


def training_accepts(spec):
    """Return whether a loader with the limits of a run reads all of the data."""
    dataset = open_pairs([str(spec)])
    loader = TrainLoader(dataset, ImageTransform(16, training=True), load_tokenizer("clip", 77), micro_batch_size=10)
    try:
        for _ in range(2000 // 10):
            next(loader)
    except DataError:
        return False
    return True


def test_the_report_shows_three_samples_and_the_chosen_columns(tmp_path, inspect):
    write_shards(tmp_path, [3, 4])
    code, output = inspect(tmp_path / "*.tar")
    assert code == 0 and "training would accept this data" in output
    assert "datasets 0: type webdataset, files 2" in output
    assert "samples 7, images .png (7), captions .txt (7)" in output
    for number, (row, name) in enumerate(((0, "00000.tar/000000"), (3, "00001.tar/000003"), (6, "00001.tar/000006"))):
        shown = f"shown {number}: caption 'caption {row}', width 12, height 10, format PNG, tokens 4, sample {name}"
        assert shown in output


def test_a_models_tokens_and_pixels_are_those_of_a_run(tmp_path, inspect):
    """By hand: demo-tiny has 24 tokens and 24 pixels. tests/unit/engine/test_inputs.py tests a model with a card."""
    write_shards(tmp_path, [3])
    shards, sheet = tmp_path / "*.tar", tmp_path / "sheet.png"
    code, output = inspect(shards, "--model", "demo-tiny", "--pictures", sheet, "--json")
    report = json.loads(output[output.index("{") :])
    assert code == 0 and report["loader"]["image_size"] == 24 and sheet.exists()
    assert report["cores_per_gpu"].keys() == {"a100", "h100", "h200", "b200"} and min(report["cores_per_gpu"].values())
    tokenizer, pixels = model_preprocessing("demo-tiny", None)
    assert (tokenizer.context_length, pixels["size"], pixels["resize_mode"]) == (24, 24, "shortest")
    tokenizer, pixels = model_preprocessing("ViT-L-14-336", None)
    assert (tokenizer.context_length, pixels["size"]) == (77, 336)
    assert "error: " in inspect(shards, "--model", "no-such-model")[0]


@pytest.mark.parametrize("bad", [10, 4])
def test_bad_data_is_reported_completely_and_refused_as_training_does(tmp_path, inspect, bad):
    """The report must be complete even if all samples are bad. Where training refuses the data, the exit code is 1."""
    members = [
        (name, b"no image" if name.endswith("png") and int(name[:6]) < bad else content)
        for name, content in pair_members(range(10))
    ]
    path = write_tar(tmp_path / "shard.tar", members)
    code, output = inspect(path)
    assert code == 1 and not training_accepts(path)
    assert f"bad: undecodable image {bad}" in output and "samples: 10" in output
    refused = f"{bad} of the 10 decoded samples are bad ({bad} undecodable image), over --max-bad-fraction 0.01"
    assert f"training would REFUSE this data: {refused}" in output and "problems: none" not in output
    assert ("shown 0" in output) == (bad < 10)
    assert inspect(path, "--max-bad-fraction", 1)[0] == (1 if bad == 10 else 0)
    code, output = inspect(path, "--json")
    assert code == 1 and json.loads(output)["refused"].startswith(f"{bad} of the 10 decoded samples")


def test_all_problems_are_named_and_listed(tmp_path, inspect):
    """One run must name every file to repair, and the verdict every reason."""
    files = {"a.txt": b"&nbsp;", "b.txt": b"\x01", "c.txt": b"a cat", "d.txt": b"a dog", "b.jpg": picture(1)}
    files |= {"a.jpg": picture(0), "c.jpg": b"no image", "d.jpg": picture(2)}
    files |= {f"{name}.heic": b"\0\0\0\x18ftypheic" + bytes(99) for name in "xyz"} | {"y.jxl": b"\xff\x0a" + bytes(99)}
    for name, content in files.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    code, output = inspect(tmp_path / "data", "--list", tmp_path / "list.txt")
    assert code == 1
    verdict = output[output.index("training would REFUSE") :]
    assert "3 of 7 possible samples are left out, 3 for an image format that the installed Pillow" in verdict
    assert (
        "HEIC" in verdict and "; 3 of the 4 decoded samples are bad (2 empty caption, 1 undecodable image)" in verdict
    )
    assert "control characters or HTML spaces such as &nbsp;" in output
    listed = [line.split("\t") for line in (tmp_path / "list.txt").read_text().splitlines()]
    bad = {name: kind for kind, detail in listed for name in files if f"/{name}" in detail}
    empty = dict.fromkeys(("a.jpg", "b.jpg"), "empty caption")
    assert {name: kind for name, kind in bad.items() if name[0] not in "xyz"} == empty | {"c.jpg": "undecodable image"}
    assert bad.keys() >= {"x.heic", "y.heic", "z.heic"}
    assert inspect(tmp_path / "data", "--list", tmp_path / "no folder" / "x")[0].startswith("error: cannot write")


def test_good_data_is_accepted_as_in_training(tmp_path, inspect):
    (path,) = write_shards(tmp_path, [10])
    assert inspect(path)[0] == 0 and training_accepts(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert ", damaged shard 1\n" in inspect(path)[1]


def test_data_that_cannot_be_opened_is_one_line(tmp_path, inspect):
    code, output = inspect(tmp_path / "nothing.tar")
    assert code.startswith("error: data ") and output == ""


def test_columns_of_every_kind_of_source(tmp_path, inspect):
    record = json.dumps({"caption": "a cat"}).encode()
    write_tar(tmp_path / "0.tar", [("0.jpg", picture(0)), ("0.json", record), ("1.png", picture(1)), ("1.alt", b"x")])
    assert (
        "images .jpg (1), .png (1), captions json.alt or caption (1), .alt (1)"
        in inspect(tmp_path / "0.tar", "--caption-key", "alt;json.caption")[1]
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.JPG").write_bytes(picture(0))
    (tmp_path / "folder" / "a.txt").write_text("a cat")
    assert "images .jpg (1), captions .txt (1)" in inspect(tmp_path / "folder")[1]
    (tmp_path / "pairs.csv").write_text(f"filepath,title\n{tmp_path}/folder/a.JPG,a cat\n")
    assert "images filepath, captions title" in inspect(tmp_path / "pairs.csv")[1]


def test_captions_of_one_image_are_measured_one_by_one(tmp_path, inspect):
    """Training uses one caption at a time, so the lengths of an image's captions must not be added up."""
    captions = ["a red cat " * 4, "a dog", "a blue bird " * 4]  # 12, 2 and 12 words of one token each
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "0.png", "caption": captions}))
    code, output = inspect(tmp_path / "pairs.jsonl", "--json")
    sample = json.loads(output)["sample"]
    assert code == 0
    assert sample["distinct_captions"] == 3 and sample["captions_that_fill_the_context"] == 0
    assert sample["tokens"] == {"min": 4, "median": 14, "p95": 14, "max": 14}  # with start and end of text
    assert sample["caption_characters"]["min"] == len("a dog")


def test_ignored_orientation_and_dropped_transparency_are_counted(tmp_path, inspect):
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated, transparent = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(picture(0))).save(rotated, "JPEG", exif=exif)
    Image.new("RGBA", (9, 9)).save(transparent, "PNG")
    contents = [rotated.getvalue(), transparent.getvalue(), picture(1)]
    members = [m for n, content in enumerate(contents) for m in ((f"{n}.png", content), (f"{n}.txt", b"a"))]
    _, output = inspect(write_tar(tmp_path / "0.tar", members))
    assert "exif orientation ignored: 1" in output and "transparency dropped: 1" in output


def test_the_contact_sheet_shows_the_pixels_that_the_model_sees(tmp_path, inspect):
    """The sheet must show a red, a green and a blue image in this order."""
    members = []
    for number, colour in enumerate(("red", "lime", "blue")):
        buffer = io.BytesIO()
        Image.new("RGB", (20, 30), colour).save(buffer, "PNG")
        members += [(f"{number}.png", buffer.getvalue()), (f"{number}.txt", f"a {colour} thing".encode())]
    path, sheet = write_tar(tmp_path / "0.tar", members), tmp_path / "sheet.png"
    assert inspect(path, "--pictures", sheet)[0] == 0
    pixels = np.asarray(Image.open(sheet)).astype(int)
    places = [
        np.argwhere((pixels == colour).all(-1))[:, 1].mean() for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))
    ]
    assert places == sorted(places)
    code, _ = inspect(path, "--pictures", tmp_path / "no folder" / "x.png")
    assert code.startswith("error: --pictures")
    code, _ = inspect(path, "--pictures", tmp_path / "sheet.docx")
    assert code.startswith("error: --pictures")


def test_meaningless_numbers_are_refused(capsys, monkeypatch):
    for flag, value in (("--samples", "-1"), ("--seconds", "nan"), ("--max-bad-fraction", "2")):
        monkeypatch.setattr("sys.argv", ["inspect_data.py", "x.tar", flag, value])
        with pytest.raises(SystemExit) as caught:
            inspect_data.main()
        assert caught.value.code == 2 and f"argument {flag}: '{value}' is not a" in capsys.readouterr().err


def test_several_keys_of_captions_are_counted(tmp_path, inspect):
    """By hand: the first sample has both keys with three captions, the second has one caption."""
    records = [{"short": "a", "long": ["b", "c"]}, {"short": "d"}, {"other": "e"}]
    members = [(f"{n}.png", picture(n)) for n in range(3)]
    members += [(f"{n}.json", json.dumps(record).encode()) for n, record in enumerate(records)]
    path = write_tar(tmp_path / "0.tar", members)
    _, output = inspect(path, "--caption-key", "short:2,long:1", "--max-bad-fraction", 1, "--json")
    report = json.loads(output[output.index("{") :])
    assert report["sample"]["samples_with_caption_key"] == {"short": 2, "long": 1}
    assert report["sample"]["captions_per_sample"] == {"min": 1.0, "median": 2.0, "p95": 2.9, "max": 3.0}
    assert report["sample"]["bad"] == {"missing caption": 1}
