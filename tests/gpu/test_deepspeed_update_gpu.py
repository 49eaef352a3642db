"""The grouped optimizer step on GPUs: DeepSpeed's gradient norm, and a number of kernels independent of the tensors.

tests/distributed/test_deepspeed_update.py compares whole updates on CPUs, for which PyTorch has no grouped kernels.
"""

from dataclasses import dataclass

import pytest
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.update import GroupedStage3, GroupedStages1And2
from tests.distributed import engine_cases
from tests.distributed.engine_cases import Case
from tests.distributed.harness import run_ranks
from tests.tolerances import SAME_NORM, assert_close

pytestmark = pytest.mark.gpu

LAYERS = 6


@dataclass
class Measured:
    """Two norms of the same gradients, the number of kernels of the update, and how often the host waits for one."""

    norm: float
    deepspeed_norm: float
    kernels: int
    waits: int


def measure(case: Case) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        model = engine_cases.MODEL.replace(vision_cfg={"layers": LAYERS}, text_cfg={"layers": LAYERS})
        patch.setattr(engine_cases, "MODEL", model)
        engine = engine_cases.start_engine(case)
        for step in range(2):  # the first update creates the optimizer's states
            engine_cases.backpropagate(engine, case, step)
            optimizer = engine.optimizer
            if case.stage == 3:
                assert type(optimizer) is GroupedStage3
                own = combine_grad_norm_groups(DeepSpeedZeroOptimizer_Stage3._get_norm_groups(optimizer))
            else:
                assert type(optimizer) is GroupedStages1And2
                own = DeepSpeedZeroOptimizer.scaled_global_norm(optimizer)
            set_learning_rate(engine, 1e-3)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                norm = update(engine)
                torch.cuda.synchronize()
    counts = {(event.key, event.device_type): event.count for event in profiler.key_averages()}
    kernels = sum(count for (_, device), count in counts.items() if device == DeviceType.CUDA)
    waits = ("Memcpy DtoH (Device -> Pageable)", DeviceType.CUDA), ("cudaEventSynchronize", DeviceType.CPU)
    return Measured(norm, float(own), kernels, sum(counts.get(wait, 0) for wait in waits))


def measure_all() -> dict[str, Measured]:
    cases = {f"stage {stage}": Case(stage, 1, bf16=True, clipping=0.05, optimizer="SGD") for stage in (1, 2, 3)}
    cases["stage 2 in fp32"] = Case(2, 1, bf16=True, clipping=0.05, optimizer="SGD", grad_accum_dtype="fp32")
    return {name: measure(case) for name, case in cases.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_grouped_norm_is_deepspeeds_and_takes_few_kernels(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, this machine has {torch.cuda.device_count()}")
    for measured in run_ranks(measure_all, world_size, backend="nccl"):
        for name, got in measured.items():
            assert_close(got.norm / got.deepspeed_norm, 1.0, SAME_NORM, f"norm at {name}")
            assert got.kernels < 150, f"{got.kernels} kernels at {name}; the model has 206 parameter tensors"
            assert got.waits == 1, name  # for the norm
