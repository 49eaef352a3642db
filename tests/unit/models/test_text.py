"""Captions are cut where the text tower's features cannot depend on their padding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip.models import OpenClipConfig, build_model
from megaclip.models.text import reason_not_to_cut
from tests.open_clip_families import VOCAB_SIZE, family


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"pool_type": "argmax"}, None),
        ({"pool_type": "last"}, 'the text tower\'s "pool_type" is "last"'),
        ({"no_causal_mask": True}, "the text tower's attention is not causal"),
        ({"embed_cls": True}, "the text tower puts a class token after the padding"),
    ],
)
def test_captions_are_cut_where_padding_cannot_matter(
    tmp_path: Path, changes: dict[str, Any], reason: str | None
) -> None:
    """Cut and whole captions have equal features exactly if the description gives no reason to keep the padding."""
    config = family("vit", tmp_path).replace(text_cfg={"context_length": 24, **changes})
    assert reason_not_to_cut(config.text_cfg) == reason
    torch.manual_seed(0)
    model = build_model(config).double().eval()
    tokens = torch.randint(3, VOCAB_SIZE - 1, (4, 24), generator=torch.Generator().manual_seed(1))
    tokens[:, 5] = 63 if changes.get("pool_type") == "argmax" else 2
    tokens[:, 6:] = 0
    cut = model.cut_captions(tokens)
    assert cut.shape[1] == (8 if reason is None else 24)
    if reason is None:
        with torch.no_grad():
            whole, short = (model(None, given)[1] for given in (tokens, cut))
        assert (whole - short).abs().max() < 1e-12


def test_hugging_faces_text_models_get_the_padding(tmp_path: Path) -> None:
    config = family("roberta", tmp_path)
    assert isinstance(config, OpenClipConfig)
    assert reason_not_to_cut(config.text_cfg) == "Hugging Face's text models read the padding"
