"""A suite of sets of all kinds over gloo ranks: the same results file for every number of ranks, equal to an oracle."""

import csv
import io
import json
import tarfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaclip.commands.evaluate_saved import evaluate_suite
from megaclip.data import ImageTransform, load_tokenizer
from megaclip.evaluation import Evaluator, ModelEncoder
from megaclip.models import ClipModel, build_model, load_model_config
from tests.distributed.harness import run_ranks
from tests.evaluation_oracle import retrieval_by_sorting
from tests.suite_sets import CLASSES, COUNT, TEMPLATES, image, write_suite

CONFIG = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 49408, "eos_id": 49407})
TRANSFORM = ImageTransform(CONFIG.vision_cfg.image_size)


def tiny_model() -> ClipModel:
    torch.manual_seed(0)
    model = build_model(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # the features of a freshly initialised model hardly depend on the image
    return model.eval()


def run_suite(suite: Path, results: Path) -> None:
    model = tiny_model()
    loaded = SimpleNamespace(
        model=model, transform=TRANSFORM, tokenizer=load_tokenizer("clip", CONFIG.text_cfg.context_length)
    )
    encode = ModelEncoder(model, TRANSFORM.normalise, device=torch.device("cpu"), cut_captions=model.cut_captions)
    arguments = Namespace(suite=suite, json=results, markdown=False, probe=False, precision="fp32")
    evaluator = Evaluator(encode, TRANSFORM, loaded.tokenizer, batch_size=4, num_workers=0, text_batch_size=4)
    evaluate_suite(arguments, loaded, evaluator)  # type: ignore[arg-type]  # a stand-in for the model


def expected_metrics(suite: Path) -> dict[str, dict[str, float]]:
    """Return metrics of each task, the main one last. Images are encoded alone, texts without cutting their padding."""
    # The ranks import this module, but not scikit-learn.
    from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, jaccard_score

    model, tokenizer = tiny_model(), load_tokenizer("clip", CONFIG.text_cfg.context_length)
    with torch.no_grad():
        pixels = [TRANSFORM.normalise(TRANSFORM(image(row))[None]) for row in range(COUNT)]
        images = torch.cat([model(own)[0] for own in pixels]).double().numpy()

    def texts(captions: list[str]) -> np.ndarray:
        with torch.no_grad():
            return model(None, tokenizer(captions))[1].double().numpy()

    def scores(classes: list[str], templates: list[str]) -> np.ndarray:
        prompts = [texts([template.replace("{c}", name) for template in templates]) for name in classes]
        means = np.stack(prompts).mean(axis=1)
        return images @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T

    def read(folder: str, end: str) -> np.ndarray:
        contents = []
        with tarfile.open(suite / folder / "test" / "0.tar") as tar:
            for name in tar.getnames():
                file = tar.extractfile(name)
                assert file is not None
                contents += [file.read()] if name.endswith(end) else []
        return np.array([int(text) if end == "cls" else np.load(io.BytesIO(text)) for text in contents])

    def recalls(captions: list[list[str]]) -> dict[str, float]:
        owner = np.repeat(np.arange(1, COUNT), len(captions[0]))
        features = texts([text for own in captions for text in own])
        found = retrieval_by_sorting(images[1:], features, np.arange(1, COUNT), owner)
        result = {f"text_retrieval_recall@{k}": found[f"retrieval_r{k}_i2t"] for k in (1, 5, 10)}
        result |= {f"image_retrieval_recall@{k}": found[f"retrieval_r{k}_t2i"] for k in (1, 5, 10)}
        return result | {"mean_recall@1": (found["retrieval_r1_i2t"] + found["retrieval_r1_t2i"]) / 2}

    def worst(folder: str, column: int, hits: np.ndarray) -> float:
        groups = read(folder, "npy")[:, column]
        return min(hits[groups == group].mean() for group in set(groups))

    labels, of_class = read("wds_cars_test", "cls"), scores(CLASSES, TEMPLATES)
    predictions = of_class.argmax(axis=1)
    right, right5 = predictions == labels, ((-of_class).argsort(axis=1)[:, :5] == labels[:, None]).any(axis=1)
    recall = balanced_accuracy_score(labels, predictions)
    result: dict[str, dict[str, float]] = {
        key: {"mean_per_class_recall": recall, "acc5": right5.mean(), "acc1": right.mean()}
        for key in ("cars", "own_numbers")
    }
    folders = sorted({CLASSES[label] for label in labels})
    of_folder = [folders[k] for k in scores(folders, ["a photo of a {c}."]).argmax(axis=1)]
    result["own_folders"] = {"acc1": np.mean([name == CLASSES[y] for name, y in zip(of_folder, labels, strict=True)])}
    result["vtab/pets"] = {"mean_per_class_recall": recall}
    f1 = f1_score(labels, predictions, average="macro", labels=np.unique(labels), zero_division=0)
    result["wilds/iwildcam"] = {"F1-macro_all": f1}
    years, regions = (worst("wds_wilds-fmow_test", column, right) for column in (1, 0))
    result["wilds/fmow"] = {"acc_worst_year": years, "acc_worst_region": regions}
    result["fairness/dollar_street"] = {"acc_top5_wg": worst("wds_dollar_street_test", 0, right5)}
    result["fairness/geode"] = {"acc_wg": worst("wds_geode_test", 0, right)}

    several = read("wds_voc2007_multilabel_test", "npy")
    apart = of_class - 1e-9 * several * (1 + np.arange(COUNT)[:, None])
    precisions = [average_precision_score(several[:, k], apart[:, k]) for k in range(len(CLASSES))]
    result["voc2007_multilabel"] = {"mean_average_precision": np.mean(precisions)}
    views = [[f"view {row}", f"the other view {row}"] for row in range(1, COUNT)]
    result["retrieval/flickr_1k_test_image_text_retrieval"] = recalls(views)
    of = {language: recalls([[f"{language} {row}"] for row in range(1, COUNT)]) for language in ("de", "en")}
    by_language = {f"{name}/{language}": of[language][name] for language in of for name in of[language]}
    result["crossmodal3600"] = by_language | {name: (of["de"][name] + of["en"][name]) / 2 for name in of["de"]}
    result["crossmodal3600"] |= {"mean_recall@1": result["crossmodal3600"].pop("mean_recall@1")}

    first, second = (texts([f"{letter} {row}" for row in range(COUNT)]) for letter in "ab")
    for part in ("add_att", "swap_obj"):
        result[f"sugar_crepe/{part}"] = {"acc": np.mean((images * (first - second)).sum(axis=1) > 1e-9)}
    captions = texts([f"what is {row}" for row in range(22)]).reshape(11, 2, -1)
    pairs = images[:22].reshape(11, 2, -1) @ captions.swapaxes(1, 2)
    own = pairs[:, [0, 1], [0, 1]]
    text = (own > pairs[:, [0, 1], [1, 0]] + 1e-9).all(axis=1)
    by_image = (own > pairs[:, [1, 0], [0, 1]] + 1e-9).all(axis=1)
    result["winoground"] = {"text_acc": text.mean(), "image_acc": by_image.mean(), "acc": (text & by_image).mean()}
    jaccards: dict[int, list[float]] = {5: [], 10: []}
    with (suite / "winogavil" / "winogavil_dataset.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            names, chosen = json.loads(row["candidates"]), json.loads(row["associations"])
            is_right = np.isin(names, chosen)
            cue = f"A {row['cue']}" if "cue" in row["cue"] else f"An {row['cue'].lower()}"
            order = (images[list(map(int, names))] @ texts([cue])[0] - 1e-9 * is_right).argsort()
            selected = np.isin(np.arange(len(names)), order[-len(chosen) :])
            jaccards[len(names)].append(jaccard_score(is_right, selected))
    result["misc/winogavil"] = {
        name: float(np.mean(jaccards[size])) for name, size in (("jaccard_score_5-6", 5), ("jaccard_score_10-12", 10))
    }
    return result


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the suite, and its results with one rank in 1.jsonl."""
    folder = tmp_path_factory.mktemp("suite")
    write_suite(folder / "suite")
    run_suite(folder / "suite", folder / "1.jsonl")
    return folder


# end_to_end/test_suite_run.py has two ranks at ZeRO-3.
def test_the_results_do_not_depend_on_the_number_of_ranks(suite: Path) -> None:
    run_ranks(run_suite, 3, suite / "suite", suite / "3.jsonl")
    assert (suite / "3.jsonl").read_text() == (suite / "1.jsonl").read_text()


def test_the_results_are_those_of_an_oracle(suite: Path) -> None:
    lines = {line["key"]: line for line in map(json.loads, (suite / "1.jsonl").read_text().splitlines())}
    expected = expected_metrics(suite / "suite")
    assert lines.keys() == expected.keys()
    for key, metrics in expected.items():
        assert {name: lines[key]["metrics"][name] for name in metrics} == pytest.approx(metrics), key
        assert lines[key]["metrics"]["main_metric"] == pytest.approx(list(metrics.values())[-1]), key
