"""Write a suite of small sets of all kinds, in the layouts of their publishers, without any code of megaclip.

Images are random colours. Two images of every set are equal.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np

from tests.unit.data.data_samples import picture, write_tar

CLASSES = ["red", "green sea", "blue", "black", "white", "pink", "grey"]
TEMPLATES = ["a photo of a {c}.", "{c}"]
COUNT = 23
GROUPED = {
    "wds_wilds-fmow_test": ["region", "year", "y"],
    "wds_dollar_street_test": ["income_ds", "income_meta", "region"],
    "wds_geode_test": ["region", "country"],
}


def image(number: int) -> bytes:
    return picture(max(1, number), 30, 26)  # 0 and 1 are equal


def npy(values: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


def write_classes(folder: Path, samples: list[dict[str, bytes]], shards: int = 1, kind: str = "") -> None:
    """Write tar shards as CLIP_benchmark writes them. samples: members by extension."""
    for shard in range(shards):
        rows = range(shard, len(samples), shards)
        members = [(f"s{row:07d}.{end}", content) for row in rows for end, content in samples[row].items()]
        write_tar(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    if kind:
        (folder / "dataset_type.txt").write_text(f"{kind}\n")
    if kind != "retrieval":
        (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")


def write_suite(folder: Path) -> None:
    """Write fourteen tasks."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 5, size=COUNT).tolist()  # two classes have no images
    plain = [{"png": image(row), "cls": str(label).encode()} for row, label in enumerate(labels)]
    write_classes(folder / "wds_cars_test", plain)
    write_classes(folder / "wds_vtab-pets_test", plain, shards=3)
    write_classes(folder / "wds_wilds-iwildcam_test", plain)
    write_classes(folder / "own_numbers", [{"png": image(row), "npy": npy(label)} for row, label in enumerate(labels)])
    for name, fields in GROUPED.items():
        facts = generator.integers(0, 3, size=(COUNT, len(fields)))
        write_classes(folder / name, [{**own, "npy": npy(row)} for own, row in zip(plain, facts, strict=True)])
    several = generator.random((COUNT, len(CLASSES))) < 0.4
    samples = [{"png": image(row), "npy": npy(own.astype(np.float32))} for row, own in enumerate(several)]
    write_classes(folder / "wds_voc2007_multilabel_test", samples, kind="multilabel")
    captions = [f"view {row}\nthe other view {row}".encode() for row in range(1, COUNT)]
    pairs = [{"png": image(row + 1), "txt": text} for row, text in enumerate(captions)]
    write_classes(folder / "wds_flickr30k_test", pairs, kind="retrieval")
    for row, label in enumerate(labels):
        place = folder / "own_folders" / CLASSES[label] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image(row))
    for name in ("winoground", "winogavil", "xm3600", "sugar_crepe"):
        place = folder / name / ("val2017" if name == "sugar_crepe" else "images")
        place.mkdir(parents=True)
        for row in range(COUNT):
            (place / f"{row}.png").write_bytes(image(row))
    examples = [
        {f"{what}_{side}": f"{text}{2 * row + side}" for side in (0, 1) for what, text in NAMES.items()}
        for row in range(11)
    ]
    (folder / "winoground" / "examples.jsonl").write_text("\n".join(map(json.dumps, examples)))
    crepe = {
        str(row): {"filename": f"{row}.png", "caption": f"a {row}", "negative_caption": f"b {row}"}
        for row in range(COUNT)
    }
    for part in ("add_att", "swap_obj"):
        (folder / "sugar_crepe" / f"{part}.json").write_text(json.dumps(crepe))
    with (folder / "winogavil" / "winogavil_dataset.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "candidates", "cue", "associations"])
        for row in range(9):
            chosen = [str(name) for name in generator.choice(COUNT, 10 if row % 2 else 5, replace=False)]
            writer.writerow(
                [row, json.dumps(chosen), f"{'cue' if row % 2 else 'Old'} {row}", json.dumps(chosen[: 2 + row % 3])]
            )
    rows = [
        {"image/key": str(row), "image/locale": "en", **{la: {"caption": [f"{la} {row}", "-"]} for la in ("de", "en")}}
        for row in range(1, COUNT)
    ]
    (folder / "xm3600" / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))


NAMES = {"image": "", "caption": "what is "}
