"""Training adapters through the engine equals peft in plain PyTorch, at every ZeRO stage, and resumes with its bits.

Two steps on one or two ranks are compared with one process in float64 on the whole batch, where peft has added the
adapters to the same model.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megaclip.checkpoint import manifest, store
from megaclip.checkpoint.adapters import BASE, LORA
from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.model_directory import export_checkpoint
from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights, write_weights
from megaclip.checkpoint.peft_folder import export_adapters
from megaclip.checkpoint.saved_states import FP32, WORKING, SavedStates, read_model
from megaclip.checkpoint.search import locate_model
from megaclip.checkpoint.verify import verify
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import CheckpointError, ConfigError
from megaclip.models import DualEncoder, build_model
from megaclip.models.lora import import_peft
from megaclip.models.transformers_keys import to_transformers
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.engine_cases import (
    SEED,
    Case,
    OracleTraining,
    Outcome,
    masters,
    model_of,
    start_engine,
    take_step,
    train,
    training_config,
)
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import exceeded, unnoticed

RANK, ALPHA = 4, 12
MODEL = engine_cases.MODEL.replace(vision_cfg={"layers": 3})
EXPORTED = MODEL.replace(text_cfg={"eos_id": 31})  # transformers reads an end of text with number 2 in another way
"""At ZeRO-3 the first block, whose input has no gradient, is not compiled, and the last block never is."""


def case(stage: int, accumulation: int = 3, *, lora: dict | None = None, **settings) -> Case:
    """Return a case with adapters."""
    section = {"rank": RANK, "alpha": ALPHA, **(lora or {})}
    return Case(stage, accumulation, section=(("lora", section),), **settings)


CASES = {
    "zero0 plain": case(0),
    "zero0 rslora": case(0, lora={"rslora": True}),
    "zero1 dora": case(1, lora={"dora": True}),
    "zero1 dropout": case(1, lora={"dropout": 0.4}, keep=3),
    "zero2 dropout, checkpointing, coalesced": case(
        2, lora={"dropout": 0.4}, checkpointing="plain", coalesce=True, text_chunks=2
    ),
    "zero3 dropout, compiled": case(3, lora={"dropout": 0.4}, compiled=True, keep=2, clipping=0.1, ranks=1),
    "zero2 text": case(2, lora={"towers": ["text"]}, checkpointing="plain"),
    "zero3 image": case(3, lora={"towers": ["image"], "targets": ["q_proj", "v_proj"]}, persistence_threshold=200),
    "zero3 offloaded": case(3, offload="all", checkpointing="cpu"),
}

RESUMED = (0, 2, 3)
"""Stages at which a run resumes. ZeRO-1 saves the files of ZeRO-2."""


def peft_model(case: Case) -> DualEncoder:
    """Return the model of a case in float64 with the adapters that peft adds to it."""
    settings = dict(case.section)["lora"]
    torch.manual_seed(SEED)
    model = build_model(model_of(case))
    torch.manual_seed(SEED)
    towers = "|".join({"image": "visual", "text": "text"}[name] for name in settings.get("towers", ["image", "text"]))
    layers = "|".join(settings.get("targets", ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"]))
    peft = import_peft()
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=rf"({towers})\..*\.({layers})",
        lora_dropout=settings.get("dropout", 0.0),
        use_dora=settings.get("dora", False),
        use_rslora=settings.get("rslora", False),
    )
    peft.get_peft_model(model, config)  # changes the model itself
    model.logit_scale.requires_grad_(True)
    return model.double()


@cache
def oracle(name: str) -> Outcome:
    with mock.patch.object(engine_cases, "MODEL", MODEL):
        training = OracleTraining(CASES[name], model=peft_model(CASES[name]))
        return training.train(training.features)


def train_all(cases: dict[str, Case], folder: str) -> dict[str, Outcome | str]:
    """Return the outcome of every case, and of the resumed engines of `resume`."""
    engine_cases.MODEL = MODEL
    outcomes = {name: or_traceback(train, case) for name, case in cases.items()}
    for stage in RESUMED:
        outcomes[f"resumed {stage}"] = or_traceback(resume, stage, Path(folder))
    if torch.distributed.get_world_size() == 1:
        outcomes["exported"] = or_traceback(save_run, Path(folder))
    return outcomes


def resume(stage: int, folder: Path) -> Outcome:
    """Return the masters after two steps ("parameters"), and of an engine that resumes after the first ("resumed").

    On one rank the engine loads what two ranks have saved, and saves it again.
    """
    engine, outcome, first = start_engine(case(stage)), Outcome(), "step_00000001"
    folder = folder / f"zero{stage}"
    folder.mkdir(exist_ok=True)
    if torch.distributed.get_world_size() == 1:
        load_checkpoint(engine, folder / first)
        store.save(engine, store.Target(folder, 2, {}, 2))
        return outcome
    take_step(engine, case(stage), 0, outcome)
    store.save(engine, store.Target(folder, 1, {}, 2))
    take_step(engine, case(stage), 1, outcome)
    outcome.parameters = adapters(engine)
    resumed = start_engine(case(stage))
    load_checkpoint(resumed, folder / first)
    take_step(resumed, case(stage), 1, outcome)
    outcome.resumed = adapters(resumed)
    return outcome


def save_run(folder: Path) -> Outcome:
    """Train adapters on weights in the folder "base", and save a checkpoint as a run does."""
    settings = {"lora": {"rank": RANK, "alpha": 400, "dora": True}}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = build_model(EXPORTED)
    (folder / "base").mkdir()
    write_weights(folder / "base", base.state_dict(), EXPORTED)
    trained = Case(1, 3, section=tuple(settings.items()), ranks=1)
    engine = start_engine(trained, None, "--pretrained", str(folder / "base"), model=EXPORTED)
    for step in range(2):
        take_step(engine, trained, step, Outcome())
    lora = training_config(trained).megaclip.lora.model_dump() | {"base_sha256": engine.module.base_sha256}
    checkpoints = folder / "checkpoints"
    write_model_card(checkpoints / "model", EXPORTED, OPENAI_PREPROCESS)
    manifest.write(checkpoints / "model")
    paths = {"whole": str(folder / "base"), "image": None, "text": None, "kept_positions": 0}
    store.save(engine, store.Target(checkpoints, 2, {LORA: lora, BASE: paths}, 1))
    model = engine.module.eval()
    images, tokens = inputs()
    with torch.no_grad():
        x, y, *_ = model(images, tokens)
    return Outcome(parameters={"image": x.numpy(), "text": y.numpy()})


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 31, (5, 6), generator=generator)
    tokens[:, 4] = 31
    return torch.randn(5, 3, 8, 8, generator=generator), tokens


def adapters(engine) -> dict[str, np.ndarray]:
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in masters(engine).items() if name in trained}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[dict[str, Outcome | str]], Path]:
    """Outcomes by the name of the case, one dictionary per rank, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("lora")
    by_ranks = {n: {name: case for name, case in CASES.items() if case.ranks == n} for n in (1, 2)}
    both = run_ranks(train_all, 2, by_ranks[2], str(folder))
    (alone,) = run_ranks(train_all, 1, by_ranks[1], str(folder))
    return [*both, {name: alone[name] for name in (*by_ranks[1], "exported")}], folder


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_peft_in_plain_pytorch(trained, name):
    for outcomes in trained[0]:
        if name in outcomes:
            assert exceeded(comparisons(outcomes[name], oracle(name)).values()) == []


def test_the_comparison_detects_another_scale_and_no_dropout(trained):
    for name, other in (("zero0 plain", "zero0 rslora"), ("zero1 dropout", "zero0 plain")):
        found = comparisons(trained[0][0][name], oracle(other))
        assert unnoticed([found["parameters"]], other) == []


@pytest.mark.parametrize("stage", RESUMED)
def test_checkpoints_hold_adapters_only_and_resume_with_the_same_bits(trained, stage):
    outcomes, folder = trained
    resumed = outcomes[0][f"resumed {stage}"]
    assert isinstance(resumed, Outcome), resumed
    assert all(np.array_equal(resumed.resumed[name], value) for name, value in resumed.parameters.items())
    saved, again = (SavedStates.open(folder / f"zero{stage}" / f"step_{step:08d}") for step in (1, 2))
    assert saved.shapes.keys() == again.shapes.keys() == resumed.parameters.keys()
    assert all("lora_" in name or name == "logit_scale" for name in saved.shapes)
    for name, shape in saved.shapes.items():
        for kind in (*saved.state_kinds(name), FP32):
            values = [torch.empty(shape.numel()) for _ in range(2)]
            for states, value in zip((saved, again), values, strict=True):
                states.read(name, kind if states.has(name, kind) else WORKING, shape, ONE_RANK, 0, value)
            assert torch.equal(*values), (name, kind)


def test_exports_have_the_features_of_the_trained_model(trained, tmp_path):
    outcomes, folder = trained
    expected = outcomes[2]["exported"]
    assert isinstance(expected, Outcome), expected
    image, text = (torch.from_numpy(expected.parameters[name]) for name in ("image", "text"))
    images, tokens = inputs()
    card, weights = export_checkpoint(folder / "checkpoints", tmp_path / "merged", None)
    merged = assigned_model(card.config, weights)
    base = assigned_model(EXPORTED, read_weights(folder / "base", EXPORTED))
    for features, other, theirs in zip((image, text), base(images, tokens), merged(images, tokens), strict=False):
        torch.testing.assert_close(theirs, features, rtol=0, atol=1e-5)
        assert (other - features).abs().max() > 1e-2
    assert verify(tmp_path / "merged", merged).passed
    with mock.patch.object(manifest, "gather_objects", side_effect=AssertionError("one rank alone may fail to read")):
        read_model(*locate_model(folder))

    scalars = export_adapters(folder / "checkpoints", tmp_path / "adapters", None)
    assert torch.equal(scalars["logit_scale"], weights["logit_scale"])
    clip = transformers_model(base)
    adapted = import_peft().PeftModel.from_pretrained(clip, str(tmp_path / "adapters")).eval()
    with torch.no_grad():
        output = adapted(input_ids=tokens, pixel_values=images)
    torch.testing.assert_close(output.image_embeds, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.text_embeds, text, rtol=0, atol=1e-5)

    pooled = SimpleNamespace(config=EXPORTED.replace(vision_cfg={"pool_type": "avg"}))
    of_card = mock.patch("megaclip.checkpoint.peft_folder.read_model_card", return_value=pooled)
    with (
        of_card,
        pytest.raises(ConfigError, match=r'vision_cfg.pool_type "avg": .* no such setting; use --format open'),
    ):
        export_adapters(folder / "checkpoints", tmp_path / "others", None)

    torch.manual_seed(2)
    write_weights(folder / "base", build_model(EXPORTED).state_dict(), EXPORTED)
    with pytest.raises(CheckpointError, match="were trained on weights with SHA-256"):
        export_checkpoint(folder / "checkpoints", tmp_path / "other", None)


def transformers_model(base: DualEncoder) -> torch.nn.Module:
    """Return transformers' CLIPModel with the weights of a model that EXPORTED describes."""
    from transformers import CLIPConfig, CLIPModel

    both = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4, "hidden_act": "gelu"}
    vision, text = EXPORTED.vision_cfg, EXPORTED.text_cfg
    config = CLIPConfig(
        projection_dim=EXPORTED.embed_dim,
        vision_config={**both, "num_hidden_layers": vision.layers, "image_size": 8, "patch_size": 2},
        text_config={
            **both,
            "num_hidden_layers": text.layers,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "eos_token_id": text.eos_id,
        },
    )
    model = CLIPModel(config)
    model.load_state_dict(to_transformers(base.state_dict()), strict=False)
    return model.eval()
