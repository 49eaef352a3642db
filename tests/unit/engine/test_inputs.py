"""Inputs of a run: contradictions are refused before data are opened, and a model card supplies missing settings."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, read_model_card, write_model_card
from megaclip.checkpoint.open_clip_weights import meta_model, write_weights
from megaclip.config import load_training_config, parse_arguments
from megaclip.config.training import TextChunks
from megaclip.data import ImageTransform
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.data.tokenizers import load_tokenizer
from megaclip.engine import equal_inputs, resume
from megaclip.engine.inputs import Inputs, _check_tokenizer_of, chosen_objective, model_preprocessing, read_inputs
from megaclip.engine.preflight import workload_of
from megaclip.engine.saved_model import load_saved_model
from megaclip.engine.schedule import RunLength
from megaclip.errors import CheckpointError, ConfigError, DataError
from megaclip.models import build_model, load_model_config
from megaclip.models.config import CARD_NAME
from megaclip.models.open_clip_layers import layer_groups
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed.memory_batch import MemoryBatch, PlainEngine, cross_entropy
from tests.unit.data.data_samples import write_shards

CAPTIONS = [
    f"{size} {colour} {thing}" for size in ("small", "big") for colour in ("red", "blue") for thing in ("cat", "ox")
]
PIXELS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.5], "interpolation": "bilinear", "resize_mode": "squash"}


def ds_config(folder: Path, micro_batch: int = 4, **megaclip: str | bool | int) -> Path:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megaclip": megaclip,
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"pool_type": "last"}, 'text tower\'s "pool_type" is "last"'),
        ({"no_causal_mask": True}, "text tower's attention is not causal"),
    ],
)
def test_captions_whose_padding_matters_cannot_be_cut(tmp_path: Path, text: dict, reason: str) -> None:
    model = tmp_path / "model.json"
    description = load_model_config("demo-tiny").replace(text_cfg=text).to_open_clip()
    model.write_text(json.dumps(description))
    flags = ["--model", str(model), "--train-data", "nowhere", "--tokenizer", "clip", "--deepspeed_config"]
    with pytest.raises(ConfigError, match=rf"megaclip.cut_captions true cannot be .*{reason}; use \"auto\" or false"):
        read_inputs(parse_arguments([*flags, str(ds_config(tmp_path, cut_captions=True))]))
    with pytest.raises(DataError, match="nowhere"):  # the next problem: the settings themselves were accepted
        read_inputs(parse_arguments([*flags, str(ds_config(tmp_path, cut_captions="auto"))]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with exported/ (weights, card and its own tokenizer), a dataset and a ds_config.json."""
    folder = tmp_path_factory.mktemp("inputs")
    exported = folder / "exported"
    exported.mkdir()
    tokenizer = train_sentencepiece(CAPTIONS, exported / "tokenizer.model", vocab_size=40)
    config = load_model_config("demo-tiny").replace(text_cfg=tokenizer.write_open_clip(exported))
    config = config.replace(text_cfg={"context_length": 24, "vocab_size": tokenizer.vocab_size + 8}, quick_gelu=True)
    write_model_card(exported, config, PIXELS)
    write_weights(exported, build_model(config).state_dict(), config)
    shutil.copyfile(exported / "tokenizer.model", folder / "copy.model")
    write_shards(folder / "data", [4])
    ds_config(folder)
    return folder


def read(folder: Path, *flags: object) -> Inputs:
    common = ["--deepspeed_config", folder / "ds_config.json", "--train-data", folder / "data" / "*.tar"]
    return read_inputs(parse_arguments([str(flag) for flag in (*common, *flags)]))


@pytest.mark.parametrize(
    "flags",
    [("--model", "exported", "--pretrained", "exported"), ("--model", "exported"), ("--pretrained", "exported")],
)
def test_training_uses_the_tokenizer_and_preprocessing_of_the_card(folder: Path, flags: tuple[str, ...]) -> None:
    """The evaluation and `megaclip inspect` use the same settings."""
    flags = tuple(str(folder / flag) if flag == "exported" else flag for flag in flags)
    inputs = read(folder, *flags, *(() if "--model" in flags else ("--model", "demo-tiny")))
    assert inputs.preprocess_cfg == PIXELS
    assert inputs.train_transform.mean == (0.5, 0.4, 0.3) and inputs.train_transform.interpolation == "bilinear"
    evaluated = load_saved_model(folder / "exported")
    assert inputs.evaluation_transform == evaluated.transform
    assert torch.equal(inputs.tokenizer(CAPTIONS), evaluated.tokenizer(CAPTIONS))
    assert inputs.tokenizer.files == (folder / "exported" / "tokenizer.model",)
    assert inputs.model_config.text_cfg == evaluated.model.config.text_cfg
    assert inputs.config.text_chunks == TextChunks(2)
    if "--pretrained" not in flags:
        tokenizer, pixels = model_preprocessing(flags[1], None)
        assert torch.equal(tokenizer(CAPTIONS), inputs.tokenizer(CAPTIONS))
        assert ImageTransform(**pixels) == inputs.evaluation_transform


def test_cards_of_towers_supply_the_settings_of_their_tower(folder: Path) -> None:
    exported = str(folder / "exported")
    image = read(folder, "--model", "demo-tiny", "--pretrained-image", exported)
    assert image.preprocess_cfg == PIXELS and image.tokenizer.files == ()
    text = read(folder, "--model", "demo-tiny", "--pretrained-text", exported)
    assert text.preprocess_cfg["mean"] == list(OPENAI_PREPROCESS["mean"])
    assert text.tokenizer.files == (folder / "exported" / "tokenizer.model",)


@pytest.mark.parametrize(("tower", "unit"), [("image", "groups"), ("text", "layers")])
def test_locks_that_lock_nothing_are_refused(folder: Path, tower: str, unit: str) -> None:
    """The largest accepted number of groups locks at least one parameter. The next larger number locks none."""
    flags = [f"--lock-{tower}", f"--lock-{tower}-unlocked-{unit}"]
    model = meta_model(load_model_config("demo-tiny"))
    part = {"image": model.visual, "text": model.text}[tower]
    most = len(layer_groups(part)) - 1
    assert read(folder, "--model", folder / "exported", *flags, most).model_config is not None
    with pytest.raises(ConfigError, match=rf"{flags[1]} {most + 1}: .* use at most {most}, or leave out {flags[0]}$"):
        read(folder, "--model", folder / "exported", *flags, most + 1)


TWO_LOCKS = "--lock-image --lock-text --lock-text-unlocked-layers"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"--model EXPORTED --pretrained EXPORTED {TWO_LOCKS} 0", ["--lock-image and --lock-text: both towers are"]),
        (f"--model EXPORTED --pretrained EXPORTED {TWO_LOCKS} 1", []),
        ("--model EXPORTED", ["--model EXPORTED holds weights, but training starts from random ones"]),
        ("--model EXPORTED --resume EXPORTED", []),
        ("--model demo-tiny", []),
        ("--model EXPORTED --pretrained EXPORTED --tokenizer EXPORTED/../copy.model", []),
        (
            "--model demo-tiny --pretrained EXPORTED/open_clip_model.safetensors",
            ["--model demo-tiny has quick_gelu False, but the weights in EXPORTED were trained with True"],
        ),
        ("--model demo-tiny --set megaclip.same_ids=positive", ["megaclip.same_ids 'positive' changes nothing"]),
        ("--model demo-tiny --set megaclip.same_ids=positive --id-key image", []),
    ],
)
def test_inputs_that_are_probably_not_meant_give_a_warning(
    folder: Path, warnings: pytest.LogCaptureFixture, flags: str, expected: list[str]
) -> None:
    exported = str(folder / "exported")
    read(folder, *(word.replace("EXPORTED", exported) for word in flags.split()))
    assert len(warnings.messages) == len(expected)
    for message, start in zip(warnings.messages, expected, strict=True):
        assert message.startswith(start.replace("EXPORTED", exported))


def test_flags_override_the_card_with_a_warning(
    folder: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    exported = folder / "exported"
    flags = [
        "--image-mean",
        "0.1",
        "0.2",
        "0.3",
        "--image-std",
        "0.2",
        "0.25",
        "0.5",
        "--image-resize-mode",
        "shortest",
    ]
    (other,) = train_sentencepiece(CAPTIONS[:2] * 9, tmp_path / "other.model", vocab_size=25).files
    inputs = read(folder, "--model", exported, "--pretrained", exported, *flags, "--tokenizer", other)
    assert inputs.preprocess_cfg == {**PIXELS, "mean": [0.1, 0.2, 0.3], "resize_mode": "shortest"}
    text = inputs.model_config.text_cfg
    assert inputs.tokenizer.files == (other,)
    assert text.vocab_size == load_model_config(exported).text_cfg.vocab_size > inputs.tokenizer.vocab_size
    assert [line.split(":")[0] for line in warnings.messages] == [
        f"--tokenizer {other} is not the tokenizer of the model in {exported}, {exported / 'tokenizer.model'}",
        "--image-mean (0.1, 0.2, 0.3)",
        "--image-resize-mode shortest",
    ]


def test_unsupported_preprocessing_names_the_card_and_the_flags(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder / "exported", tmp_path / "other"))
    card = json.loads((other / CARD_NAME).read_text())
    (other / CARD_NAME).write_text(json.dumps(card | {"preprocess_cfg": {**PIXELS, "resize_mode": "longest"}}))
    with pytest.raises(
        ConfigError, match=rf"{CARD_NAME}: resize_mode is 'longest'.*; override it with .*--image-resize-mode"
    ):
        read(folder, "--model", other)
    settled = read(folder, "--model", other, "--image-resize-mode", "squash").preprocess_cfg
    assert settled == PIXELS
    (other / CARD_NAME).write_text(json.dumps(card | {"preprocess_cfg": None}))
    assert read(folder, "--model", other).preprocess_cfg["resize_mode"] == "shortest"


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ('{"preprocess_cfg": [1]}', CheckpointError, "preprocess_cfg is a list, expected a JSON object"),
        ("[1]", ConfigError, "holds a JSON list, expected a JSON object"),
        ("{", ConfigError, "is not JSON"),
    ],
)
def test_damaged_card_raises_an_error_that_names_it(
    folder: Path, tmp_path: Path, text: str, error: type[Exception], expected: str
) -> None:
    card = tmp_path / CARD_NAME
    model = json.loads((folder / "exported" / CARD_NAME).read_text())["model_cfg"]
    card.write_text(json.dumps({"model_cfg": model, **json.loads(text)}) if text.startswith('{"') else text)
    with pytest.raises(error, match=f"{CARD_NAME}.*{expected}"):
        read(folder, "--model", tmp_path)


def test_card_without_its_tokenizer_file_requires_the_flag(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "exported" / "open_clip_config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"holds 0 .* --tokenizer"):
        read(folder, "--model", tmp_path)
    assert read(folder, "--model", tmp_path, "--tokenizer", folder / "exported" / "tokenizer.model")
    for name in ("one.model", "another.model"):
        shutil.copy(folder / "exported" / "tokenizer.model", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds 2 .* --tokenizer"):
        read(folder, "--model", tmp_path)


MISTAKES = """
--model demo-tiny --set megaclip.loss=siglip | has no init_logit_bias, which megaclip.loss "siglip" requires
--model demo-tiny --set megaclip.loss=fastclip_v1 --logit-scale-max 50 | --logit-scale-max has no effect with
--model demo-tiny --set megaclip.lora={} | megaclip.lora requires --pretrained: adapters change a trained model
--model demo-tiny --coca-caption-loss-weight 1 | --coca-caption-loss-weight has no effect with --model demo-tiny
--model coca_ViT-B-32 --set megaclip.objective=OWN:Other | would not train the caption decoder
--model demo-tiny --set megaclip.objective=OWN:Other megaclip.tensor_parallel_size=2 | cannot be used with megaclip
--model demo-tiny --set megaclip.objective=OWN:Other CACHE | --feature-cache keeps neither images nor extra fields
--model demo-tiny --val-data x --eval-ema | --eval-ema evaluates the moving average of the weights, and megaclip
--model demo-tiny --id-key image | --id-key has no effect with megaclip.same_ids 'ignore'
--model demo-tiny --data-offload-dir x | --data-offload-dir 'x' is not a folder; create it first
--model demo-tiny --data-offload-dir x --set megaclip.data_offload=cpu | has no effect with megaclip.data_offload 'cpu'
--model demo-tiny --pretrained laion2b_s34b_b79k | expected a weights file or a directory, not one of open_clip's tags
--model demo-tiny --pretrained-text laion2b | --pretrained-text 'laion2b' does not exist; expected a weights file or
--model hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K | MegaCLIP downloads nothing
--model RN50 --force-patch-dropout 0.5 | has no effect on a ResNet; set it to 0, or leave out the flag
--model RN50 --set megaclip.tensor_parallel_size=2 | megaclip.tensor_parallel_size 2 requires MegaCLIP's own towers
--model RN50 CACHE | requires MegaCLIP's own image tower, and open_clip's modules run --model RN50
--model demo-tiny CACHE --force-patch-dropout 0.5 | requires images without patch dropout; add --force-patch-dropout 0
--model demo-tiny CACHE --set megaclip.tensor_parallel_size=2 | cannot be used with megaclip.tensor_parallel_size 2
"""
CACHE = "--lock-image --no-augmentation --feature-cache cache"


def test_settings_flags_and_models_that_contradict_each_other_are_one_error(folder: Path) -> None:
    own = folder / "own.py"
    own.write_text(
        "from megaclip.objectives import Caption, Objective\nclass Own(Caption): pass\nclass Other(Objective): pass\n"
    )
    for row in MISTAKES.strip().splitlines():
        flags, expected = row.replace("CACHE", CACHE).replace("OWN", str(own)).split(" | ")
        with pytest.raises(ConfigError) as error:
            read(folder, *flags.split())
        assert expected in str(error.value) and "\n" not in str(error.value), row
    assert read(folder, "--model", "coca_ViT-B-32", "--set", f"megaclip.objective={own}:Own").objective is not None
    inputs = read(folder, "--model", "demo-tiny", *CACHE.split())
    assert inputs.train_transform == inputs.evaluation_transform


def test_defaults_without_a_card_are_openais(folder: Path) -> None:
    inputs = read(folder, "--model", "demo-tiny")
    assert inputs.preprocess_cfg["mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert inputs.tokenizer.vocab_size == 49408 and inputs.tokenizer.files == ()


def test_run_description_contains_the_tokenizers_content_and_the_preprocessing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the tokenizer is not part of the description that a resumed run must match."""
    monkeypatch.setattr(resume.dist, "get_world_size", lambda: 1)
    copy = shutil.copy(folder / "exported" / "tokenizer.model", tmp_path / "copy.model")
    renamed = [caption.replace("ox", "zx") for caption in CAPTIONS]
    (other,) = train_sentencepiece(renamed, tmp_path / "other.model", vocab_size=40).files

    def description(*flags: object) -> dict[str, object]:
        arguments = ["--model", folder / "exported", *flags]
        inputs = read(folder, *arguments)
        parsed = parse_arguments(["--deepspeed_config", "c", "--train-data", "d", *map(str, arguments)])
        return resume.describe_run(inputs, parsed, RunLength.of(parsed, len(inputs.train), 1), None)

    first = description()

    def changed(*flags: object) -> list[str]:
        return [key for key, value in description(*flags).items() if value != first[key]]

    assert changed("--tokenizer", copy) == []
    assert changed("--tokenizer", other) == ["tokenizer"]
    assert changed("--image-mean", 0.5, 0.4, 0.2) == ["preprocess"]


MODEL_FLAGS: dict[str, tuple[str, ...]] = {
    "--force-patch-dropout": ("0.5",),
    "--model": ("exported",),
    "--pretrained": ("exported",),
    "--pretrained-text": ("exported",),
    "--tokenizer": ("exported/tokenizer.model",),
}
"""Flags that change the model of a run, with a value that does; paths are in `folder`."""


@pytest.mark.parametrize("flag", MODEL_FLAGS)
def test_run_and_plan_are_derived_from_the_model_with_every_flag(folder: Path, tmp_path: Path, flag: str) -> None:
    """A step whose kept graphs the plan has counted encodes the chunks that the run has."""
    values = [value if value[0].isdigit() else folder / value for value in MODEL_FLAGS[flag]]
    common = ("--deepspeed_config", ds_config(tmp_path, micro_batch=2, keep_graphs=9))
    plain = read(folder, *common, "--model", "demo-tiny")
    flags = [str(word) for word in (*common, "--model", "demo-tiny", flag, *values)]
    inputs, arguments = read(folder, *flags), parse_arguments([*flags, "--train-data", "x"])
    planned = workload_of(arguments, inputs, 1)
    assert inputs.model_config != plain.model_config
    assert (inputs.saved_config == plain.saved_config) == (flag == "--force-patch-dropout")
    assert (planned.model, planned.batch) == (inputs.model_config, inputs.config.batch_layout(1))
    model, batch = build_model(inputs.model_config), inputs.config.batch_layout(1)
    feed = DeviceFeed(torch.device("cpu"), torch.float32, inputs.train_transform.normalise)
    pixels = torch.randint(256, (4, 3, 24, 24), dtype=torch.uint8).chunk(batch.accumulation)
    samples = MemoryBatch(pixels, inputs.tokenizer(CAPTIONS[:4]), feed, text_chunks=batch.text_chunks)
    seeds, engine = RandomState(seed=0, step=0, replica=0), PlainEngine(model)
    accumulate_gradients(
        engine, cross_entropy, samples, lambda: [torch.zeros(1)], seeds, coalesce=False, kept=planned.kept
    )
    assert planned.kept == planned.chunks == (2, batch.text_chunks) and engine.rows == {"image": 4, "text": 4}


def test_text_chunks_depend_on_forced_patch_dropout(folder: Path, tmp_path: Path) -> None:
    """Otherwise the test above would not see a plan of another model."""
    common = ("--deepspeed_config", ds_config(tmp_path, micro_batch=2), "--model", "demo-tiny")
    chunks = [read(folder, *common, *flags).config.text_chunks for flags in ((), ("--force-patch-dropout", "0.5"))]
    assert chunks == [TextChunks(2), TextChunks(1)]


def test_all_ranks_have_the_same_pretrained_weights_or_a_feature_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would train different weights, or wait for each other. end_to_end/test_equal_inputs.py has other inputs."""
    exported, first = folder / "exported", list[dict[str, str]]()
    monkeypatch.setattr(equal_inputs, "gather_objects", lambda own: [*(first or [own]), own])
    inputs = read(folder, "--model", exported)
    copy, other = (Path(shutil.copytree(exported, tmp_path / name)) for name in ("copy", "other"))
    config = load_model_config(exported)
    write_weights(other, build_model(config).state_dict(), config)

    def compare(*flags: object) -> None:
        command = ["--deepspeed_config", "c", "--train-data", "d", "--model", exported, *flags]
        equal_inputs.require_equal_inputs(parse_arguments(list(map(str, command))), inputs)

    def begin(*flags: object) -> None:
        """Compare the calls that follow with these flags of the first rank."""
        first.clear()
        with monkeypatch.context() as patch:
            patch.setattr(equal_inputs, "require_equal", lambda texts: first.append(dict(texts)))
            compare(*flags)

    begin("--pretrained", exported)
    compare("--pretrained", copy)
    for flags in (("--pretrained", other), ("--pretrained", tmp_path / "nowhere"), ()):
        with pytest.raises(ConfigError, match="--pretrained differs between ranks: weights with checksum"):
            compare(*flags)
    locked = ("--lock-image", "--no-augmentation")
    begin(*locked, "--feature-cache", copy)
    compare(*locked, "--feature-cache", other)
    with pytest.raises(ConfigError, match="--feature-cache differs between ranks: a path on rank 0, not set on rank 1"):
        compare(*locked)


def test_nothing_else_changes_a_description() -> None:
    """A second place that changes the model of a run, such as the plan or the build, could forget another's change."""
    changing = set()
    for path in (Path(__file__).parents[3] / "megaclip").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "replace":
                continue
            if {"vision_cfg", "text_cfg"} & {keyword.arg for keyword in node.keywords}:
                changing.add(path.relative_to(path.parents[1]).as_posix())
    # `read_inputs` fits the description to the tokenizer. phases.py plans evaluations, in which no patches are dropped.
    assert changing == {"engine/inputs.py", "engine/tokenizer_choice.py", "planner/phases.py"}


def test_a_live_teacher_must_read_the_tokens_of_the_run(tmp_path: Path) -> None:
    write_model_card(tmp_path, load_model_config("demo-tiny"), PIXELS)
    card, tokenizer = read_model_card(tmp_path), load_tokenizer("clip", 9)
    positions = card.config.text_cfg.context_length
    _check_tokenizer_of(card, tokenizer, positions)
    with pytest.raises(ConfigError, match=rf"tokenizer is clip, for up to {positions} tokens, .* for {positions + 1};"):
        _check_tokenizer_of(card, tokenizer, positions + 1)
    tokenizer.identity = "sentencepiece 0123"
    with pytest.raises(ConfigError, match=r"that of the run is sentencepiece 0123, .*; use its tokenizer as"):
        _check_tokenizer_of(card, tokenizer, positions)


def test_an_objectives_constructor_draws_by_the_seed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\nfrom megaclip.objectives import Objective\n\n\nclass Own(Objective):\n"
        "    def __init__(self):\n        super().__init__()\n        self.drawn = torch.rand(()).item()\n"
    )
    path = ds_config(tmp_path, objective=f"{own}:Own")
    drawn = []
    for seed in ("1", "1", "2"):
        flags = ["--deepspeed_config", str(path), "--model", "demo-tiny", "--train-data", "nowhere", "--seed", seed]
        section, config = load_training_config(path).megaclip, load_model_config("demo-tiny")
        objective = chosen_objective(parse_arguments(flags), section, config)
        drawn.append(objective.drawn)
    assert drawn[0] == drawn[1] != drawn[2]
