"""Learning rates and weight decays of towers and layers equal plain PyTorch with hand-written groups.

Two ranks take two steps with MegaCLIP's towers and with open_clip's. The oracle is AdamW in one process on the whole
batch in float64. Its groups come from the patterns below, not from the models.
"""

import re
from pathlib import Path

import pytest

from tests.distributed import open_clip_cases
from tests.distributed.engine_cases import WEIGHT_DECAY, WORLD_SIZE, Case, Outcome, Rates, oracle, train
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_engine import comparisons
from tests.distributed.test_open_clip_towers import checkpoints_of, prepared
from tests.open_clip_families import BOTH_RANDOM, FAMILIES
from tests.tolerances import OPEN_CLIP_ENGINE, exceeded, unnoticed

IMAGE = {"image_lr": 0.5, "image_weight_decay": 0.9, "image_layer_decay": 0.7}
TEXT = {"text_lr": 1.5, "text_weight_decay": 0.0, "text_layer_decay": 0.6}
BOTH = tuple((IMAGE | TEXT).items())
TOWERS = (("image_lr", 0.5), ("text_weight_decay", 0.7))

# Patterns of the layer groups of the tests' models, from input to output. Parameters without a match are the head.
OWN = {
    "visual.": (r"conv1|class_emb|positional|ln_pre", r"transformer.resblocks.0", r"transformer.resblocks.1|ln_post"),
    "text.": (r"token_emb|positional", r"transformer.resblocks.0|ln_final"),
}
# timm's groups end at a block and the preceding downsampling, or at a norm outside of blocks.
OPEN_CLIP_TEXT = (r"token_emb|positional", r"transformer.resblocks.0", r"transformer.resblocks.1|ln_final")
OPEN_CLIP_VIT = OWN["visual."]
TIMM_VIT = (r"trunk.(cls_token|pos_embed|patch_embed)", r"trunk.blocks.0", r"trunk.blocks.1|trunk.norm")
ROBERTA = (r"transformer.embeddings", r"transformer.encoder.layer.0", r"transformer.encoder.layer.1")
FAMILY_PATTERNS: dict[str, dict[str, tuple[str, ...]]] = {
    "open_clip": {"visual.": OPEN_CLIP_VIT},
    "vit": {"visual.": TIMM_VIT},
    "siglip": {"visual.": TIMM_VIT},
    "eva": {"visual.": TIMM_VIT},
    "convnext": {
        "visual.": (
            r"trunk.stem",
            r"trunk.stages.0",
            r"trunk.stages.1",
            r"trunk.stages.2.(downsample|blocks.0)",
            r"trunk.stages.2.blocks.1",
            r"trunk.stages.3",
            r"trunk.head.norm",
        )
    },
    "mobileclip": {"visual.": (r"trunk.stem", *(f"trunk.stages.{i}" for i in range(4)))},
    "resnet": {"visual.": (r"conv|bn", *(f"layer{i}" for i in range(1, 5)))},
    "roberta": {"visual.": OPEN_CLIP_VIT, "text.": ROBERTA},
    "mt5": {"visual.": OPEN_CLIP_VIT, "text.": (r"transformer.embed", r"transformer.block.0", r"transformer.block.1")},
    "m2m_100": {
        "visual.": OPEN_CLIP_VIT,
        "text.": (r"transformer.embed", r"transformer.layers.0", r"transformer.layers.1"),
    },
    BOTH_RANDOM: {"visual.": TIMM_VIT, "text.": ROBERTA},
}


def rates(patterns: dict[str, tuple[str, ...]], settings: dict[str, float]) -> Rates:
    """Return the oracle's learning rates for settings of the section."""

    def of(name: str) -> tuple[float, float]:
        for tower, prefix in (("image", "visual."), ("text", "text.")):
            if name.startswith(prefix):
                layers = patterns.get(prefix, OPEN_CLIP_TEXT)
                short = name.removeprefix(prefix)
                layer = next((i for i, pattern in enumerate(layers) if re.match(pattern, short)), len(layers))
                factor = settings.get(f"{tower}_lr", 1.0)
                factor *= settings.get(f"{tower}_layer_decay", 1.0) ** (len(layers) - layer)
                return factor, settings.get(f"{tower}_weight_decay", WEIGHT_DECAY)
        return 1.0, WEIGHT_DECAY

    return of


QUICK = {
    "zero0": Case(0, 2, section=BOTH),
    "zero1 offloaded": Case(1, 2, section=BOTH, offload="optimizer"),
    "zero2 clipped": Case(2, 2, section=TOWERS, clipping=0.1),
    "zero3": Case(3, 2, section=BOTH, persistence_threshold=100),
}
GRID = {
    "zero0 locked": Case(0, 2, section=BOTH, locked="below", clipping=0.1),
    "zero0 Lamb": Case(0, 2, section=BOTH, optimizer="Lamb"),
    "zero1 SGD coalesced": Case(1, 2, section=BOTH, optimizer="SGD", coalesce=True),
    "zero2 locked offloaded": Case(2, 2, section=BOTH, locked="below", offload="optimizer", clipping=0.1),
    "zero3 locked coalesced": Case(3, 2, section=BOTH, locked="below", coalesce=True),
    "zero3 all offloaded": Case(3, 2, section=BOTH, offload="all"),
}

FAMILY_QUICK = {"both random zero3": open_clip_cases.Case(3, family=BOTH_RANDOM, section=BOTH)}
FAMILY_GRID = {
    f"{family} zero{number % 4}": open_clip_cases.Case(number % 4, family=family, section=BOTH)
    for number, family in enumerate(FAMILIES)
}


TENSOR_PARALLEL = {
    f"zero{stage}": Case(stage, 2, section=BOTH, tensor_parallel=2, clipping=0.1 * (stage == 1)) for stage in (0, 1, 3)
}


def train_all(own: dict[str, Case], families: dict[str, open_clip_cases.Case], folder: Path) -> dict:
    """Return the outcome of every case on this rank, or the traceback of its exception."""
    outcomes: dict = {name: or_traceback(train, case) for name, case in own.items()}
    for name, case in families.items():
        outcomes[name] = or_traceback(open_clip_cases.train, case, folder, checkpoints_of(folder, name))
    return outcomes


def own_oracle(case: Case, settings: dict[str, float] | None = None) -> Outcome:
    return oracle(case, rates=rates(OWN, dict(case.section) if settings is None else settings))


def family_oracle(case: open_clip_cases.Case, folder: Path) -> Outcome:
    return open_clip_cases.oracle(case, folder, rates(FAMILY_PATTERNS[case.family], dict(case.section)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("groups"), FAMILY_QUICK)


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict]:
    return run_ranks(train_all, WORLD_SIZE, QUICK, FAMILY_QUICK, folder)


def check_resumed(got: Outcome) -> None:
    """Check that a new engine that loaded the first step's checkpoint took the second step with the same bits."""
    for key, value in got.parameters.items():
        assert (got.resumed[key] == value).all(), f"{key} after resume"


@pytest.mark.parametrize("name", QUICK)
def test_two_steps_equal_hand_written_groups(trained, name):
    for rank, outcomes in enumerate(trained):
        assert exceeded(comparisons(outcomes[name], own_oracle(QUICK[name])).values()) == [], f"rank {rank}"


def test_open_clips_towers_equal_hand_written_groups_and_resume(trained, folder):
    for name, case in FAMILY_QUICK.items():
        expected = family_oracle(case, folder)
        for outcomes in trained:
            assert exceeded(comparisons(outcomes[name], expected, OPEN_CLIP_ENGINE).values()) == []
            check_resumed(outcomes[name])


def test_the_comparison_detects_every_setting(trained):
    """An oracle that differs in one setting is far away."""
    case = QUICK["zero0"]
    for key, value in case.section:
        other = dict(case.section) | {key: value * 0.9 if value else 0.5}
        found = comparisons(trained[0]["zero0"], own_oracle(case, other))
        assert unnoticed([found["parameters"]], key) == []


@pytest.mark.long
def test_every_stage_and_family(tmp_path):
    prepared(tmp_path, FAMILY_GRID)
    outcomes = run_ranks(train_all, WORLD_SIZE, GRID, FAMILY_GRID, tmp_path, time_limit_s=1100)
    failed = {}
    for of_rank in outcomes:
        for name, case in GRID.items():
            if problems := exceeded(comparisons(of_rank[name], own_oracle(case)).values()):
                failed[name] = str(problems)
        for name, family_case in FAMILY_GRID.items():
            try:
                found = comparisons(of_rank[name], family_oracle(family_case, tmp_path), OPEN_CLIP_ENGINE)
                assert exceeded(found.values()) == []
                check_resumed(of_rank[name])
            except AssertionError as error:
                failed[name] = str(error)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())


@MEGATRON
@pytest.mark.long
def test_towers_split_over_two_ranks():
    for outcomes in run_ranks(train_all, WORLD_SIZE, TENSOR_PARALLEL, {}, Path(), time_limit_s=300):
        for name, case in TENSOR_PARALLEL.items():
            assert exceeded(comparisons(outcomes[name], own_oracle(case)).values()) == [], name
