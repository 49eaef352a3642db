"""Start the process group. A run and every tool for several ranks do this first."""

import logging
import os
import re
import warnings

import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import wait_for_all_ranks
from megaclip.comm.groups import init_distributed
from megaclip.logging import get_logger, local_rank_from_environment

logger = get_logger(__name__)

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable with the GPU architectures for which PyTorch and DeepSpeed build ops, such as "8.0;9.0"."""
_ARCHITECTURE = r"\d+\.\d+(\+PTX)?"


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
        os.environ[ARCHITECTURES] = architectures(os.environ.get(ARCHITECTURES, ""), torch.cuda.get_device_capability())
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # record the last collectives (`megaclip.guards.stacks`)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        logger.warning("torchrun restarts ranks reliably only with  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    init_distributed()
    wait_for_all_ranks()  # if a rank exited now, a peer that is still connecting would fail


def architectures(requested: str, capability: tuple[int, int]) -> str:
    """Return the GPU architectures for which DeepSpeed builds its ops: the requested ones, or that of this GPU.

    DeepSpeed cannot read names such as 9.0a. It would select 9.0a on Hopper GPUs if nothing were requested, and its ops
    do not compile for it.
    """
    if re.fullmatch(rf"\s*{_ARCHITECTURE}([\s;]+{_ARCHITECTURE})*[\s;]*", requested):
        return requested
    own = "{}.{}".format(*capability)
    if requested:
        logger.warning("%s is %r, which DeepSpeed cannot read; its ops are built for %s", ARCHITECTURES, requested, own)
    return own


def quiet_deepspeed() -> None:
    """Set DeepSpeed's log level to WARNING, and hide the deprecation warnings that DeepSpeed's own calls cause."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
