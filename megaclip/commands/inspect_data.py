"""Report the contents, the problems and the loading speed of a dataset.

    megaclip inspect 'shards/{00000..00331}.tar' --tokenizer tokenizer.model
    megaclip inspect 'shards/*.tar' --model ViT-L-14-336 --pictures sheet.png    # draws samples as the model sees them
    megaclip inspect hf:nlphuji/flickr30k:test --json

The command opens the data as --train-data does, decodes evenly spread samples, shows three of them, and measures the
speed of the training loader on one core. The exit code is 1 if training would refuse the data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from megaclip.commands.argument_types import integer, number
from megaclip.config import TrainArguments
from megaclip.data import DATASET_TYPES, ImageTransform, PairDataset, Tokenizer, TrainLoader, load_tokenizer, open_pairs
from megaclip.data.batch import BadSample, RawSample
from megaclip.data.images import open_image
from megaclip.data.reading import MIN_SAMPLES_FOR_LIMIT, check_caption, decode_image
from megaclip.engine.inputs import model_preprocessing
from megaclip.errors import ConfigError, DataError, MegaclipError, shortened
from megaclip.evaluation.pictures import contact_sheet

QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
SHOWN = 3
"""Number of samples that the report shows."""
PICTURES = 48
"""Number of samples on the contact sheet."""
EXIF_ORIENTATION = 0x0112
CONTEXT_LENGTH, IMAGE_SIZE = 77, 224
"""Tokens and pixels without --model."""


def describe_dataset(dataset: PairDataset) -> dict[str, Any]:
    """Return counts, sizes and columns of the whole dataset, from its manifest."""
    sources = []
    for source, columns in zip(dataset.manifest()["sources"], dataset.columns, strict=True):
        files = source["files"]
        sizes = {"files": len(files), "mib": round(sum(size for _, size, _ in files) / 2**20, 1)}
        samples = sum(samples for _, _, samples in files)
        origin = {"images": columns["image"], "captions": columns["caption"]}
        sources.append({"type": source["type"], **sizes, "samples": samples, **origin})
    return {"samples": len(dataset), "datasets": sources, "problems": dataset.problems}


class Look:
    """The samples of a dataset that were decoded: at most `limit`, spread evenly."""

    def __init__(self, dataset: PairDataset, tokenizer: Tokenizer, transform: ImageTransform, limit: int) -> None:
        self._transform = transform
        self._tokenizer = tokenizer
        self._values: dict[str, list[int]] = {
            name: [] for name in ("caption_characters", "tokens", "width", "height", "bytes")
        }
        self._bad: Counter[str] = Counter()
        self._bad_examples: dict[str, str] = {}
        self._noted: Counter[str] = Counter({"exif_orientation_ignored": 0, "transparency_dropped": 0})
        self._captions: set[str] = set()
        self.shown: list[dict[str, Any]] = []
        """The first, a middle and the last sample that can be used."""
        self.pictures: list[tuple[str, Image.Image]] = []
        """Captions, and pixels as the evaluation transform gives them, for the contact sheet."""
        ids = np.linspace(0, len(dataset) - 1, min(limit, len(dataset))).astype(int).tolist()
        self._looked_at = len(ids)
        usable = []
        for place, sample_id in enumerate(tqdm(ids, unit=" samples")):
            try:
                raw = dataset.read(sample_id)
                check_caption(raw)
                pixels = decode_image(self._transform, raw, (0, 0, 0))
            except BadSample as error:
                self._bad[error.kind] += 1
                self._bad_examples.setdefault(error.kind, f"{error.detail} in {dataset.shard_name(sample_id)}")
                continue
            usable.append(self._measure(raw))
            if place * PICTURES // len(ids) >= len(self.pictures):
                self.pictures.append((raw.caption, Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        places = sorted({round(place * (len(usable) - 1) / (SHOWN - 1)) for place in range(SHOWN)}) if usable else []
        self.shown = [usable[place] for place in places]

    def _measure(self, raw: RawSample) -> dict[str, Any]:
        """Record the figures of a sample. Return them for the report, with the tokens of its longest caption."""
        image = open_image(raw.image)
        captions = raw.alternatives or (raw.caption,)  # training takes one of several captions at a time
        is_end = self._tokenizer(captions) == self._tokenizer.eos_id
        token_counts = (is_end.int().argmax(dim=1) + 1).tolist()
        measured = (map(len, captions), token_counts, [image.width], [image.height], [len(raw.image)])
        for name, values in zip(self._values, measured, strict=True):
            self._values[name] += values
        self._captions.update(captions)
        with contextlib.suppress(Exception):  # damaged EXIF data raises almost anything, and is ignored in training
            self._noted["exif_orientation_ignored"] += image.getexif().get(EXIF_ORIENTATION, 1) != 1
        self._noted["transparency_dropped"] += image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
        shown = {"caption": shortened(raw.caption), "width": image.width, "height": image.height}
        return {**shown, "format": image.format, "tokens": max(token_counts), "sample": raw.key}

    @property
    def bad_fraction(self) -> float:
        """Fraction of bad samples."""
        return self._bad.total() / max(1, self._looked_at)

    def report(self) -> dict[str, Any]:
        """Return caption lengths, image sizes, and bad samples by kind."""
        truncated = sum(count >= self._tokenizer.context_length for count in self._values["tokens"])
        return {
            "looked_at": self._looked_at,
            "bad": dict(self._bad),
            "bad_fraction": round(self.bad_fraction, 4),
            "bad_examples": self._bad_examples,
            "distinct_captions": len(self._captions),
            "captions_that_fill_the_context": truncated,
            **self._noted,
            **{name: _quantiles(numbers) for name, numbers in self._values.items() if numbers},
        }

    def reason_to_refuse(self, limit: float) -> str:
        """Return the reason why training would refuse the data, or "". limit: --max-bad-fraction."""
        if self.bad_fraction <= limit:
            return ""
        return (
            f"{self._bad.total()} of the {self._looked_at} decoded samples are bad; a run stops above "
            f"--max-bad-fraction {limit:g}, after more than {limit * MIN_SAMPLES_FOR_LIMIT:g} bad samples"
        )


def _quantiles(numbers: list[int]) -> dict[str, float]:
    return {name: round(float(np.quantile(numbers, share)), 1) for name, share in QUANTILES.items()}


def time_loader(
    dataset: PairDataset, tokenizer: Tokenizer, transform: ImageTransform, seconds: float
) -> dict[str, float]:
    """Return the samples per second of the training loader in this process, so on one core.

    transform: the image transform of training.
    """
    size = min(64, len(dataset))
    loader = TrainLoader(dataset, transform, tokenizer, micro_batch_size=size, max_bad_fraction=1.0)
    next(loader)
    began, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        samples += len(next(loader).tokens)
    return {"samples_per_s_per_core": round(samples / elapsed, 1), "image_size": transform.size}


def print_report(report: dict[str, Any]) -> None:
    """Print the report. Dictionaries of numbers and text take one line each."""
    for name, value in report.items():
        label = name.replace("_", " ")
        if isinstance(value, list):
            for index, entry in enumerate(value):
                print(f"{label} {index}: {_on_one_line(entry)}")
        elif name == "problems" and not value:
            pass  # problems of the files; those of the samples follow
        elif name == "sample":
            print(f"{label}:")
            for part, content in value.items():
                print(f"  {part.replace('_', ' ')}: {_on_one_line(content)}")
        else:
            print(f"{label}: {_on_one_line(value)}")


def _on_one_line(value: Any) -> str:
    if isinstance(value, dict):
        parts = (f"{key} {content!r}" if key == "caption" else f"{key} {content}" for key, content in value.items())
        return ", ".join(parts) if value else "none"
    return str(value)


def parse_arguments() -> argparse.Namespace:
    limit = TrainArguments.model_fields["max_bad_fraction"].default
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="patterns, folders or hf:NAME, as for --train-data")
    parser.add_argument("--dataset-type", choices=DATASET_TYPES, default="auto")
    parser.add_argument("--image-key", help="column of the images, or their extension in tar shards and folders")
    parser.add_argument("--caption-key", help="column, extension or JSON field of the captions")
    parser.add_argument("--model", help="as in training: its tokenizer, context length and pixels (default: OpenAI's)")
    parser.add_argument("--tokenizer", help="'clip', a sentencepiece .model file or a Hugging Face tokenizer's folder")
    parser.add_argument("--context-length", type=integer(2), help="tokens (default: the model's, or 77)")
    parser.add_argument(
        "--image-size", type=integer(1), help="width and height in pixels (default: the model's, or 224)"
    )
    parser.add_argument(
        "--samples", type=integer(0), default=1000, help="number of samples to decode (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=number(0), default=3.0, help="seconds to time the loader for (default: %(default)s)"
    )
    parser.add_argument(
        "--max-bad-fraction", type=number(0), default=limit, help="as in training (default: %(default)s)"
    )
    parser.add_argument("--pictures", metavar="FILE.png", help=f"draw {PICTURES} samples as the model sees them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        tokenizer, pixels = _preprocessing(arguments)
        dataset = open_pairs(
            arguments.data,
            dataset_type=arguments.dataset_type,
            image_key=arguments.image_key,
            caption_key=arguments.caption_key,
        )
        look = Look(dataset, tokenizer, ImageTransform(**pixels), arguments.samples)
        report = {**describe_dataset(dataset), "sample": look.report(), "shown": look.shown}
        refused = look.reason_to_refuse(arguments.max_bad_fraction)
        try:
            report["loader"] = time_loader(
                dataset, tokenizer, ImageTransform(**pixels, training=True), arguments.seconds
            )
        except DataError as error:
            report["loader"] = {"failed": str(error)}
            refused = refused or str(error)
        report["refused"] = refused or None
        if arguments.pictures:
            draw_pictures(look, len(dataset), arguments.pictures)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        del report["refused"]
        print_report(report)
        print(f"training would REFUSE this data: {refused}" if refused else "training would accept this data")
    return 1 if refused else 0


def _preprocessing(arguments: argparse.Namespace) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the arguments of `ImageTransform`: from the flags, else from the model, else CLIP's."""
    if arguments.model is None:
        tokenizer = load_tokenizer(arguments.tokenizer or "clip", arguments.context_length or CONTEXT_LENGTH)
        return tokenizer, {"size": arguments.image_size or IMAGE_SIZE}
    for flag in ("context_length", "image_size"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} contradicts --model, which sets it; leave one of them out")
    return model_preprocessing(arguments.model, arguments.tokenizer)


def draw_pictures(look: Look, samples: int, path: str) -> None:
    """Write the contact sheet. Raises ConfigError if the file cannot be written."""
    sheet = contact_sheet(f"{len(look.pictures)} of {samples:,} samples, as the model sees them", look.pictures)
    try:
        Image.fromarray(sheet.transpose(1, 2, 0)).save(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--pictures {path!r} cannot be written ({error}); use a name such as sheet.png") from None
