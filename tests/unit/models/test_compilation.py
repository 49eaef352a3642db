"""torch.compile of the towers: graphs and their number, equal features and gradients, and the report of a run."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.checkpoint import checkpoint

from megaclip.data import ImageTransform, normalised_pixels
from megaclip.errors import ConfigError
from megaclip.models import ClipModel, ModelConfig, attention, build_model, compilation, load_model_config
from megaclip.models.compilation import compiled_class, compiled_function, compiles_whole_tower, report_compilation
from megaclip.planner import describe, plan_memory, plan_time
from megaclip.planner.compile_estimate import compile_estimate
from tests.tolerances import FEATURES, TOWER_GRADIENT, assert_close
from tests.unit.planner.planner_cases import workload


@pytest.fixture
def config() -> ModelConfig:
    return load_model_config("demo-tiny").replace(vision_cfg={"patch_dropout": 0.5})


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Count graphs. The backend traces them without compiling."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    return counter


def batch(size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 24, 24, generator=generator).double()
    return images, torch.randint(3, 512, (size, 24), generator=generator)


def plain_and_compiled(config: ModelConfig, *, whole: bool, recomputes: bool = False) -> tuple[ClipModel, ClipModel]:
    plain, compiled = build_model(config).double(), build_model(config).double()
    compiled.load_state_dict(plain.state_dict())
    for tower in (compiled.visual, compiled.text):
        modules = [tower] if whole else compiled.blocks_to_compile(tower)
        kind = compiled_class(type(modules[0]), recomputes=recomputes)
        for module in modules:
            module.__class__ = kind
    return plain, compiled


def features_and_gradients(model: ClipModel, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both features without a graph and with one, for equal random numbers.

    The gradients are added to the parameters.
    """
    features = []
    for with_graph in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(with_graph):
            features.append(torch.cat([part for part in model(*batch(size))[:2] if part is not None]))
    features[1].square().cumsum(0).sum().backward()
    return features[0], features[1].detach()


@pytest.mark.parametrize(
    ("whole", "checkpointing", "recomputes"),
    [
        (False, False, False),
        (False, True, True),
        (True, False, True),
    ],
)
def test_compiled_towers_equal_plain_ones_in_both_passes(
    config: ModelConfig, counter: CompileCounterWithBackend, whole: bool, checkpointing: bool, recomputes: bool
) -> None:
    if recomputes:
        counter.backend = "aot_eager_decomp_partition"  # decides which values to recompute, as inductor does
    sizes = (2,) if checkpointing or recomputes else (2, 3)
    models = plain_and_compiled(config, whole=whole, recomputes=recomputes)
    for model in models:
        if checkpointing:
            model.set_activation_checkpointing(lambda *given: checkpoint(*given, use_reentrant=False))
    for size in sizes:
        expected, got = (features_and_gradients(model, size) for model in models)
        for features in got:  # detects a mask of patches that differs between the passes
            assert_close(features, expected[0], FEATURES["float64"])
    # towers x sizes x (with and without gradients); blocks share graphs
    assert counter.frame_count == 2 * len(sizes) * 2
    for name, parameter in models[1].named_parameters():
        if name != "logit_scale":
            assert_close(parameter.grad, models[0].get_parameter(name).grad, TOWER_GRADIENT, name)


def test_evaluation_and_single_rows_are_not_compiled(config: ModelConfig, counter: CompileCounterWithBackend) -> None:
    plain, compiled = plain_and_compiled(config, whole=True)
    torch.manual_seed(1)
    expected = plain(*batch(1))[0]
    torch.manual_seed(1)
    assert torch.equal(compiled(*batch(1))[0], expected)
    for model in (plain, compiled):
        model.eval()
    assert torch.equal(compiled(*batch(5))[0], plain(*batch(5))[0])
    assert counter.frame_count == 0


def test_text_blocks_are_compiled_once_for_every_length_at_which_captions_are_cut(
    config: ModelConfig, counter: CompileCounterWithBackend
) -> None:
    _, compiled = plain_and_compiled(config, whole=False)
    tokens = batch(3)[1]
    with torch.no_grad():
        for length in (24, 16, 8, 24, 16, 8):
            compiled(None, tokens[:, :length])
    assert counter.frame_count == 3


def test_a_preferred_backend_changes_no_result_and_stays_in_the_graph(
    config: ModelConfig, counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs have none of the preferred kernels. The last one of the list must compute the same as without the list."""
    plain, compiled = plain_and_compiled(config, whole=False)
    expected = features_and_gradients(plain, 2)
    monkeypatch.setattr(attention, "_prefers_efficient", lambda *given: True)
    for features in features_and_gradients(compiled, 2):
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
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise OSError("no C compiler")

    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", broken)
    _, compiled = plain_and_compiled(config, whole=True)
    with pytest.raises(ConfigError) as failed, report_compilation("auto", step=1):
        compiled(*batch())
    message = str(failed.value)
    assert message.startswith('megaclip.compile is "auto", and torch.compile failed: OSError: no C compiler; set ')
    assert "set megaclip.compile to false, or " in message and "\n" not in message


def test_the_seconds_of_both_graphs_are_logged_once(
    config: ModelConfig, counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(compilation.logger, "info", lambda text, *values: lines.append(text % values))
    _, compiled = plain_and_compiled(config, whole=True)
    for step in (1, 2):
        with report_compilation(True, step):
            features_and_gradients(compiled, 2)
    (line,) = lines
    assert line.startswith("step 1: torch.compile took ") and float(line.split()[4]) > 0


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
        assert plan_memory(job, machine).compiles == expected
        assert plan_time(job, machine).towers == (compiled if expected else plain).towers
    for changed in ({"layer_norm": "apex"}, {"tensor_parallel_size": 2}):
        assert not compile_estimate(auto.with_megaclip(**changed), machine).pays
    cpu = describe(gpu="cpu", gpus=1)
    assert not plan_memory(auto, cpu).compiles
    assert plan_memory(auto.with_megaclip(compile=True), cpu).compiles
    assert not plan_memory(auto.with_megaclip(compile=False), machine).compiles


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
