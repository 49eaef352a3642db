"""Turn open_clip weights into a directory that training starts from with --pretrained.

    python tools/import_open_clip.py /models/laion-vit-b-32 imported/vit-b-32                 # an open_clip directory
    python tools/import_open_clip.py epoch_32.pt imported/vit-b-32 --model ViT-B-32           # a bare weights file

writes open_clip_model.safetensors (float32), open_clip_config.json and the tokenizer's files, if the source has any;
then train with  --model imported/vit-b-32 --pretrained imported/vit-b-32:  tokenizer and pixels (mean, deviation, how
to resize) are those of the directory. Every parameter must find its counterpart: what is missing, unexpected or of
another shape is listed, nothing is written, and the exit code is 1. OpenAI's weights need a "-quickgelu" model.
"""

import argparse
import sys
from pathlib import Path

from megaclip.checkpoint.open_clip import (
    OPENAI_PREPROCESS,
    LoadReport,
    compare_weights,
    meta_model,
    read_preprocess,
    read_weights,
    write_model_card,
    write_weights,
)
from megaclip.errors import MegaclipError
from megaclip.models import load_model_config
from megaclip.models.config import CARD_NAME

TOKENIZER_SUFFIXES = (".json", ".txt", ".model")


def main() -> None:
    arguments = parse_arguments()
    try:
        report = import_weights(arguments.source, arguments.out_dir, arguments.model)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    print(report)
    if not report.complete:
        print_differences(report)
        sys.exit(f"error: {arguments.source} is not this model; {arguments.out_dir} was not written.")
    print(f"wrote {arguments.out_dir}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="open_clip directory, or a weights file")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--model", help="preset or model JSON; needed when SOURCE has no model card")
    arguments = parser.parse_args()
    if arguments.model is None and not (arguments.source / CARD_NAME).is_file():
        parser.error(f"{arguments.source} has no {CARD_NAME}: say which model it is with --model")
    return arguments


def import_weights(source: Path, out_dir: Path, model: str | None) -> LoadReport:
    """Check SOURCE against its model and, if all of it fits, write OUT_DIR."""
    has_card = (source / CARD_NAME).is_file()
    config = load_model_config(model or source)
    state_dict = read_weights(source)
    report = compare_weights(meta_model(config), state_dict)
    if report.complete:
        preprocess = read_preprocess(source) if has_card else OPENAI_PREPROCESS
        write_model_card(out_dir, config, preprocess, tokenizer_files(source))
        write_weights(out_dir, state_dict, config)
    return report


def tokenizer_files(source: Path) -> list[Path]:
    """Small files beside the weights that are not the card: the tokenizer's."""
    if not source.is_dir():
        return []
    return sorted(path for path in source.iterdir() if path.suffix in TOKENIZER_SUFFIXES and path.name != CARD_NAME)


def print_differences(report: LoadReport) -> None:
    for name in report.missing:
        print(f"missing     {name}")
    for name in report.unexpected:
        print(f"unexpected  {name}")
    for name, expected, got in report.mismatched:
        print(f"shape       {name}: the model has {list(expected)}, the file {list(got)}")


if __name__ == "__main__":
    main()
