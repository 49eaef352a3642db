"""List every model description of the installed open_clip, with the towers that run it or the reason why it is refused.

    megaclip models                      # all, as the table of `megaclip show models`
    megaclip models RN50 ViT-B-32        # some

The last column is transformers' class to which `megaclip export --format transformers` exports the model, or the
setting that no class has.

A model is listed as running if its towers can be built and run a forward and a backward pass on the meta device, where
tensors have shapes but no values.
"""

import logging
from importlib import metadata

from megaclip.commands.argument_types import CommandParser
from megaclip.errors import ConfigError, MegaclipError

HEADER = (
    "| model | towers | parameters, M | text length | tokenizer | export to transformers |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)
OWN, OPEN_CLIP = "MegaCLIP", "open_clip"


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all of open_clip's)")
    arguments = parser.parse_args()
    from megaclip.models.descriptions import model_file  # torch is imported after the flags are read
    from megaclip.models.open_clip_config import open_clip_descriptions

    logging.disable(logging.WARNING)  # open_clip and timm log what they build
    names = arguments.names or list(open_clip_descriptions())
    if not names:
        raise ConfigError("open_clip is not installed; run  pip install 'megaclip[open-clip]'")
    for name in names:
        model_file(name)
    print(table(names), end="")


def table(names: list[str]) -> str:
    """Return the table of these models in Markdown, below a line that counts them. Show a bar, if there are several."""
    from tqdm import tqdm

    from megaclip.models.open_clip_config import open_clip_descriptions

    rows = [row(name) for name in tqdm(names, unit=" models", disable=len(names) == 1)]
    running = {towers: sum(f"| {towers} |" in line for line in rows) for towers in (OWN, OPEN_CLIP)}
    source = f" of open_clip {metadata.version('open_clip_torch')}" if open_clip_descriptions() else ""
    counts = (
        f"{sum(running.values())} of the {len(names)} descriptions{source} run: {running[OWN]} with MegaCLIP's own "
        f"towers, {running[OPEN_CLIP]} with open_clip's.\n\n"
    )
    return counts + HEADER + "".join(rows)


def row(name: str) -> str:
    """Return a model's row: the towers that run it and their sizes, or the reason why it is refused."""
    import torch

    from megaclip.models import ModelConfig, load_model_config, meta_model
    from megaclip.models.transformers_config import config_of
    from megaclip.planner.tower_costs import trace_tower

    try:
        config = load_model_config(name)
        model = meta_model(config).train()
        for tower in ("image", "text"):
            trace_tower(model, tower, samples=2)
    except MegaclipError as error:
        return f"| {name} | refused: {str(error).removeprefix(f'{name}: ').partition(';')[0]} | | | | |\n"
    except (RuntimeError, NotImplementedError) as error:  # a library cannot trace the model on the meta device
        return f"| {name} | refused: {type(error).__name__}: {str(error).splitlines()[0]} | | | | |\n"
    towers = OWN if isinstance(config, ModelConfig) else OPEN_CLIP
    parameters = sum(parameter.numel() for parameter in model.parameters() if isinstance(parameter, torch.Tensor))
    text = config.text_cfg
    tokenizer = text.hf_tokenizer_name or "CLIP's"
    try:
        target = config_of(config.to_open_clip())["architectures"][0]
    except ConfigError as error:
        target = f"no: {str(error).rpartition(': ')[0]}"
    return f"| {name} | {towers} | {parameters / 1e6:,.1f} | {text.context_length} | {tokenizer} | {target} |\n"
