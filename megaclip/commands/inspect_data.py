"""Report the contents, the problems and the loading speed of a dataset.

    megaclip inspect 'shards/{00000..00331}.tar' --tokenizer tokenizer.model
    megaclip inspect hf:nlphuji/flickr30k:test --json

opens the data as --train-data does, decodes evenly spread samples of it, and times the training loader on one core.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from megaclip.config import TrainArguments
from megaclip.data import DATASET_TYPES, ImageTransform, PairDataset, Tokenizer, TrainLoader, load_tokenizer, open_pairs
from megaclip.data.batch import BadSample
from megaclip.data.reading import check_caption, decode_image
from megaclip.errors import MegaclipError

QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}


def describe_dataset(dataset: PairDataset) -> dict[str, Any]:
    """Return counts and sizes of the whole dataset, from its manifest."""
    sources = []
    for source in dataset.manifest()["sources"]:
        files = source["files"]
        sizes = {"files": len(files), "mib": round(sum(size for _, size, _ in files) / 2**20, 1)}
        sources.append({"type": source["type"], **sizes, "samples": sum(samples for _, _, samples in files)})
    return {"samples": len(dataset), "datasets": sources, "problems": dataset.problems}


def describe_samples(dataset: PairDataset, tokenizer: Tokenizer, image_size: int, limit: int) -> dict[str, Any]:
    """Return caption lengths, image sizes and bad samples of at most `limit` samples, spread evenly."""
    transform = ImageTransform(image_size)
    values: dict[str, list[int]] = {name: [] for name in ("caption_characters", "tokens", "width", "height", "bytes")}
    bad: Counter[str] = Counter()
    examples: dict[str, str] = {}
    captions = set()
    ids = np.linspace(0, len(dataset) - 1, min(limit, len(dataset))).astype(int).tolist()
    for sample_id in tqdm(ids, unit=" samples"):
        try:
            raw = dataset.read(sample_id)
            check_caption(raw)
            decode_image(transform, raw, (0, 0, 0))
        except BadSample as error:
            bad[error.kind] += 1
            examples.setdefault(error.kind, f"{error.detail} in {dataset.shard_name(sample_id)}")
            continue
        width, height = Image.open(io.BytesIO(raw.image)).size
        token_count = int((tokenizer([raw.caption]) == tokenizer.eos_id).int().argmax()) + 1
        measured = (len(raw.caption), token_count, width, height, len(raw.image))
        for name, value in zip(values, measured, strict=True):
            values[name].append(value)
        captions.add(raw.caption)
    truncated = sum(count >= tokenizer.context_length for count in values["tokens"])
    return {
        "looked_at": len(ids),
        "bad": dict(bad),
        "bad_fraction": round(bad.total() / max(1, len(ids)), 4),
        "bad_examples": examples,
        "distinct_captions": len(captions),
        "captions_that_fill_the_context": truncated,
        **{name: _quantiles(numbers) for name, numbers in values.items() if numbers},
    }


def _quantiles(numbers: list[int]) -> dict[str, float]:
    return {name: round(float(np.quantile(numbers, share)), 1) for name, share in QUANTILES.items()}


def time_loader(dataset: PairDataset, tokenizer: Tokenizer, image_size: int, seconds: float) -> dict[str, float]:
    """Return the samples per second of the training loader in this process, that is on one core."""
    size = min(64, len(dataset))
    transform = ImageTransform(image_size, training=True)
    loader = TrainLoader(dataset, transform, tokenizer, micro_batch_size=size, max_bad_fraction=1.0)
    next(loader)
    began, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        samples += len(next(loader).tokens)
    return {"samples_per_s_per_core": round(samples / elapsed, 1), "image_size": image_size}


def print_report(report: dict[str, Any], indent: str = "") -> None:
    for name, value in report.items():
        label = name.replace("_", " ")
        if isinstance(value, dict) and value and all(not isinstance(v, dict | list) for v in value.values()):
            print(f"{indent}{label}: " + ", ".join(f"{key} {content}" for key, content in value.items()))
        elif isinstance(value, dict):
            print(f"{indent}{label}: {'' if value else 'none'}")
            print_report(value, indent + "  ")
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                print(f"{indent}{label} {number}: " + ", ".join(f"{key} {content}" for key, content in entry.items()))
        else:
            print(f"{indent}{label}: {value}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="patterns, folders or hf:NAME, as for --train-data")
    parser.add_argument("--dataset-type", choices=DATASET_TYPES, default="auto")
    parser.add_argument("--image-key", help="column of the images, or their extension in tar shards")
    parser.add_argument("--caption-key", help="column of the captions, or their extension in tar shards")
    parser.add_argument("--tokenizer", default="clip", help="'clip' or a sentencepiece .model file")
    parser.add_argument("--context-length", type=int, default=77)
    parser.add_argument("--image-size", type=int, default=224, help="width and height in pixels (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1000, help="number of samples to decode (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds to time the loader for (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        tokenizer = load_tokenizer(arguments.tokenizer, arguments.context_length)
        dataset = open_pairs(
            arguments.data,
            dataset_type=arguments.dataset_type,
            image_key=arguments.image_key,
            caption_key=arguments.caption_key,
        )
        report = describe_dataset(dataset)
        report["sample"] = describe_samples(dataset, tokenizer, arguments.image_size, arguments.samples)
        report["loader"] = time_loader(dataset, tokenizer, arguments.image_size, arguments.seconds)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
        limit = TrainArguments.model_fields["max_bad_fraction"].default
        if report["sample"]["bad_fraction"] > limit:
            print(f"too many samples are bad for training: a run stops above --max-bad-fraction {limit}")
