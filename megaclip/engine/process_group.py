"""Joining the launcher's process group: what a run, and every tool that works on all ranks, does first."""

import logging
import os
import warnings

import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import raise_together
from megaclip.comm.groups import init_distributed


def start_process_group() -> None:
    """Join the launcher's process group; without a launcher, make a group of one, at a free port."""
    quiet_deepspeed()
    port = "29500" if "WORLD_SIZE" in os.environ else "0"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    if accelerator.device_name() == "cuda":
        # DeepSpeed's own choice for Hopper, 9.0a, does not compile its ops.
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    init_distributed()
    raise_together(None)  # all are here: a rank that left at once would break a peer that is still connecting


def quiet_deepspeed() -> None:
    """Set DeepSpeed's logger to WARNING, and silence what PyTorch says of DeepSpeed's calls, which no user can mend."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
