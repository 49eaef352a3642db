"""Wrong objectives and settings are refused with one line that names the setting."""

import pytest
import torch

from megaclip.errors import ConfigError
from megaclip.objectives import load_objective
from megaclip.objectives.base import check_terms

REFUSED = {
    "unknown": ("distilation", {}, "megaclip.objective 'distilation' is not known; use distillation, or FILE.py:CLASS"),
    "no file": ("gone.py:A", {}, "'gone.py' is not a file"),
    "no class": (
        "own.py:Missing",
        {},
        "own.py has no class Missing that is derived from megaclip.objectives.Objective",
    ),
    "fails": ("fails.py:A", {}, "fails.py raised ZeroDivisionError"),
    "setting": (
        "own.py:Own",
        {"size": 3},
        "megaclip.objective own.py:Own: Own.__init__() got an unexpected keyword argument 'size'; change the class",
    ),
    "fields": ("own.py:Names", {}, "own.py:Names: fields is {'x': 'json.x'}; write {NAME: Field(KEY, shape=...)}"),
    "weights": ("own.py:Heavy", {}, "own.py:Heavy: weights is {'x': '1'}; write {NAME: FACTOR} with numbers"),
    "no super": ("own.py:Bare", {}, "own.py:Bare: its __init__ does not call super().__init__()"),
    "value": ("own.py:Own", {"weight": -1}, "megaclip.objective own.py:Own: weight is negative"),
    "teacher": ("distillation", {"teachers": [{"image": "a"}]}, "teachers.0: give image, text, dims and logit_scale"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_objectives_are_refused_in_one_line(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("1 / 0\n")
    (tmp_path / "own.py").write_text(
        "from megaclip.objectives import Objective\n\n\nclass Own(Objective):\n    def __init__(self, weight=1):\n"
        "        super().__init__()\n        if weight < 0:\n            raise ValueError('weight is negative')\n"
        "\n\nclass Names(Objective):\n    fields = {'x': 'json.x'}\n"
        "\n\nclass Heavy(Objective):\n    weights = {'x': '1'}\n"
        "\n\nclass Bare(Objective):\n    def __init__(self):\n        self.weights = {}\n"
    )
    name, of_objective, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load_objective(name, of_objective)
    assert message in str(caught.value) and "\n" not in str(caught.value)


WRONG = {
    "a number": ({"a": 1.0}, "returned 'a' of type float"),
    "no sum": ({"a": torch.zeros(3)}, r"returned 'a' of shape \(3,\)"),
    "no dict": (torch.zeros(()), "returned Tensor; return a dict"),
    "detached": ({"b": torch.zeros(()), "a": torch.zeros(())}, "returned 'a' without gradients, so it trains nothing"),
    "reserved": ({"contrastive": torch.zeros(())}, "under a name other than 'contrastive'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_terms_of_another_form_are_refused_in_one_line(case):
    terms, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        check_terms("Own.batch_terms", terms, {"b": 0})
