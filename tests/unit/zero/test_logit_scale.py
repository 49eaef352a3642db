"""The bounds of logit_scale without ZeRO, where the parameter is its own master value.

tests/distributed/test_engine_guards.py tests the other ZeRO stages.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaclip.zero.logit_scale import LogitScale


@pytest.mark.parametrize(("value", "expected"), [(-0.5, 0.0), (2.0, 2.0), (5.0, math.log(100))])
def test_the_scale_stays_between_1_and_its_maximum(value: float, expected: float) -> None:
    parameter = torch.nn.Parameter(torch.tensor([value]))
    engine: Any = SimpleNamespace(module=SimpleNamespace(logit_scale=parameter))
    assert LogitScale(engine, 100.0).clamp_().item() == pytest.approx(expected)
    assert parameter.item() == pytest.approx(expected)
