"""Files of DeepSpeed: members of its enumeration are read as every Python writes them, and nothing else is called."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from megaclip.checkpoint.deepspeed_files import read_file
from megaclip.errors import CheckpointError


class AttributeOf:
    """Pickled as a call of getattr, as Python 3.11.0 to 3.11.3 pickles members of an enumeration."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self._arguments


@pytest.mark.parametrize("stage", [ZeroStageEnum.weights, AttributeOf(ZeroStageEnum, "weights")])
def test_a_stage_is_read_as_any_python_writes_it(stage: Any, tmp_path: Path) -> None:
    torch.save({"zero_stage": stage}, tmp_path / "states.pt")
    assert read_file(tmp_path / "states.pt") == {"zero_stage": ZeroStageEnum.weights}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LossScaler, "__init__"), "objects other than tensors and numbers, or is damaged"),
        ((ZeroStageEnum, "__class__"), "cannot be read"),
        ((os.path.join, "__call__"), "objects other than tensors and numbers"),
    ],
)
def test_no_other_attribute_is_read(arguments: tuple[Any, str], message: str, tmp_path: Path) -> None:
    torch.save({"zero_stage": AttributeOf(*arguments)}, tmp_path / "states.pt")
    with pytest.raises(CheckpointError, match=message):
        read_file(tmp_path / "states.pt")
