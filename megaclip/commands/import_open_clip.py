"""Convert weights of open_clip or transformers to a directory from which training can start with --pretrained.

    megaclip import /models/laion-vit-b-32 imported/vit-b-32                 # an open_clip directory
    megaclip import /models/siglip-base-patch16-224 imported/siglip          # a directory of transformers
    megaclip import epoch_32.pt imported/vit-b-32 --model ViT-B-32           # a bare weights file

writes open_clip_model.safetensors (float32), open_clip_config.json and the tokenizer's files, if the source has any.
Then train with  --model imported/vit-b-32 --pretrained imported/vit-b-32:  tokenizer and image preprocessing (mean,
standard deviation, resizing) are those of the directory. The weights and the model must have the same parameters. If
any parameter is missing, unexpected or has a different shape, the tool lists it, writes nothing and exits with code 1.
OpenAI's weights require a "-quickgelu" model. Of transformers' models CLIPModel, SiglipModel and Siglip2Model (at a
fixed resolution) are read. Settings in config.json that open_clip's towers lack are refused by name.
"""

import argparse
import sys
from pathlib import Path

from megaclip.commands.argument_types import CommandParser


def main() -> None:
    arguments = parse_arguments()
    from megaclip.checkpoint.model_directory import import_weights  # torch is imported after the flags are checked

    report = import_weights(arguments.source, arguments.out_dir, arguments.model, overwrite=arguments.overwrite)
    print(report)
    if not report.complete:
        for name in report.missing:
            print(f"missing     {name}")
        for name in report.unexpected:
            print(f"unexpected  {name}")
        for name, expected, got in report.mismatched:
            print(f"shape       {name}: the model has {list(expected)}, the file has {list(got)}")
        sys.exit(
            f"error: {arguments.source} does not fit the model, so {arguments.out_dir} was not written; {report.advice}"
        )
    print(f"wrote {arguments.out_dir}")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="directory of open_clip or transformers, or file")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--model", help="preset or model JSON (default: the model card of SOURCE)")
    parser.add_argument("--overwrite", action="store_true", help="write to OUT_DIR even if it is not empty")
    return parser.parse_args()
