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
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.durable import make_folders, sync_files
from megaclip.checkpoint.model_card import ModelCard, read_model_card, remove_earlier_files
from megaclip.checkpoint.open_clip_weights import assigned_model, write_weights
from megaclip.checkpoint.output import check_output, writing
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import MODEL_CARD, locate, require_whole
from megaclip.checkpoint.verify import TOLERANCE, verify
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.errors import CheckpointError, MegaclipError
from megaclip.models.open_clip_keys import StateDict


def main() -> None:
    arguments = parse_arguments()
    try:
        card, weights = export(
            arguments.run, arguments.out_dir, arguments.tag, overwrite=arguments.overwrite, ema=arguments.ema
        )
        print(f"wrote {arguments.out_dir}")
        passed = not arguments.verify or check(card, weights)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    if not passed:
        sys.exit(f"error: open_clip's model of {arguments.out_dir} differs by more than {TOLERANCE:g} or in its tokens")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run (runs/NAME), its checkpoints folder or one checkpoint"
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--tag", help="checkpoint of the run, such as step_00000100 (default: the latest)")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights (ema_decay)")
    parser.add_argument("--overwrite", action="store_true", help="write to OUT_DIR even if it is not empty")
    parser.add_argument("--verify", action="store_true", help="load the export with open_clip and compare")
    return parser.parse_args()


def export(
    source: Path, out_dir: Path, tag: str | None, *, overwrite: bool = False, ema: bool = False
) -> tuple[ModelCard, StateDict]:
    """Write OUT_DIR. Return its model card, and the checkpoint's weights under MegaCLIP's names.

    overwrite: OUT_DIR may hold files; those of the export are replaced. ema: export the moving average of the weights.
    """
    folder, tag = locate(source, tag)
    check_output(out_dir, folder, overwrite=overwrite)
    require_whole(folder, tag)
    manifest.require_whole(folder / MODEL_CARD)
    card = read_model_card(folder / MODEL_CARD)
    weights = consolidated_weights(folder, tag, ema=ema)
    names = [path.name for path in card.directory.iterdir() if path.is_file() and path.name != manifest.MANIFEST]
    with writing(out_dir, CheckpointError):
        make_folders(out_dir)
        remove_earlier_files(out_dir, kept=names)
        (out_dir / manifest.MANIFEST).unlink(missing_ok=True)  # removed until it describes the new files
        for name in names:
            shutil.copyfile(card.directory / name, out_dir / name)
        names.append(write_weights(out_dir, weights, card.config).name)
        manifest.write(out_dir, sync_files(out_dir, names))
    return replace(card, directory=out_dir), weights


def check(card: ModelCard, weights: StateDict) -> bool:
    """Compare the exported directory of `card` with `weights` and print the differences; return True if it passed."""
    tokenizer = choose_tokenizer(None, card, card.config).tokenizer
    result = verify(card.directory, assigned_model(card.config, weights), tokenizer)
    print(f"export_max_abs_diff {result.max_abs_diff:.3g}")
    print(f"export_captions_differing {result.captions_differing} of {result.captions_compared}")
    return result.passed
