"""Decode samples of a dataset and time its loading, for `megaclip inspect`."""

import contextlib
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from megaclip.data.batch import BadSample, RawSample
from megaclip.data.images import CPU_DECODER, ImageTransform, open_image
from megaclip.data.loader import TrainLoader
from megaclip.data.reading import check_caption, decode_image
from megaclip.data.sources import PairDataset
from megaclip.data.tokenizers import Tokenizer
from megaclip.errors import shortened

QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
SHOWN = 3
"""Number of samples that the report shows."""
PICTURES = 48
"""Number of samples on the contact sheet."""
EXIF_ORIENTATION = 0x0112


def describe_dataset(dataset: PairDataset) -> dict[str, Any]:
    """Return counts, sizes and columns of the whole dataset, from its manifest."""
    described = []
    for entry, source in zip(dataset.manifest()["sources"], dataset.sources, strict=True):
        files, columns = entry["files"], source.columns
        sizes = {"files": len(files), "mib": round(sum(size for _, size, _ in files) / 2**20, 1)}
        origin = {"samples": len(source), "images": columns["image"], "captions": columns["caption"]}
        described.append({"type": source.kind, **sizes, **origin, **source.account.problems})
    accounts = [source.account.sum() for source in dataset.sources]
    return {"samples": len(dataset), "datasets": described, "accounts": accounts}


class Look:
    """The samples of a dataset that were decoded: at most `limit`, spread evenly."""

    def __init__(self, dataset: PairDataset, tokenizer: Tokenizer, transform: ImageTransform, limit: int) -> None:
        self._transform = transform
        self._tokenizer = tokenizer
        self._values: dict[str, list[int]] = {
            name: [] for name in ("captions_per_sample", "caption_characters", "tokens", "width", "height", "bytes")
        }
        self.bad: defaultdict[str, list[str]] = defaultdict(list)
        """Kind -> name and problem of every bad sample."""
        self._noted: Counter[str] = Counter({"exif_orientation_ignored": 0, "transparency_dropped": 0})
        self._captions, self._images = set[str](), set[int]()
        self._keys = Counter({str(key): 0 for key, _ in dataset.caption_keys})
        """Number of usable samples that have each of several keys of --caption-key."""
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
                pixels = decode_image(self._transform, raw)
            except BadSample as error:
                self.bad[error.kind].append(error.detail)
                continue
            usable.append(self._measure(raw))
            if place * PICTURES // len(ids) >= len(self.pictures):
                self.pictures.append((raw.caption, Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        places = sorted({round(place * (len(usable) - 1) / (SHOWN - 1)) for place in range(SHOWN)}) if usable else []
        self.shown = [usable[place] for place in places]

    def _measure(self, raw: RawSample) -> dict[str, Any]:
        """Record the figures of a sample. Return them for the report, with the tokens of its longest caption."""
        image = open_image(raw.image)
        captions = raw.captions.texts
        is_end = self._tokenizer(captions) == self._tokenizer.eos_id
        token_counts = (is_end.int().argmax(dim=1) + 1).tolist()
        sizes = ([image.width], [image.height], [len(raw.image)])
        measured = ([len(captions)], map(len, captions), token_counts, *sizes)
        for name, values in zip(self._values, measured, strict=True):
            self._values[name] += values
        self._captions.update(captions)
        self._keys.update(key.name for key, _ in raw.captions.shares)
        self._images.add(hash(raw.image))
        with contextlib.suppress(Exception):  # damaged EXIF data raises almost anything, and is ignored in training
            self._noted["exif_orientation_ignored"] += image.getexif().get(EXIF_ORIENTATION, 1) != 1
        self._noted["transparency_dropped"] += image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
        shown = {"caption": shortened(raw.caption), "width": image.width, "height": image.height}
        return {**shown, "format": image.format, "tokens": max(token_counts), "sample": raw.key}

    def report(self) -> dict[str, Any]:
        """Return caption lengths, image sizes, and bad samples by kind."""
        truncated = sum(count >= self._tokenizer.context_length for count in self._values["tokens"])
        return {
            "looked_at": self._looked_at,
            "bad": {kind: len(details) for kind, details in self.bad.items()},
            "bad_examples": {kind: details[0] for kind, details in self.bad.items()},
            "distinct_images": len(self._images),
            "distinct_captions": len(self._captions),
            **({"samples_with_caption_key": dict(self._keys)} if self._keys else {}),
            "captions_that_fill_the_context": truncated,
            **self._noted,
            **{name: _quantiles(numbers) for name, numbers in self._values.items() if numbers},
        }

    def reason_to_refuse(self, limit: float) -> str:
        """Return the reason why training would refuse the data, or "". limit: --max-bad-fraction."""
        count = sum(map(len, self.bad.values()))
        if count <= limit * self._looked_at:
            return ""
        kinds = ", ".join(f"{len(details)} {kind}" for kind, details in self.bad.items())
        return f"{count} of the {self._looked_at} decoded samples are bad ({kinds}), over --max-bad-fraction {limit:g}"


def _quantiles(numbers: list[int]) -> dict[str, float]:
    return {name: round(float(np.quantile(numbers, share)), 1) for name, share in QUANTILES.items()}


def time_loader(
    dataset: PairDataset, tokenizer: Tokenizer, transform: ImageTransform, seconds: float
) -> dict[str, Any]:
    """Return the samples per second of the training loader in this process, so on one core, and the decoder."""
    size = min(64, len(dataset))
    loader = TrainLoader(dataset, transform, tokenizer, micro_batch_size=size, max_bad_fraction=1.0)
    next(loader)
    began, samples, elapsed = time.perf_counter(), 0, 0.0
    while not samples or elapsed < seconds:
        samples += len(next(loader).tokens)
        elapsed = time.perf_counter() - began
    rate = round(samples / elapsed, 1)
    return {"samples_per_s_per_core": rate, "image_size": transform.size, "decoder": CPU_DECODER}
