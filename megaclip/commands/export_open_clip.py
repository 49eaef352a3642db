"""Export a training checkpoint, or an imported model, as a directory of open_clip, of transformers or of both.

    megaclip export runs/NAME OUT_DIR --verify
    megaclip export runs/NAME OUT_DIR --format both --verify --push-to-hub USER/MODEL

writes at any ZeRO stage:

- open_clip: open_clip_model.safetensors (float32) and open_clip_config.json.
  open_clip.create_model_and_transforms("local-dir:OUT_DIR") and open_clip.get_tokenizer("local-dir:OUT_DIR") load them.
- transformers: model.safetensors (float32, in parts of 5 GB), config.json and preprocessor_config.json.
  AutoModel.from_pretrained("OUT_DIR") and AutoProcessor.from_pretrained("OUT_DIR") load them.
- peft: the adapters of a run with megaclip.lora, adapter_model.safetensors and adapter_config.json. On the model of
  transformers that the run started from, peft.PeftModel.from_pretrained(model, "OUT_DIR") loads them.
- both: the tokenizer's files, README.md with the settings of the training, and a manifest of checksums.

A model that a format cannot express is refused before anything is written. Every file of the checkpoint is checked
first. --verify loads OUT_DIR with the libraries and compares. It prints export_max_abs_diff (of features, pixels of the
image processor and the log logit scale) and the number of captions whose tokens differ, for each library. The exit code
is 1 if a difference is above 1e-5 or any caption differs. --push-to-hub uploads OUT_DIR to a private repository of the
Hugging Face hub, with the token of `hf auth login` or HF_TOKEN.
"""

import argparse
import sys
from pathlib import Path

from megaclip.commands.argument_types import CommandParser
from megaclip.errors import CheckpointError, ConfigError, first_line


def main() -> None:
    arguments = parse_arguments()
    from megaclip.checkpoint.model_directory import export_checkpoint  # torch is imported after the flags are read
    from megaclip.checkpoint.open_clip_weights import assigned_model
    from megaclip.checkpoint.peft_folder import export_adapters
    from megaclip.checkpoint.verify import CAPTIONS, TOLERANCE, verify
    from megaclip.data import ImageTransform
    from megaclip.data.tokenizers import clean_caption
    from megaclip.engine.transformers_tokenizer import tokenizer_beside, write_transformers_tokenizer

    options = {"overwrite": arguments.overwrite, "ema": arguments.ema}
    if arguments.format == "peft":
        if arguments.verify or arguments.with_data_names:
            raise ConfigError("--verify and --with-data-names cannot be used with --format peft; leave them out")
        scalars = export_adapters(arguments.run, arguments.out_dir, arguments.tag, **options)
        values = ", ".join(f"{name} {value.item():.6g}" for name, value in scalars.items())
        print(f"wrote the adapters to {arguments.out_dir}, without {values}")
        if arguments.push_to_hub is not None:
            push_to_hub(arguments.out_dir, arguments.push_to_hub)
        return
    formats = ["open_clip", "transformers"] if arguments.format == "both" else [arguments.format]
    options |= {"formats": formats, "data_names": arguments.with_data_names}
    card, weights = export_checkpoint(
        arguments.run, arguments.out_dir, arguments.tag, write_tokenizer=write_transformers_tokenizer, **options
    )
    print(f"wrote {arguments.out_dir}")
    if arguments.verify:
        model, tokenizer = assigned_model(card.config, weights), tokenizer_beside(card)
        transform = ImageTransform(card.config.vision_cfg.image_size, **card.pixel_settings)
        failed = []
        for library in formats:
            result = verify(
                card.directory,
                model,
                tokenizer,
                library=library,
                captions=CAPTIONS if library == "open_clip" else [clean_caption(caption) for caption in CAPTIONS],
                pixels=lambda file: transform.normalise(transform(file)[None])[0],
            )
            label = f" {library}" if len(formats) > 1 else ""
            print(f"export_max_abs_diff{label} {result.max_abs_diff:.3g}")
            print(f"export_captions_differing{label} {result.captions_differing} of {result.captions_compared}")
            if not result.passed:
                failed.append(library)
        if failed:
            sys.exit(
                f"error: the model of {arguments.out_dir} in {' and '.join(failed)} differs by more than "
                f"{TOLERANCE:g} or in its tokens"
            )
    if arguments.push_to_hub is not None:
        push_to_hub(arguments.out_dir, arguments.push_to_hub)


def push_to_hub(directory: Path, name: str) -> None:
    """Upload a directory to a repository of the Hugging Face hub, which is created as private if it does not exist."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        url = api.upload_folder(repo_id=name, folder_path=directory)
    except Exception as error:  # of the network, of the hub and of its client
        raise CheckpointError(
            f"--push-to-hub {name}: {first_line(error)}; {directory} is complete: run  hf auth login,  and  hf upload "
            f"{name} {directory}"
        ) from None
    print(f"uploaded to {url}")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run (runs/NAME), its checkpoints folder, one checkpoint, or a model"
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write")
    formats = ["open_clip", "transformers", "both", "peft"]
    parser.add_argument("--format", choices=formats, default="open_clip", help="libraries that can load OUT_DIR")
    parser.add_argument("--tag", help="checkpoint of the run, such as step_00000100 (default: the latest)")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights (ema_decay)")
    parser.add_argument("--overwrite", action="store_true", help="write to OUT_DIR even if it is not empty")
    parser.add_argument("--verify", action="store_true", help="load the export with its libraries and compare")
    parser.add_argument("--with-data-names", action="store_true", help="name the training data in README.md")
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload OUT_DIR to this repository, as USER/MODEL")
    return parser.parse_args()
