"""`megaclip evaluate` on an exported model and on a run's checkpoint, compared with the sorted similarity matrix."""

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from megaclip.checkpoint import manifest
from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.commands import evaluate
from megaclip.data import ImageTransform, load_tokenizer, open_pairs
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.engine.saved_model import load_saved_model
from megaclip.errors import ConfigError, MegaclipError
from megaclip.models import ClipModel, build_model, load_model_config
from tests.evaluation_oracle import ranks_by_sorting, recall, retrieval_by_sorting
from tests.unit.data.data_samples import write_tar

CONFIG = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 49408, "eos_id": 49407})
COUNT = 23
COLOURS = np.random.default_rng(0).integers(0, 256, size=(COUNT, 2, 2, 3), dtype=np.uint8)
CAPTIONS = [f"picture number {index}, a test" for index in range(COUNT)]
CLASSES = ["red", "green", "blue"]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the launcher's variables, which the command sets.

    Programs that later tests start would read them otherwise.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def model() -> ClipModel:
    torch.manual_seed(0)
    model = build_model(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # the features of a freshly initialised model hardly depend on the image
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: ClipModel) -> Path:
    """Folder with model/ (exported), run/checkpoints/ (one step), pairs.tar and labelled/."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_model_card(folder / "model", CONFIG, OPENAI_PREPROCESS)
    write_weights(folder / "model", model.state_dict(), CONFIG)
    checkpoints = folder / "run" / "checkpoints"
    step = checkpoints / "step_00000007"
    step.mkdir(parents=True)
    write_model_card(checkpoints / "model", CONFIG, OPENAI_PREPROCESS)
    counters = {"global_steps": 7, "global_samples": 0, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    optimizer = {"param_groups": [{"parameter_names": []}], "state": {}}
    torch.save({"module": model.state_dict(), "optimizer": optimizer, **counters}, step / "mp_rank_00_model_states.pt")
    manifest.write(step)
    (checkpoints / "latest").write_text(step.name)
    members = [
        (f"{i:04d}.{kind}", content(i)) for i in range(COUNT) for kind, content in (("png", encoded), ("txt", words))
    ]
    write_tar(folder / "pairs.tar", members)
    for index in range(COUNT):
        path = folder / "labelled" / CLASSES[index % 3] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(index))
    return folder


def encoded(index: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(COLOURS[index]).resize((30, 26), Image.Resampling.NEAREST).save(buffer, "png")
    return buffer.getvalue()


def words(index: int) -> bytes:
    return CAPTIONS[index].encode()


@pytest.fixture(scope="module")
def expected(model: ClipModel) -> dict[str, float]:
    """Metrics from the sorted similarity matrix; every image and caption is encoded alone."""
    transform, tokenizer = (
        ImageTransform(CONFIG.vision_cfg.image_size),
        load_tokenizer("clip", CONFIG.text_cfg.context_length),
    )
    model.eval()
    with torch.no_grad():
        images = torch.cat([model(transform.normalise(transform(encoded(index))[None]))[0] for index in range(COUNT)])
        texts = torch.cat([model(None, tokenizer([caption]))[1] for caption in CAPTIONS])
        prompts = torch.cat([model(None, tokenizer([f"a photo of a {name}."]))[1] for name in sorted(CLASSES)])
    ids = np.arange(COUNT)
    labels = np.array([sorted(CLASSES).index(CLASSES[index % 3]) for index in ids])
    ranks = ranks_by_sorting(images.double().numpy() @ prompts.double().numpy().T, np.arange(3) == labels[:, None])
    metrics = retrieval_by_sorting(images.numpy(), texts.numpy(), ids, ids)
    return {**metrics, "zero_shot_top1": recall(ranks, 1), "zero_shot_top5": 1.0}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    evaluate.main()


@pytest.mark.parametrize("source", ["model", "run", "run/checkpoints"])
def test_scores_equal_those_of_the_sorted_matrix(
    folder: Path,
    expected: dict[str, float],
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ["--val-data", folder / "pairs.tar", "--zeroshot-data", folder / "labelled", "--workers", 0]
    written = ["--json", tmp_path / "scores.json", "--pictures", tmp_path / "pictures", "--batch-size", 7]
    run(monkeypatch, folder / source, *data, *written)
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["metrics"] == pytest.approx(expected)
    assert content["tag"] == (None if source == "model" else "step_00000007"), "also if --tag is left out"
    table = capsys.readouterr().out
    for value in expected.values():
        assert f"{100 * value:.2f} %" in table
    for name in ("similarity", "retrieval"):
        assert Image.open(tmp_path / "pictures" / f"{name}.png").mode == "RGB"


MISTAKES = """
model --tag step_00000007 --val-data pairs.tar | --tag step_00000007 selects
model --ema --val-data pairs.tar | --ema selects the moving average of a run, but
run --ema --val-data pairs.tar | has no moving averages of the weights (--ema), which a run
model --val-data missing.tar | missing.tar
labelled --val-data pairs.tar | no checkpoint at
nowhere --val-data pairs.tar | 'nowhere' contains no checkpoint and no exported model; give an exported
pairs.tar --val-data pairs.tar | convert it to a directory with `megaclip import`
run --tag step_00000008 --val-data pairs.tar | no checkpoint 'step_00000008' in
"""


def test_mistake_gives_an_error_of_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for row in MISTAKES.strip().splitlines():
        arguments, message = row.split(" | ")
        with pytest.raises(MegaclipError) as error:
            run(monkeypatch, *arguments.split())
        assert message in str(error.value) and "\n" not in str(error.value), row


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "pairs.tar/x.json"], "cannot write 'pairs.tar': "),
        (["--pictures", "pairs.tar"], "cannot write 'pairs.tar': "),
        (["--json", "model"], "cannot write 'model': it is a directory"),
    ],
)
def test_results_that_cannot_be_written_are_an_error_before_the_evaluation(
    folder: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "megaclip.commands.evaluate_saved.load_saved_model", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with pytest.raises(MegaclipError, match=message):
        run(monkeypatch, "model", "--val-data", "pairs.tar", *flags)


def test_flags_without_effect_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--pictures p,--group-captions,--image-key a,--image-root a,--caption-key a,--dataset-type csv"
    for flag in flags.split(","):
        with pytest.raises(SystemExit):
            run(monkeypatch, folder / "model", "--zeroshot-data", folder / "labelled", *flag.split())
        assert f"{flag.split()[0]} has no effect without --val-data" in capsys.readouterr().err


def test_captions_without_a_readable_image_are_one_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "bad.tar", [("0.png", b"no picture"), ("0.txt", b"a cat")])
    for flags in ([], ["--group-captions"]):
        with pytest.raises(MegaclipError, match="retrieval requires at least one image with a caption"):
            run(monkeypatch, folder / "model", "--val-data", tmp_path / "bad.tar", "--workers", 0, *flags)


def test_equal_images_are_one_image_in_every_format(
    folder: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Three captions per image. Otherwise text to image would have a recall of 0 at 1, because equal images tie."""
    captions = [[f"{text}, view {view}" for view in range(3)] for text in CAPTIONS]
    for index in range(COUNT):
        (tmp_path / f"{index}.png").write_bytes(encoded(index))
    rows = [(index, captions[index][view]) for view in range(3) for index in range(COUNT)]
    (tmp_path / "rows.csv").write_text("filepath,title\n" + "".join(f'{i}.png,"{text}"\n' for i, text in rows))
    records = [json.dumps({"image": f"{i}.png", "caption": texts}) for i, texts in enumerate(captions)]
    (tmp_path / "lists.jsonl").write_text("\n".join(records))
    lines = [m for i, t in enumerate(captions) for m in ((f"{i}.png", encoded(i)), (f"{i}.txt", "\n".join(t).encode()))]
    write_tar(tmp_path / "lines.tar", lines)
    found = {}
    for flags in ("rows.csv", "rows.csv --group-captions", "lists.jsonl", "lines.tar --group-captions"):
        name, *flag = flags.split()
        arguments = ["--val-data", tmp_path / name, "--workers", 0, "--json", tmp_path / "scores.json", *flag]
        run(monkeypatch, folder / "model", *arguments)
        found[flags] = json.loads((tmp_path / "scores.json").read_text())["metrics"]
        assert f"retrieval, {3 * COUNT} captions, {COUNT} images" in capsys.readouterr().out
    assert 0 < found["rows.csv"]["retrieval_r10_t2i"] < 1, "the data must not be trivial"
    assert all(metrics == pytest.approx(found["rows.csv"]) for metrics in found.values())
    assert warnings.messages == []
    run(monkeypatch, folder / "model", "--val-data", tmp_path / "lines.tar", "--workers", 0)
    assert f"texts of --val-data with several lines: {COUNT}; each text is one caption, and --group-" in warnings.text


def test_the_pairs_that_a_run_held_out_are_evaluated_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(tmp_path / "all.tar", [m for i in range(COUNT) for m in ((f"{i}.png", encoded(i)), (f"{i}.txt", b"a"))])
    held_out = open_pairs([str(tmp_path / "all.tar")]).split(0.3)[1]
    flags = ["--val-data", tmp_path / "all.tar", "--workers", 0, "--val-fraction"]
    run(monkeypatch, folder / "model", *flags, 0.3)
    assert 0 < len(held_out) < COUNT and f"retrieval, {len(held_out)} captions" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, folder / "model", *flags, 1.5)


def test_the_tokenizer_is_compared_with_that_of_the_model(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    """A copy is the same tokenizer. Another one gives a warning, or an error if it has ids without an embedding."""
    source = tmp_path / "model"
    source.mkdir()
    own = train_sentencepiece(CAPTIONS, source / "own.model", vocab_size=40)
    config = CONFIG.replace(text_cfg={**own.write_open_clip(source), "vocab_size": own.vocab_size})
    write_model_card(source, config, OPENAI_PREPROCESS)
    write_weights(source, build_model(config).state_dict(), config)
    copy = shutil.copy(source / "own.model", tmp_path / "copy.model")
    for tokenizer in (None, str(source / "own.model"), str(copy)):
        assert load_saved_model(source, tokenizer=tokenizer).tokenizer.identity == own.identity
    assert warnings.messages == []
    renamed = [caption.replace("picture", "painting") for caption in CAPTIONS]
    (other,) = train_sentencepiece(renamed, tmp_path / "other.model", vocab_size=own.vocab_size).files
    assert load_saved_model(source, tokenizer=str(other)).tokenizer.identity != own.identity
    assert warnings.messages == [
        f"--tokenizer {other} is not the tokenizer of the model in {source}, {source / 'own.model'}"
    ]
    message = rf"tokenizer clip has 49408 ids, and the text tower has {own.vocab_size} embeddings .*; give the"
    with pytest.raises(ConfigError, match=message):
        load_saved_model(source, tokenizer="clip")
