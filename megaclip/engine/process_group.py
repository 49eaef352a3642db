"""Start the process group. A run and every tool for several ranks do this first."""

import logging
import os
import warnings

import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import wait_for_all_ranks
from megaclip.comm.groups import init_distributed
from megaclip.logging import local_rank_from_environment


def start_process_group() -> None:
    """Join the process group of the launcher. Without a launcher, create a group of one rank on a free port."""
    quiet_deepspeed()
    port = "29500" if "WORLD_SIZE" in os.environ else "0"
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank_from_environment())
    if accelerator.device_name() == "cuda":
        # DeepSpeed would select 9.0a on Hopper GPUs, and its ops do not compile for 9.0a.
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # record the last collectives (`megaclip.engine.stacks`)
    init_distributed()
    wait_for_all_ranks()  # if a rank exited now, a peer that is still connecting would fail


def quiet_deepspeed() -> None:
    """Set DeepSpeed's log level to WARNING, and hide the deprecation warnings that DeepSpeed's own calls cause."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
