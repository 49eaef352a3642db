"""The functions that apply bounds: which errors they accept, report and record."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.tolerances import Bound, assert_close, assert_far, compare, rounding

BOUND = Bound("a bound", 1e-3)


@pytest.fixture(autouse=True)
def _record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude the deliberate errors of this file from the table of `make test-portable`."""
    monkeypatch.delenv("MEGACLIP_TEST_ERRORS", raising=False)


def test_an_error_is_relative_to_the_largest_expected_value() -> None:
    assert compare(1 + 1e-12, 1.0, BOUND).error == pytest.approx(1e-12, rel=1e-3), "Python numbers keep float64"
    assert compare([100.0, 2.0], [100.0, 1.0], BOUND).error == pytest.approx(0.01)
    assert compare([100.0, 2.0], [100.0, 1.0], BOUND, size=2.0).error == pytest.approx(0.5)
    assert compare([3.0, 5.0], [3.0, 4.0], Bound("norm", 1, norm=True)).error == pytest.approx(0.2)
    assert compare(1e-6, 0.0, BOUND).error == pytest.approx(1e-3), "sizes below 1e-3 count as 1e-3"


def test_what_exceeds_its_bound_fails() -> None:
    assert_close(1.0009, 1.0, BOUND)
    assert_close(torch.tensor([-math.inf, 1.0]), [-math.inf, 1.0], BOUND)
    for got in (1.0011, math.nan, math.inf):
        with pytest.raises(AssertionError, match=r"the loss is off by .* times its bound a bound \(1\.00e-03\)"):
            assert_close(got, 1.0, BOUND, "the loss")
    with pytest.raises(AssertionError, match="inf times its bound"):
        assert_close([1.0, 1.0], [1.0, -math.inf], BOUND)
    with pytest.raises(AssertionError, match=r"result has shape \(1, 2\), expected \(2,\)"):
        assert_close(torch.ones(1, 2), torch.ones(2), BOUND)


def test_a_planted_fault_must_exceed_its_bound_threefold() -> None:
    assert_far(1.0031, 1.0, BOUND, "a fault")
    with pytest.raises(AssertionError, match=r"a fault is not noticed: twice too large; .* 2\.9 times"):
        assert_far(1.0029, 1.0, BOUND, "twice too large")


def test_a_bound_grows_with_the_root_of_the_terms_and_with_the_magnification() -> None:
    assert rounding(torch.float32, 16, 5) == pytest.approx(20 * rounding(torch.float32, 1))
    assert rounding(torch.float32, 1) == pytest.approx(6 * 2**-24)
    assert BOUND.magnified(4).limit == pytest.approx(4e-3)


def test_every_comparison_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "errors.jsonl"
    monkeypatch.setenv("MEGACLIP_TEST_ERRORS", str(path))
    assert_close(1.0005, 1.0, BOUND, "the loss")
    assert_far(2.0, 1.0, BOUND, "twice")
    plain, fault = map(json.loads, path.read_text().splitlines())
    assert plain["test"].endswith("test_every_comparison_is_recorded") and plain["bound"] == "a bound"
    assert plain["what"] == "the loss" and plain["share"] == pytest.approx(0.5) and not plain["fault"]
    assert fault["share"] == pytest.approx(1000) and fault["fault"]
