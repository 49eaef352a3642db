"""Export a training checkpoint as a complete open_clip directory.

    python tools/export_open_clip.py runs/NAME OUT_DIR --verify

writes open_clip_model.safetensors (float32), open_clip_config.json and the tokenizer's files, at any ZeRO stage; then
open_clip.create_model_and_transforms("local-dir:OUT_DIR") and open_clip.get_tokenizer("local-dir:OUT_DIR") load it.
--verify does that with the installed open_clip and compares: it prints export_max_abs_diff (features and log logit
scale) and the captions that are tokenised differently, and exits with 1 when the difference is above 1e-5 or any
caption differs.
"""

import argparse
import shutil
import sys
from pathlib import Path

from megaclip.checkpoint.consolidate import consolidated_weights
from megaclip.checkpoint.open_clip import assigned_model, tokenizer_of, write_weights
from megaclip.checkpoint.store import MODEL_CARD, locate
from megaclip.checkpoint.verify import TOLERANCE, verify
from megaclip.data.tokenizers import load_tokenizer
from megaclip.errors import MegaclipError
from megaclip.models import ModelConfig, load_model_config
from megaclip.models.open_clip_keys import StateDict


def main() -> None:
    arguments = parse_arguments()
    try:
        config, weights = export(arguments.run, arguments.out_dir, arguments.tag)
        print(f"wrote {arguments.out_dir}")
        passed = not arguments.verify or check(arguments.out_dir, config, weights)
    except MegaclipError as error:
        sys.exit(f"error: {error}")
    if not passed:
        sys.exit(f"error: open_clip reads {arguments.out_dir} differently (more than {TOLERANCE:g}, or other tokens).")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run (runs/NAME), its checkpoints or one of them")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    parser.add_argument("--tag", help="which checkpoint of a run, such as step_00000100 (default: the latest)")
    parser.add_argument("--verify", action="store_true", help="load the export with open_clip and compare")
    return parser.parse_args()


def export(source: Path, out_dir: Path, tag: str | None) -> tuple[ModelConfig, StateDict]:
    """Write OUT_DIR; returns the model's description and MegaCLIP's weights, as the checkpoint has them."""
    folder, tag = locate(source, tag)
    card = folder / MODEL_CARD
    config = load_model_config(card)
    weights = consolidated_weights(folder, tag)
    shutil.copytree(card, out_dir, dirs_exist_ok=True)
    write_weights(out_dir, weights, config)
    return config, weights


def check(out_dir: Path, config: ModelConfig, weights: StateDict) -> bool:
    """Print how open_clip's reading of OUT_DIR compares; True when it is equal."""
    tokenizer = load_tokenizer(tokenizer_of(out_dir, config), config.text_cfg.context_length)
    result = verify(out_dir, assigned_model(config, weights), tokenizer)
    print(f"export_max_abs_diff {result.max_abs_diff:.3g}")
    print(f"export_captions_differing {result.captions_differing} of {result.captions_compared}")
    return result.passed


if __name__ == "__main__":
    main()
