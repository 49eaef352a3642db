"""--suite in training: the curves are the scores of `megaclip evaluate --suite`; their mean selects the best step."""

import json
import shutil
import sys

import pytest

from megaclip.commands import evaluate
from megaclip.errors import DataError
from megaclip.evaluation.suite import open_suite
from tests.end_to_end.training_runs import flags, run_in_ranks, scalars
from tests.suite_sets import write_suite
from tests.tolerances import WRITTEN, assert_close


def test_a_run_scores_a_suite_as_the_command_does(tiny_run, tmp_path, monkeypatch):
    """Two ranks at ZeRO-3, where every rank has to encode as often as the other."""
    write_suite(tmp_path / "suite")
    (end, other) = run_in_ranks([flags(tiny_run, tiny_run / "zero3.json", tmp_path, suite=tmp_path / "suite")])[0]
    assert end.exit_code == other.exit_code == 0, end.output
    run = tmp_path / "run"
    results = tmp_path / "results.jsonl"
    command = ["evaluate", str(run), "--suite", str(tmp_path / "suite"), "--json", str(results), "--workers", "0"]
    monkeypatch.setattr(sys, "argv", command)
    evaluate.main()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    expected = {f"suite/{line['key']}": line["metrics"]["main_metric"] for line in lines}
    expected = {name: value for name, value in expected.items() if value is not None}
    expected["suite_average"] = sum(expected.values()) / len(expected)
    curves = scalars(run)
    shown = {name.removeprefix("evaluation/"): own[2] for name, own in curves.items() if name.startswith("evaluation/")}
    assert shown.keys() == expected.keys() and len(shown) > 12
    for name, value in expected.items():
        assert_close(shown[name], value, WRITTEN, size=1)
    best = json.loads((run / "best_checkpoint.json").read_text())
    assert best["main_score"] == "suite_average" and best["data"]["suite"] == str(tmp_path / "suite")


def test_a_suite_that_cannot_be_scored_whole_is_refused_at_the_start(tmp_path):
    write_suite(tmp_path / "suite")
    shutil.copytree(tmp_path / "suite" / "wds_cars_test", tmp_path / "suite" / "cars")
    with pytest.raises(DataError, match="several folders are cars; keep one of them in the suite"):
        open_suite(tmp_path / "suite")
    shutil.rmtree(tmp_path / "suite" / "cars")
    (tmp_path / "suite" / "wds_cars_test" / "classnames.txt").unlink()
    with pytest.raises(DataError, match="cars"):
        open_suite(tmp_path / "suite")
