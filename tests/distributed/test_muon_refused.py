"""DeepSpeed's Muon clips another quantity at ZeRO-1 to 3 than at ZeRO-0. Therefore optimizer.type Muon is refused.

Without clipping, all stages give the same weights. If this test fails with a new DeepSpeed, Muon may be supported.
"""

import deepspeed
import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from torch import nn

from megaclip.engine.process_group import quiet_deepspeed
from tests.distributed.harness import run_ranks

RATE, LIMIT = 0.02, 0.1


def train(stage: int, clipping: float) -> tuple[dict[str, np.ndarray], list[float]]:
    """Take two steps. Return the weights, and the gradient norms that DeepSpeed reports."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
    zero = {"stage": stage, "reduce_scatter": False}  # Muon at ZeRO-3 requires it
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clipping,
        "zero_optimization": zero,
        "optimizer": {"type": "Muon", "params": {"lr": RATE, "momentum": 0.9, "weight_decay": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    norms = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs, targets = torch.randn(4, 24, generator=generator), torch.randn(4, 16, generator=generator)
        engine.backward(((engine(inputs) - targets) ** 2).mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone().numpy()
    return weights, norms


def train_all() -> dict[tuple[int, float], tuple[dict[str, np.ndarray], list[float]]]:
    quiet_deepspeed()
    torch._dynamo.config.disable = True  # Muon's iterations are decorated with torch.compile
    return {(stage, clipping): train(stage, clipping) for stage in range(4) for clipping in (0.0, LIMIT)}


@pytest.mark.long
def test_clipping_changes_the_update_itself_at_zero_1_to_3():
    outcomes = run_ranks(train_all, 2)[0]
    plain, clipped = outcomes[0, 0.0][0], outcomes[0, LIMIT][0]
    for stage in (1, 2, 3):
        weights, norms = outcomes[stage, 0.0]
        assert all(np.abs(weights[name] - plain[name]).max() < 1e-5 for name in plain)
        assert (
            min(norms) > 3
        )  # the norm of an orthogonal update of 24 x 48 and 48 x 16 is about 6; that of the gradient is < 1
        moved = max(np.abs(outcomes[stage, LIMIT][0][name] - clipped[name]).max() for name in clipped)
        assert moved > RATE / 4
