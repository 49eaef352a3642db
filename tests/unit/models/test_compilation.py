"""torch.compile of MegaCLIP's and open_clip's towers: number of graphs, equal results, and the report of a run."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.checkpoint import checkpoint

from megaclip.data import ImageTransform, normalised_pixels
from megaclip.errors import ConfigError
from megaclip.models import DualEncoder, attention, build_model, compilation, load_model_config
from megaclip.models.compilation import compiled_class, compiled_function, compiles_whole_tower, report_compilation
from megaclip.planner import describe, plan_memory, plan_time
from megaclip.planner.compile_estimate import compile_estimate
from tests.open_clip_families import BOTH_RANDOM, FAMILIES, family
from tests.tolerances import FEATURES, TOWER_GRADIENT, assert_close
from tests.unit.planner.planner_cases import workload

OWN = "own towers"


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Count graphs. The backend traces them without compiling."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    return counter


def built(name: str, folder: Path) -> DualEncoder:
    """Return a float64 model in training mode, with the same values at every call: MegaCLIP's, or that of a family."""
    torch.manual_seed(0)
    own = load_model_config("demo-tiny").replace(vision_cfg={"patch_dropout": 0.5, "layers": 2})
    return build_model(own if name == OWN else family(name, folder)).double().train()


def batch(model: DualEncoder, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator, side = torch.Generator().manual_seed(1), model.config.vision_cfg.image_size
    images = torch.randn(size, 3, side, side, generator=generator).double()
    length = model.config.text_cfg.context_length
    tokens = torch.randint(3, model.vocab_size, (size, length), generator=generator)
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


@pytest.mark.parametrize(
    ("name", "whole", "checkpointing", "recomputes"),
    [
        (OWN, False, True, True),
        (OWN, True, False, True),
        (BOTH_RANDOM, False, False, False),
        *(pytest.param(name, True, False, False, marks=pytest.mark.long) for name in (OWN, *FAMILIES)),
    ],
)
def test_compiled_towers_have_the_results_of_plain_ones(
    tmp_path: Path, counter: CompileCounterWithBackend, name: str, whole: bool, checkpointing: bool, recomputes: bool
) -> None:
    if recomputes:
        counter.backend = "aot_eager_decomp_partition"  # decides which values to recompute, as inductor does
    plain, compiled = built(name, tmp_path), built(name, tmp_path)
    compiled.compile_towers(whole, lambda block: True, recomputes=recomputes)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    if checkpointing:
        for model in (plain, compiled):
            model.set_activation_checkpointing(lambda *given: checkpoint(*given, use_reentrant=False))
    expected, got = (both_passes(model, *batch(model)) for model in (plain, compiled))
    # two towers, with and without gradients; equal blocks share graphs
    assert counter.frame_count == 4 or (name != OWN and counter.frame_count > 4)
    for features, bound, found in zip(expected, (FEATURES["float64"], TOWER_GRADIENT), got, strict=True):
        for of_plain, of_compiled in zip(features, found, strict=True):
            assert_close(of_compiled, of_plain, bound)
    for statistic, other in zip(plain.buffers(), compiled.buffers(), strict=True):
        assert_close(other, statistic, FEATURES["float64"])


def test_evaluation_and_single_rows_are_not_compiled(tmp_path: Path, counter: CompileCounterWithBackend) -> None:
    model = built(OWN, tmp_path)
    model.compile_towers(True, lambda block: True)
    model(*batch(model, 1))
    model.eval()
    model(*batch(model, 5))
    assert counter.frame_count == 0


def test_text_blocks_are_compiled_once_for_every_length_at_which_captions_are_cut(
    tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    model = built(OWN, tmp_path)
    model.compile_towers(False, lambda block: True)
    tokens = batch(model)[1]
    with torch.no_grad():
        for length in (24, 16, 8, 24, 16, 8):
            model(None, tokens[:, :length])
    assert counter.frame_count == 3


def test_a_preferred_backend_changes_no_result_and_stays_in_the_graph(
    tmp_path: Path, counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs have none of the preferred kernels. The last one of the list must compute the same as without the list."""
    plain, compiled = built(OWN, tmp_path), built(OWN, tmp_path)
    compiled.compile_towers(False, lambda block: True)
    expected, _ = both_passes(plain, *batch(plain))
    monkeypatch.setattr(attention, "_prefers_efficient", lambda *given: True)
    for features in both_passes(compiled, *batch(plain))[0]:
        assert_close(features, expected[0], FEATURES["float64"])
    assert counter.frame_count == 4
    every = {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}
    assert every <= set(_cur_sdpa_kernel_backends())  # the setting is restored


def test_short_attention_with_narrow_heads_prefers_the_memory_efficient_kernels() -> None:
    def prefers(queries: int, tokens: int, width: int, *, masked: bool = False, is_cuda: bool = True) -> bool:
        q, k = (SimpleNamespace(shape=(2, 3, rows, width), is_cuda=is_cuda) for rows in (queries, tokens))
        return attention._prefers_efficient(q, k, torch.ones(1) if masked else None)

    assert prefers(50, 50, 64) and prefers(64, 64, 64) and prefers(1, 24, 64, masked=True)
    assert not any([prefers(77, 77, 64), prefers(197, 197, 64), prefers(50, 50, 88), prefers(1, 50, 64)])
    assert not prefers(50, 50, 64, is_cuda=False)


def test_a_failed_compilation_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise OSError("no C compiler")

    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", broken)
    model = built(OWN, tmp_path)
    model.compile_towers(True, lambda block: True)
    with pytest.raises(ConfigError) as failed, report_compilation("auto", step=1):
        model(*batch(model))
    message = str(failed.value)
    assert message.startswith('megaclip.compile is "auto", and torch.compile failed: OSError: no C compiler; set ')
    assert "set megaclip.compile to false, or " in message and "\n" not in message


def test_the_seconds_of_both_graphs_are_logged_once(
    tmp_path: Path, counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(compilation.logger, "info", lambda text, *values: lines.append(text % values))
    model = built(OWN, tmp_path)
    model.compile_towers(False, lambda block: True)
    for step in (1, 2):
        with report_compilation(True, step):
            for with_graph in (False, True):
                with torch.set_grad_enabled(with_graph):
                    model(None, batch(model)[1])
    (line,) = lines
    assert line.startswith("step 1: torch.compile took ") and line.endswith(" for 2 graphs")
    assert float(line.split()[4]) > 0


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


def test_blocks_are_compiled_where_they_are_called_one_by_one() -> None:
    whole = {
        (stage, checkpointing, coalesces)
        for stage in range(4)
        for checkpointing in (False, True)
        for coalesces in (False, True)
        if compiles_whole_tower(stage, checkpointing=checkpointing, coalesces=coalesces)
    }
    assert whole == {(0, False, False), (0, False, True), (1, False, False), (1, False, True), (2, False, True)}


def test_a_plan_compiles_a_long_run_and_counts_what_it_saves(tmp_path: Path) -> None:
    auto = workload(tmp_path, ranks=1, megaclip={"compile": "auto", "coalesce_gradient_reduction": True})
    machine = describe(gpus=1)
    for checkpointing in ("gpu", ""):
        job = replace(auto, steps=1000, checkpointing=checkpointing)
        estimate = compile_estimate(job, machine)
        step = estimate.saved / 1000
        plain, compiled = (plan_time(job.with_megaclip(compile=setting), machine) for setting in (False, True))
        assert plain.backward + plain.forward_again - compiled.backward - compiled.forward_again == pytest.approx(step)
    enough = math.ceil(estimate.startup / step) + 1
    for steps, expected in ((None, True), (enough, True), (enough // 2, False)):
        job = replace(auto, steps=steps)
        assert plan_memory(job, machine).workload.megaclip.compile == expected
        assert plan_time(job, machine).towers == (compiled if expected else plain).towers
    for changed in ({"layer_norm": "apex"}, {"tensor_parallel_size": 2}):
        assert not compile_estimate(auto.with_megaclip(**changed), machine).pays
    cpu = describe(gpu="cpu", gpus=1)
    assert not plan_memory(auto, cpu).workload.megaclip.compile
    assert plan_memory(auto.with_megaclip(compile=True), cpu).workload.megaclip.compile
    assert not plan_memory(auto.with_megaclip(compile=False), machine).workload.megaclip.compile


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_normalises_pixels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves all chunks. Inductor's divisions may differ from PyTorch's in the last bit."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(compilation, "BACKEND", counter)
    compute, transform = compiled_function(normalised_pixels), ImageTransform(8)
    for seed in range(2):
        pixels = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        kept = pixels.clone()
        for dtype, relative in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
            torch.testing.assert_close(
                transform.normalise(pixels, dtype, compute),
                transform.normalise(pixels, dtype),
                rtol=relative,
                atol=1e-6,
            )
        assert torch.equal(pixels, kept)
    assert counter.frame_count == 2  # dtypes
