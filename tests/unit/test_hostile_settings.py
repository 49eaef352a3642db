"""Random ds_config files, command lines and run settings raise only our own errors, in one line."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megaclip.config import TrainArguments, load_training_config, parse_arguments
from megaclip.config.open_clip_flags import OPEN_CLIP_FLAGS
from megaclip.errors import MegaclipError

CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").rglob("*.json"))
SCALARS = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    10**40,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "auto",
    "x",
    "1",
    "\0",
]


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kinds = [lambda: draw.choice(SCALARS)] * 6
    if depth < 3:
        kinds.append(lambda: [random_value(draw, depth + 1) for _ in range(draw.randrange(4))])
        kinds.append(
            lambda: {str(draw.choice(SCALARS)): random_value(draw, depth + 1) for _ in range(draw.randrange(4))}
        )
    return draw.choice(kinds)()


def changed(draw: random.Random, config: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Return a copy with one or two values replaced, at any depth, some of them under another key."""
    config = json.loads(json.dumps(config))
    for _ in range(draw.randrange(1, 3)):
        place = config
        while True:
            key = draw.choice([*place, draw.choice(known)])
            if isinstance(place.get(key), dict) and draw.random() < 0.8:
                place = place[key]
                continue
            place[key] = random_value(draw)
            break
    return config


@pytest.mark.timeout(120)
def test_random_ds_configs_raise_only_our_own_errors(tmp_path: Path) -> None:
    draw = random.Random(1)
    contents = [json.loads(path.read_text()) for path in CONFIGS]
    known = sorted(
        {key for content in contents for part in [content, *content.values()] if isinstance(part, dict) for key in part}
    )
    known += [
        "scheduler",
        "fp16",
        "flops_profiler",
        "wandb",
        "csv_monitor",
        "timers",
        "checkpoint",
        "data_types",
        "amp",
    ]
    path = tmp_path / "ds_config.json"
    accepted = refused = 0
    for _ in range(600):
        path.write_text(json.dumps(changed(draw, draw.choice(contents), known)))
        try:
            load_training_config(path).batch_plan(draw.choice((1, 2, 3)))
            accepted += 1
        except MegaclipError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            refused += 1
    assert accepted > 10 and refused > 200


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}', b"1e999", b'{"train_batch_size": ' + b"9" * 5000 + b"}"],
)
def test_files_that_are_no_ds_config_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(content)
    with pytest.raises(MegaclipError):
        load_training_config(path)


@pytest.mark.timeout(120)
def test_random_command_lines_raise_only_our_own_errors() -> None:
    draw = random.Random(2)
    flags = (
        ["--" + name.replace("_", "-") for name in TrainArguments.model_fields]
        + sorted(OPEN_CLIP_FLAGS)
        + ["-x", "--", "--é"]
    )
    words = [
        "1",
        "0",
        "-1",
        "x",
        "",
        "1e400",
        "nan",
        "../..",
        "\0",
        "--",
        "0.5",
        "9" * 5000,
        "é",
        "a b",
        "auto",
        "{1..9}",
    ]
    required = ["--deepspeed_config", "c.json", "--model", "m", "--train-data", "a.tar"]
    accepted = refused = 0
    for _ in range(1500):
        extra = [part for _ in range(draw.randrange(3)) for part in (draw.choice(flags), draw.choice(words))]
        try:
            parse_arguments([*required, *extra])
            accepted += 1
        except MegaclipError as error:
            assert "\n" not in str(error) or str(error).startswith("these arguments are not accepted")
            refused += 1
    assert accepted > 100 and refused > 300
