"""Convert open_clip weights to a directory from which training can start with --pretrained.

    megaclip import /models/laion-vit-b-32 imported/vit-b-32                 # an open_clip directory
    megaclip import epoch_32.pt imported/vit-b-32 --model ViT-B-32           # a bare weights file

writes open_clip_model.safetensors (float32), open_clip_config.json and the tokenizer's files, if the source has any.
Then train with  --model imported/vit-b-32 --pretrained imported/vit-b-32:  tokenizer and image preprocessing (mean,
standard deviation, resizing) are those of the directory. The weights and the model must have the same parameters. If
any parameter is missing, unexpected or has a different shape, the tool lists it, writes nothing and exits with code 1.
OpenAI's weights require a "-quickgelu" model.
"""

import argparse
import sys
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.durable import sync_files
from megaclip.checkpoint.model_card import (
    OPENAI_PREPROCESS,
    check_inside,
    read_model_card,
    remove_earlier_files,
    write_model_card,
)
from megaclip.checkpoint.open_clip_weights import LoadReport, compare_weights, read_weights, write_weights
from megaclip.checkpoint.output import check_output, writing
from megaclip.checkpoint.search import refuse_run
from megaclip.errors import CheckpointError, MegaclipError
from megaclip.models import load_model_config, meta_model
from megaclip.models.config import CARD_NAME

TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
MAX_TOKENIZER_BYTES = 256 << 20


def main() -> None:
    arguments = parse_arguments()
    try:
        report = import_weights(arguments.source, arguments.out_dir, arguments.model, overwrite=arguments.overwrite)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    print(report)
    if not report.complete:
        print_differences(report)
        sys.exit(
            f"error: {arguments.source} does not fit the model, so {arguments.out_dir} was not written; "
            f"{report.advice}, and name it with --model"
        )
    print(f"wrote {arguments.out_dir}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="open_clip directory or weights file")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--model", help="preset or model JSON (default: the model card of SOURCE)")
    parser.add_argument("--overwrite", action="store_true", help="write to OUT_DIR even if it is not empty")
    arguments = parser.parse_args()
    if not arguments.source.exists():
        parser.error(f"{arguments.source} does not exist; expected an open_clip directory or a weights file")
    try:
        refuse_run(arguments.source)
    except CheckpointError as error:
        parser.error(str(error))
    if arguments.model is None and not (arguments.source / CARD_NAME).is_file():
        parser.error(f"{arguments.source} has no {CARD_NAME}; name its model with --model")
    return arguments


def import_weights(source: Path, out_dir: Path, model: str | None, *, overwrite: bool = False) -> LoadReport:
    """Compare the weights of SOURCE with its model, and write OUT_DIR if they fit."""
    check_output(out_dir, source, overwrite=overwrite)
    manifest.require_whole(source)
    config, preprocess = None if model is None else load_model_config(model), OPENAI_PREPROCESS
    if config is None or (source / CARD_NAME).is_file():
        card = read_model_card(source, config)
        config, preprocess = card.config, card.preprocess_cfg
    state_dict = read_weights(source, config)
    report = compare_weights(meta_model(config), state_dict)
    if report.complete:
        files = tokenizer_files(source)
        names = [CARD_NAME, *(path.name for path in files)]
        with writing(out_dir, CheckpointError):
            remove_earlier_files(out_dir, kept=names)
            (out_dir / manifest.MANIFEST).unlink(missing_ok=True)  # removed until it describes the new files
            write_model_card(out_dir, config, preprocess, files)
            names.append(write_weights(out_dir, state_dict, config).name)
            manifest.write(out_dir, sync_files(out_dir, names))
    return report


def tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a directory that may belong to its tokenizer: small files other than the model card and the
    manifest.

    Raises CheckpointError if a link leads out of the directory.
    """
    if not source.is_dir():
        return []
    others = (CARD_NAME, manifest.MANIFEST)
    files = [path for path in source.iterdir() if path.suffix in TOKENIZER_SUFFIXES and path.name not in others]
    for path in files:
        check_inside(path, source)
    return sorted(path for path in files if path.is_file() and path.stat().st_size <= MAX_TOKENIZER_BYTES)


def print_differences(report: LoadReport) -> None:
    for name in report.missing:
        print(f"missing     {name}")
    for name in report.unexpected:
        print(f"unexpected  {name}")
    for name, expected, got in report.mismatched:
        print(f"shape       {name}: the model has {list(expected)}, the file has {list(got)}")
