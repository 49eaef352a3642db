"""The settings of a run: ds_config.json with its section "megaclip", and the command line.

training.py          reads and checks ds_config.json: `TrainingConfig`, `BatchLayout`
ds_config.py         all accepted settings of ds_config.json, typed
section.py           the section "megaclip"
optimizers.py        the section "optimizer": supported optimizers and their parameters
checks.py            the settings that are refused, each with the reason
command_line.py      the flags of launch/train.py: `TrainArguments`
open_clip_flags.json   flags of open_clip's and FastCLIP's trainers, what to use instead, and their translation

These modules check ds_config.json and the command line alone. Other packages check them against the rest of the run:

- the model, the data and the paths: `megaclip.engine.inputs`
- the number of ranks: `TrainingConfig.batch_layout`
- the device and the installed ops: `megaclip.zero.build`
- the free memory and disk: `megaclip.engine.preflight`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaclip.config.command_line import TrainArguments, parse_arguments
    from megaclip.config.section import MegaclipSection
    from megaclip.config.training import BatchLayout, TrainingConfig, load_training_config

__all__ = [
    "BatchLayout",
    "MegaclipSection",
    "TrainArguments",
    "TrainingConfig",
    "load_training_config",
    "parse_arguments",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the help of a command does not need PyTorch, which takes seconds."""
    for module in ("command_line", "section", "training") if name in __all__ else ():
        content = vars(importlib.import_module(f"megaclip.config.{module}"))
        if name in content:
            return content[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
