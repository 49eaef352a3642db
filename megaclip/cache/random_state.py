"""Random numbers of a chunk, replayed when it is encoded again."""

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


def random_state() -> tuple[Tensor, Tensor | None]:
    """Return the states of PyTorch's generators on the CPU and on the current accelerator."""
    accelerator: Any = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    return torch.get_rng_state(), None if on_cpu else accelerator.get_rng_state()


def set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    """Set both generators to a state of `random_state`."""
    cpu, device = state
    torch.set_rng_state(cpu)
    if device is not None:
        accelerator: Any = get_accelerator()
        accelerator.set_rng_state(device)
