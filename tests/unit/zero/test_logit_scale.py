"""The bounds of logit_scale without ZeRO, where the parameter is its own master value.

tests/distributed/test_engine_guards.py tests the other ZeRO stages.
"""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megaclip.zero.logit_scale import LogitScale


@pytest.mark.parametrize(("value", "expected"), [(-0.5, 0.0), (2.0, 2.0), (5.0, math.log(100))])
def test_the_scale_stays_between_1_and_its_maximum(value: float, expected: float) -> None:
    parameter = torch.nn.Parameter(torch.tensor([value]))
    engine: Any = SimpleNamespace(module=SimpleNamespace(logit_scale=parameter))
    assert LogitScale(engine, 100.0).clamp_().item() == pytest.approx(expected)
    assert parameter.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("start", "earlier", "raises_maximum", "expected"),
    [(112.3, 1.0, True, 112.3), (112.3, 113.4, False, 100.0), (95.0, 113.4, True, 113.4)],
)
def test_a_scale_above_the_maximum_is_kept_unless_the_maximum_was_given(
    start, earlier, raises_maximum, expected, caplog
):
    """SigLIP's released scale stays, also after an update below it and a resume from there, and is reported once."""
    parameter = torch.nn.Parameter(torch.tensor([math.log(start)]))
    scale = LogitScale(cast(Any, SimpleNamespace(module=SimpleNamespace(logit_scale=parameter))), 100.0)
    for _ in range(2):
        scale.admit(math.log(earlier), raises_maximum=raises_maximum)
    before = parameter.item()
    assert scale.clamp_().exp().item() == pytest.approx(min(start, expected))
    assert (parameter.item() == before) == raises_maximum
    parameter.data.fill_(6.0)
    assert scale.clamp_().exp().item() == pytest.approx(expected)
    assert len({record.getMessage() for record in caplog.records}) == 1 and str(max(start, expected)) in caplog.text
