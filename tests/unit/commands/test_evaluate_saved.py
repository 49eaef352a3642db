"""`megaclip evaluate --suite` on one process: resume, broken sets, the table. distributed: scores of all kinds."""

import json
import os
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megaclip.commands import evaluate_saved as command
from megaclip.data import ImageTransform
from megaclip.data.labelled import split_shards
from megaclip.errors import REFUSED_EXIT_CODE, ConfigError, DataError
from megaclip.evaluation import Evaluator
from megaclip.evaluation.suite import Task
from tests.suite_sets import COUNT, image, npy, write_classes, write_suite

WORDS = torch.from_numpy(np.random.default_rng(0).normal(size=(5000, 12))).float()


def encode(images: torch.Tensor | None = None, tokens: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Return the means of the rows of pixels, and a random feature for each text."""
    assert tokens is None or len(tokens) <= 3, "more texts than text_batch_size, which plans count"
    found = None if images is None else images.float().mean(dim=1).flatten(1)[:, ::5][:, :12] - 128
    found = None if found is None else torch.nn.functional.normalize(found, dim=1)
    return found, None if tokens is None else WORDS[tokens[:, 0]]


def tokenizer(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[sum(text.encode()) % 5000] for text in texts])


def run(suite: Path, results: Path | None = None, model: str = "model", config: str = "", **flags: bool) -> None:
    flags = {"markdown": False, "probe": False} | flags
    arguments = Namespace(suite=suite, json=results, precision="fp32", **flags)
    tokens = partial(tokenizer)
    tokens.identity = "a tokenizer"  # type: ignore[attr-defined]
    weights = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(weights.weight, float(len(model)))
    torch.nn.init.zeros_(weights.bias)
    weights.config = config  # type: ignore[assignment]
    loaded = SimpleNamespace(model=weights, transform=ImageTransform(8), tokenizer=tokens)
    evaluator = Evaluator(encode, loaded.transform, tokens, batch_size=4, num_workers=0, text_batch_size=3)
    command.evaluate_suite(arguments, loaded, evaluator)  # type: ignore[arg-type]  # a stand-in for the model


def lines_of(results: Path) -> dict[str, dict[str, Any]]:
    return {line["key"]: line for line in map(json.loads, results.read_text().splitlines())}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Three sets of labelled images."""
    write_suite(tmp_path / "all")
    for name in ("wds_cars_test", "own_numbers", "wds_geode_test"):
        shutil.move(tmp_path / "all" / name, tmp_path / "suite" / name)
    return tmp_path / "suite"


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the tasks that were opened."""
    keys: list[str] = []
    open_task = command.open_task
    monkeypatch.setattr(command, "open_task", lambda task: (keys.append(task.key), open_task(task))[1])
    return keys


def test_only_tasks_whose_data_or_model_has_changed_are_evaluated_again(
    suite: Path, tmp_path: Path, evaluated: list[str]
) -> None:
    results = tmp_path / "results.jsonl"
    run(suite, results)
    whole = results.read_text()
    assert sorted(lines_of(results)) == sorted(evaluated) == ["cars", "fairness/geode", "own_numbers"]
    evaluated.clear()
    run(suite, results)
    assert evaluated == [] and results.read_text() == whole
    results.write_text(whole.splitlines()[0] + "\n")  # an interrupted run
    run(suite, results)
    assert evaluated == ["fairness/geode", "own_numbers"] and results.read_text() == whole
    evaluated.clear()
    write_classes(suite / "own_numbers", [{"png": image(row), "npy": npy(1)} for row in range(COUNT)])  # as many bytes
    run(suite, results)
    assert evaluated == ["own_numbers"] and lines_of(results)["own_numbers"] != json.loads(whole.splitlines()[2])
    (suite / "own_numbers").rename(tmp_path / "own_numbers")  # its result does not stay in the file
    run(suite, results)
    assert sorted(lines_of(results)) == ["cars", "fairness/geode"]
    (tmp_path / "own_numbers").rename(suite / "own_numbers")
    evaluated.clear()
    run(suite, results, config="as many weights, other heads")
    assert len(evaluated) == 3
    evaluated.clear()
    run(suite, results, model="another model")
    assert len(evaluated) == 3
    assert {line["checksum"] for line in lines_of(results).values()}.isdisjoint(
        json.loads(line)["checksum"] for line in whole.splitlines()
    )


def test_checksums_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """A results file of an earlier version is resumed from."""
    (tmp_path / "0.tar").write_bytes(b"a shard")
    os.utime(tmp_path / "0.tar", ns=(0, 10**18))
    weights = SimpleNamespace(
        config="a config", state_dict=lambda: {"b": torch.ones(2).bfloat16(), "a": torch.ones(())}
    )
    model = SimpleNamespace(model=weights, transform=ImageTransform(8), tokenizer=SimpleNamespace(identity="clip"))
    of_model = command._model_checksum(model, "bf16, probe: False")  # type: ignore[arg-type]  # a stand-in
    assert command._checksum(Task("key", tmp_path), of_model) == "e2c3cf5b6289af8e"


def test_results_are_as_datacomp_writes_and_reads_them(suite: Path, tmp_path: Path) -> None:
    """The keys that its aggregation reads, with numbers or null."""
    run(suite, tmp_path / "results.jsonl")
    line = lines_of(tmp_path / "results.jsonl")["cars"]
    assert line["dataset"] == "Stanford Cars" and line["samples"] == COUNT
    assert {"acc1", "acc5", "mean_per_class_recall", "main_metric"} <= line["metrics"].keys()
    assert line["metrics"]["main_metric"] == line["metrics"]["acc1"]


def test_the_table_lists_every_task_and_what_is_missing(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_classes(suite / "wds_fairface_test", [])
    run(suite, markdown=True)
    table = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert [row[:2] for row in rows if "-" not in row[0]] == [
        ["task", "metric"],
        ["Stanford Cars", "acc1"],
        ["GeoDE", "acc_wg"],
        ["own_numbers", "acc1"],
        ["average", "3 tasks"],
        ["average of DataComp", "2 tasks"],
    ]
    assert len({len(line) for line in table.splitlines() if line[:1] == "|"}) == 1
    assert "not evaluated: fairness/fairface: DataComp has no main metric for it" in table
    assert "not in the folder: 36 of DataComp's 38 tasks: vtab/caltech101, " in table


@pytest.mark.parametrize(("kind", "end"), [("", "cls"), ("retrieval", "txt")])
def test_a_set_with_a_damaged_shard_is_not_evaluated(tmp_path: Path, kind: str, end: str) -> None:
    write_classes(tmp_path, [{"png": image(row), end: b"1"} for row in range(4)], shards=2, kind=kind)
    (tmp_path / "test" / "1.tar").write_bytes(b"")
    with pytest.raises(DataError, match=f"{tmp_path}: 1 damaged tar shards, so samples may be missing; download them"):
        command.open_task(Task("key", tmp_path))


def test_shards_have_one_order_however_a_disk_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ranks of several hosts would read other images under the same ids."""
    names = ["1.tar", "01.tar", "10.tar", "2.tar"]
    for listed in (names, names[::-1]):
        monkeypatch.setattr(Path, "glob", lambda folder, _, listed=listed: [folder / name for name in listed])
        assert [path.name for path in split_shards(tmp_path)] == ["01.tar", "1.tar", "2.tar", "10.tar"]


@pytest.mark.parametrize("name", ["wds_cars_test", "winoground"])
def test_a_set_is_no_suite(tmp_path: Path, name: str) -> None:
    write_suite(tmp_path)
    with pytest.raises(DataError, match=f"{name}' is one set; give the folder that contains it"):
        command.find_tasks(tmp_path / name)


def test_names_of_folders_are_no_patterns_and_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    write_suite(tmp_path / "all")
    for name in ("r[v2]", "r{a,b}", "r\\{"):
        shutil.copytree(tmp_path / "all" / "wds_flickr30k_test", tmp_path / "suite" / name)
    shutil.move(tmp_path / "all" / "winoground", tmp_path / "suite")
    examples = tmp_path / "suite" / "winoground" / "examples.jsonl"
    examples.write_bytes(b"\xef\xbb\xbf" + examples.read_bytes())
    assert [len(command.open_task(task)) for task in command.find_tasks(tmp_path / "suite")] == [22, 22, 22, 22]


def test_labels_without_names_and_fractions_as_labels_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "suite" / "plain", [{"png": image(0), "cls": b"1"}])
    (tmp_path / "suite" / "plain" / "classnames.txt").unlink()
    write_classes(tmp_path / "suite" / "shares", [{"png": image(0), "npy": npy([0.7] * 7)}], kind="multilabel")
    with pytest.raises(DataError, match="2 of 2 tasks were not evaluated"):
        run(tmp_path / "suite")
    output = capsys.readouterr().out
    assert "plain has no classnames.txt, so its samples are pairs for retrieval: none of the 1 samples" in output
    assert "shares: the images or labels of all 1 samples are missing or unreadable" in output


BROKEN = {
    "no data": ({}, "no data found; expected *.tar, test/*.tar or one folder of images per class"),
    "missing shards": ({"test/0.tar": b"", "test/nshards.txt": b"3"}, "specifies '3' shards, found 1; download the"),
    "unknown type": ({"dataset_type.txt": b"video"}, "is 'video'; expected classification, multilabel or retrieval"),
    "bytes as type": ({"dataset_type.txt": b"\xff"}, "dataset_type.txt is not UTF-8"),
    "no captions": ({"test/0.tar": b"", "dataset_type.txt": b"retrieval"}, "no samples in 1 tar shards"),
    "not JSON": ({"examples.jsonl": b"{", "images/0.png": b""}, "examples.jsonl, item 1: "),
    "nested JSON": ({"add_att.json": b"[" * 10**6, "val2017/0.png": b""}, "add_att.json, item 1: "),
    "list": ({"add_att.json": b"[1, 2]", "val2017/0.png": b""}, "add_att.json, item 1: "),
    "no field": ({"examples.jsonl": b'{"image_0": "0"}', "images/0.png": b""}, "item 1: no 'image_1'"),
    "no image": (
        {"swap_obj.json": b'{"0": {"filename": "a", "caption": "b", "negative_caption": "c"}}', "val2017/0.png": b""},
        "the images of all 1 items are missing or unreadable",
    ),
    "no candidates": (
        {"winogavil_dataset.csv": b'candidates,cue,associations\n"[""a""]",c,"[""b""]"', "images/a.png": b""},
        "the associations ['b'] are not among the candidates ['a']",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_is_one_line_and_not_fatal(
    suite: Path, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files, message = BROKEN[name]
    (suite / "broken").mkdir()
    for path, content in files.items():
        (suite / "broken" / path).parent.mkdir(exist_ok=True)
        (suite / "broken" / path).write_bytes(content)
    with pytest.raises(DataError, match=r"^1 of 4 tasks were not evaluated: ") as exit_info:
        run(suite, tmp_path / "results.jsonl")
    assert exit_info.value.exit_code == REFUSED_EXIT_CODE
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not evaluated: ")]
    assert message in line and len(line) < 700
    assert len(lines_of(tmp_path / "results.jsonl")) == 3


@pytest.mark.parametrize("content", [b"", npy([1]), npy(["a"] * 2), npy([1, np.nan]), npy([1, 1e300])])
def test_bad_group_labels_are_left_out_and_counted(content: bytes, tmp_path: Path) -> None:
    samples = [{"png": image(row), "cls": b"1", "npy": content if row == 5 else npy([row % 2, 3])} for row in range(9)]
    write_classes(tmp_path / "suite" / "wds_geode_test", samples)
    run(tmp_path / "suite", tmp_path / "results.jsonl")
    line = lines_of(tmp_path / "results.jsonl")["fairness/geode"]
    assert line["bad_samples"] == {"wrong .npy": 1} and line["samples"] == 8
    assert line["metrics"]["count_region:0"] + line["metrics"]["count_region:1"] == 8


@pytest.mark.parametrize(
    ("labels", "found"), [([0, 1] * 4, "8 readable images of 2"), ([1] * 12, "12 readable images of 1")]
)
def test_a_probe_without_validation_images_or_classes_is_refused(
    labels: list[int], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [{"png": image(row), "cls": str(label).encode()} for row, label in enumerate(labels)]
    for name in ("mine", "other"):
        write_classes(tmp_path / "suite" / name, samples)
    shutil.copytree(tmp_path / "suite" / "mine" / "test", tmp_path / "suite" / "mine" / "train")
    with pytest.raises(DataError, match="1 of 2 tasks were not evaluated: mine"):
        run(tmp_path / "suite", probe=True)
    output = capsys.readouterr().out
    assert f"{found} classes; --probe requires 10 images of 2 classes or more" in output
    assert "no probe of other: it requires a folder train beside test" in output


@pytest.mark.parametrize("layout", ["tars", "folders"])
def test_the_probe_uses_the_train_split(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test images are training images, so the most similar one has the right label. One training image is bad."""
    encoded = Mock(side_effect=encode)
    monkeypatch.setitem(globals(), "encode", encoded)
    place = tmp_path / "suite" / "mine"

    def content(row: int) -> bytes:
        return image(row) if row < 39 else b"no image"

    for split in ("train", "test"):
        rows = range(1, 40) if split == "train" else range(1, 11)
        if layout == "tars":
            write_classes(place, [{"png": content(row), "cls": str(row % 2).encode()} for row in rows])
            (place / "test").rename(place / split)
        (place / ".hidden").mkdir(parents=True, exist_ok=True)
        for row in rows if layout == "folders" else ():
            (place / split / f"class {row % 2}").mkdir(parents=True, exist_ok=True)
            (place / split / f"class {row % 2}" / f"{row}.png").write_bytes(content(row))
    run(tmp_path / "suite", tmp_path / "results.jsonl", probe=True)
    line = lines_of(tmp_path / "results.jsonl")["mine"]
    metrics = line["metrics"]
    assert line["bad_samples"] == {"undecodable image, in the train split": 1} and line["samples"] == 10
    assert metrics["knn_acc1"] == 1.0 and {"lp_acc1", "lp_mean_per_class_recall", "lp_C"} < metrics.keys()
    assert sum("images" in call.kwargs for call in encoded.call_args_list) == 13, "batches of 39 and of 10 images"
    assert ["knn_acc1", "100.00"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    run(tmp_path / "suite", tmp_path / "results.jsonl")
    assert "lp_acc1" not in lines_of(tmp_path / "results.jsonl")["mine"]["metrics"], "the flag is in the checksum"


def test_sets_with_the_same_key_are_refused(suite: Path) -> None:
    shutil.copytree(suite / "wds_cars_test", suite / "cars")
    with pytest.raises(DataError, match="several folders are cars; keep one of them in the suite"):
        run(suite)


def test_another_file_is_not_overwritten(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a results file of --suite; choose another path"):
        run(suite, tmp_path / "notes.json")
    with pytest.raises(DataError, match="has no sub-folders; expected one per task"):
        run(suite / "wds_cars_test" / "test")
    with pytest.raises(DataError, match="cannot read the suite"):
        run(suite / "nowhere")
