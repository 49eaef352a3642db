"""Export a training checkpoint as a complete open_clip directory.

    megaclip export runs/NAME OUT_DIR --verify

writes open_clip_model.safetensors (float32), open_clip_config.json, the tokenizer's files and a manifest of their
checksums, at any ZeRO stage. open_clip.create_model_and_transforms("local-dir:OUT_DIR") and
open_clip.get_tokenizer("local-dir:OUT_DIR") load the directory. Every file of the checkpoint is checked first.
--verify loads OUT_DIR with the installed open_clip and compares. It prints export_max_abs_diff (of features and of the
log logit scale) and the number of captions whose tokens differ. The exit code is 1 if the difference is above 1e-5 or
any caption differs.
"""

import argparse
import sys
from pathlib import Path

from megaclip.commands.argument_types import CommandParser


def main() -> None:
    arguments = parse_arguments()
    from megaclip.checkpoint.open_clip_directory import export_checkpoint  # torch is imported after the flags are read
    from megaclip.checkpoint.open_clip_weights import assigned_model
    from megaclip.checkpoint.verify import TOLERANCE, verify
    from megaclip.engine.tokenizer_choice import choose_tokenizer

    card, weights = export_checkpoint(
        arguments.run, arguments.out_dir, arguments.tag, overwrite=arguments.overwrite, ema=arguments.ema
    )
    print(f"wrote {arguments.out_dir}")
    if not arguments.verify:
        return
    tokenizer = choose_tokenizer(None, card, card.config).tokenizer
    result = verify(card.directory, assigned_model(card.config, weights), tokenizer)
    print(f"export_max_abs_diff {result.max_abs_diff:.3g}")
    print(f"export_captions_differing {result.captions_differing} of {result.captions_compared}")
    if not result.passed:
        sys.exit(f"error: open_clip's model of {arguments.out_dir} differs by more than {TOLERANCE:g} or in its tokens")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run (runs/NAME), its checkpoints folder or one checkpoint"
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--tag", help="checkpoint of the run, such as step_00000100 (default: the latest)")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights (ema_decay)")
    parser.add_argument("--overwrite", action="store_true", help="write to OUT_DIR even if it is not empty")
    parser.add_argument("--verify", action="store_true", help="load the export with open_clip and compare")
    return parser.parse_args()
