"""Objectives beside the contrastive loss: further terms, modules with parameters, and fields of the samples.

An objective is a subclass of `Objective`. `megaclip.objective` of ds_config.json names one: an entry of `OBJECTIVES`,
or the user's own file and class. docs/objectives.md shows how to write one.

- `base`: the interface. `Objective` is the base class, `Chunk` and `WholeBatch` are what its methods receive.
- `distillation`: teachers' similarities and features.
- `caption`: the caption loss of CoCa, the objective of every model with a caption decoder.
- `registry`: finds the class that the settings name, and constructs the objective.
"""

from megaclip.data.fields import Field
from megaclip.objectives.base import Chunk, Objective, WholeBatch
from megaclip.objectives.caption import Caption
from megaclip.objectives.registry import OBJECTIVES, load_objective
