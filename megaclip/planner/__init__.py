"""How much memory and time a run takes, from arithmetic alone: no process group, no GPU, no data.

    workload = Workload.of(model_config, training_config, world_size=8)
    plan = plan_memory(workload, describe(gpu="h200", gpus=8))

`workload.py` is what is trained, `cluster.py` on what; `towers.py`, `states.py`, `losses.py` and `traffic.py` are the
formulas, `memory.py` and `step_time.py` put them together, `search.py` finds what fits, `report.py` writes it down.
Numbers that were measured are in `constants.py`, with their source.
"""

from megaclip.planner.cluster import Cluster, Rates, describe
from megaclip.planner.memory import MemoryPlan, plan_memory
from megaclip.planner.search import advice, largest_batch, last_resort
from megaclip.planner.step_time import StepTime, plan_time
from megaclip.planner.workload import Workload

__all__ = [
    "Cluster",
    "MemoryPlan",
    "Rates",
    "StepTime",
    "Workload",
    "advice",
    "describe",
    "largest_batch",
    "last_resort",
    "plan_memory",
    "plan_time",
]
