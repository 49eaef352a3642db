"""Every flag and every setting has a reason: reasons.json lists all of them, one line each.

To add a flag or a setting, add a line that states who needs it. To justify it is part of adding it.
"""

import json
from pathlib import Path

import pytest

from megaclip.config import MegaclipSection, TrainArguments
from megaclip.config.section import LoraSettings
from megaclip.losses.settings import FastClipSettings

REASONS = json.loads(Path(__file__).with_name("reasons.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("place", "model"),
    [
        ("flags of megaclip train", TrainArguments),
        ("section megaclip", MegaclipSection),
        ("section megaclip.fastclip", FastClipSettings),
        ("section megaclip.lora", LoraSettings),
    ],
)
def test_every_flag_and_setting_is_listed_with_its_reason(place, model):
    assert REASONS[place].keys() == set(model.model_fields)
    assert all(10 < len(reason) <= 100 for reason in REASONS[place].values())
