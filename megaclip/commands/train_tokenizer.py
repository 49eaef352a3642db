"""Train a sentencepiece tokenizer on the captions of a dataset.

    megaclip tokenizer 'shards/{00000..00331}.tar' --vocab-size 16000 --out tokenizer.model

reads the captions of any data that --train-data reads, cleans them as open_clip does, and writes tokenizer.model and
tokenizer.vocab. Train with `--tokenizer tokenizer.model`. Exports contain the tokenizer in the form that open_clip
loads. A unigram vocabulary is smaller than --vocab-size if the captions contain too few pieces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaclip.commands.argument_types import CommandParser, add_reading_flags, integer, reading_flags
from megaclip.logging import format_count

if TYPE_CHECKING:
    from megaclip.data import PairDataset


def read_captions(dataset: PairDataset, limit: int) -> Iterator[str]:
    """Yield the captions of at most `limit` samples, evenly spread over the dataset. Bad samples are skipped."""
    import numpy as np
    from tqdm import tqdm

    from megaclip.data.batch import BadSample

    count = min(limit, len(dataset))
    bad = 0
    for sample_id in tqdm(np.linspace(0, len(dataset) - 1, count).astype(int).tolist(), unit=" captions"):
        try:
            yield from dataset.caption(sample_id).splitlines()
        except BadSample:
            bad += 1
    if bad:
        print(f"skipped {format_count(bad, 'sample')} without a caption", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("data", nargs="+", help="patterns, folders or hf:NAME, as for --train-data")
    add_reading_flags(parser)
    parser.add_argument(
        "--vocab-size", type=integer(1), default=16_000, help="largest number of pieces (default: %(default)s)"
    )
    parser.add_argument(
        "--max-captions",
        type=integer(1),
        default=2_000_000,
        help="largest number of samples to read (default: %(default)s)",
    )
    parser.add_argument("--model-type", choices=("unigram", "bpe"), default="unigram")
    parser.add_argument("--out", type=Path, required=True, help="file to write, ending in .model")
    arguments = parser.parse_args()
    if arguments.out.suffix != ".model":
        parser.error(f"--out is {arguments.out}; use a name that ends in .model")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    from megaclip.checkpoint.output import prepare_file  # torch is imported after the flags are read
    from megaclip.data import check_image_root, open_pairs
    from megaclip.data.sentencepiece_training import train_sentencepiece

    dataset = open_pairs(arguments.data, **reading_flags(arguments))
    check_image_root(arguments.image_root, dataset)
    prepare_file(arguments.out)
    captions = read_captions(dataset, arguments.max_captions)
    tokenizer = train_sentencepiece(
        captions, arguments.out, vocab_size=arguments.vocab_size, model_type=arguments.model_type
    )
    print(f"wrote {arguments.out}: {tokenizer.vocab_size} pieces")
    if tokenizer.vocab_size < arguments.vocab_size:
        print(
            f"the captions give fewer pieces than --vocab-size {arguments.vocab_size}: {tokenizer.vocab_size}; more "
            "captions, or more different words, give more",
            file=sys.stderr,
        )
