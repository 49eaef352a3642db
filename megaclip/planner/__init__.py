"""Plan the memory and time of a run by formulas, without a process group, a GPU or data.

    workload = Workload.of(model_config, training_config, world_size=8)
    plan = plan_memory(workload, describe(gpu="h200", gpus=8))

- `workload.py` describes the run, `cluster.py` the machines.
- `text_chunks.py` decides the sizes of text chunks, and `compile_estimate.py` whether torch.compile pays. A run follows
  these decisions.
- `towers.py` has the work of both towers. `tower_costs.py` traces them for the costs of one sample. `states.py`,
  `phases.py` and `traffic.py` are formulas, and `constants.py` has the measured numbers, with their sources.
- `memory.py` and `step_time.py` combine them. `memory.py` also decides where a step's images and embeddings are kept,
  in a plan and in a run. `search.py` finds what fits and what would be faster, and `report.py` prints the plan.
"""

from megaclip.planner.cluster import Cluster, Rates, describe
from megaclip.planner.memory import MemoryPlan, plan_memory
from megaclip.planner.search import advice, faster_run, largest_batch
from megaclip.planner.step_time import StepTime, plan_time, time_of
from megaclip.planner.workload import Workload
