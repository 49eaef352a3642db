"""torch.compile of open_clip's modules: equal results in both passes, dropout included, and which parts compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from megaclip.models import OpenClipConfig, build_model, compilation
from megaclip.models.compilation import compiled_class
from megaclip.models.open_clip_model import OpenClipModel
from megaclip.models.text import reason_not_to_cut
from tests.open_clip_families import BOTH_RANDOM, FAMILIES, IMAGE_SIZE, VOCAB_SIZE, family
from tests.tolerances import FEATURES, TOWER_GRADIENT, assert_close


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Count graphs. The backend traces them without compiling."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    return counter


def built(name: str, folder: Path) -> OpenClipModel:
    """Return the model of a family in training mode, with the same values at every call."""
    torch.manual_seed(0)
    model = build_model(family(name, folder)).train()
    assert isinstance(model, OpenClipModel)
    return model


def batch(model: OpenClipModel, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    length = model.config.text_cfg.context_length
    tokens = torch.randint(3, VOCAB_SIZE, (size, length), generator=generator)
    return images, tokens.index_fill(1, torch.tensor([length - 1]), 2)


def both_passes(model: nn.Module, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs without a graph and with one, for equal random numbers, and the gradients."""
    outputs, statistics = [], [buffer.clone() for buffer in model.buffers()]
    for with_graph in (False, True):
        for buffer, value in zip(model.buffers(), statistics, strict=True):
            buffer.data.copy_(value)
        torch.manual_seed(3)
        with torch.set_grad_enabled(with_graph):
            found = model(*inputs)
            outputs.append(torch.cat(found[:2]) if isinstance(found, tuple) else found)
    outputs[1].square().cumsum(0).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach() for output in outputs], gradients


QUICK = ((BOTH_RANDOM, False), ("resnet", True))


@pytest.mark.parametrize(
    ("name", "whole"),
    [*QUICK, *(pytest.param(name, True, marks=pytest.mark.long) for name in FAMILIES if name != "resnet")],
)
def test_compiled_modules_have_the_results_of_plain_ones(
    tmp_path: Path, counter: CompileCounterWithBackend, name: str, whole: bool
) -> None:
    plain, compiled = built(name, tmp_path).double(), built(name, tmp_path).double()
    compiled.compile_towers(whole, lambda block: True)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    expected, got = (both_passes(model, *batch(model)) for model in (plain, compiled))
    assert counter.frame_count >= 4  # two towers, with and without gradients
    for features, bound, found in zip(expected, (FEATURES["float64"], TOWER_GRADIENT), got, strict=True):
        for of_plain, of_compiled in zip(features, found, strict=True):
            assert_close(of_compiled, of_plain, bound)
    for statistic, other in zip(plain.buffers(), compiled.buffers(), strict=True):
        assert_close(other, statistic, FEATURES["float64"])


@pytest.mark.parametrize(
    ("name", "whole", "expected"),
    [
        ("vit", True, "compiled image tower and text blocks"),  # its captions are cut
        (BOTH_RANDOM, True, "compiled image tower and text tower"),
        (BOTH_RANDOM, False, "compiled image blocks and text blocks"),
    ],
)
def test_what_is_compiled(tmp_path: Path, name: str, whole: bool, expected: str) -> None:
    assert built(name, tmp_path).compile_towers(whole, lambda block: True) == expected


def test_blocks_that_must_not_be_compiled_are_left_out(tmp_path: Path, counter: CompileCounterWithBackend) -> None:
    model = built("vit", tmp_path)
    assert model.compile_towers(False, lambda block: False) == "compiled image tower not and text tower not"
    model(*batch(model))
    assert counter.frame_count == 0


class WithDropout(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.first(x)))


@pytest.mark.long
@pytest.mark.parametrize("falls_back", [True, False])
def test_the_compilers_dropout_is_that_of_plain_pytorch(falls_back: bool) -> None:
    """With PyTorch's random numbers, which `compiled_class` selects, the masks equal those of plain PyTorch.

    With inductor's own random numbers they differ, so the test can fail.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, compiled = WithDropout(), WithDropout()
    compiled.load_state_dict(plain.state_dict())
    compiled.__class__ = compiled_class(WithDropout)
    x = torch.randn(16, 8)
    with torch._inductor.config.patch(fallback_random=falls_back):
        expected, got = (both_passes(model, x)[0] for model in (plain, compiled))
    equal = [torch.allclose(*pair, atol=1e-4) for pair in zip(expected, got, strict=True)]
    assert equal == [falls_back, falls_back]


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
    _, tokens = batch(model)
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
