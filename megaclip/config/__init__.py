"""Everything that a run can be told: ds_config.json with its section "megaclip", and the command line.

training.py          ds_config.json read, checked and typed: `TrainingConfig`, `BatchPlan`
section.py           the section "megaclip"
checks.py            which settings of ds_config.json are refused, and why
deepspeed.py         types of DeepSpeed's own sections
optimizers.py        supported optimizers and their parameters
command_line.py      the flags of launch/train.py: `TrainArguments`
open_clip_flags.py   open_clip's flags that launch/train.py does not take, and what replaces each
"""

from megaclip.config.command_line import TrainArguments, parse_arguments
from megaclip.config.section import MegaclipSection
from megaclip.config.training import BatchPlan, TrainingConfig, load_training_config

__all__ = [
    "BatchPlan",
    "MegaclipSection",
    "TrainArguments",
    "TrainingConfig",
    "load_training_config",
    "parse_arguments",
]
