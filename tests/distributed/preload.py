"""Imports that most ranks of a test need. The harness imports this module once, in the server that forks the ranks.

Without this module, each rank of each launch would spend about 4 s of CPU time on these imports. No import may start a
thread, because a fork copies only the calling thread. A fork calls `log_as_rank` when it has set its rank.
"""

import contextlib
import functools
import gc
import importlib
import logging

import cpuinfo
import deepspeed
import pytest
import torch
import torch._dynamo
import torch.utils.tensorboard

import megaclip.engine.run
from megaclip.data import load_tokenizer
from megaclip.logging import get_logger
from megaclip.models import ModelConfig
from megaclip.open_clip_package import import_open_clip
from megaclip.planner.tower_costs import tower_costs
from tests.end_to_end.training_runs import MODEL

# deepspeed.initialize imports these modules. The first one calls torch.compile and so imports all of torch._inductor.
importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
importlib.import_module("deepspeed.module_inject.auto_ep_config")

# megatron-core is left out: its import adds classes to those that torch.load accepts with weights_only.
import_open_clip()
with contextlib.suppress(ImportError):
    importlib.import_module("peft")

# DeepSpeed's CPU optimizers query the CPU's name whenever one is built. Each query starts a process of about 1 s.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

# Before a run trains, it compares its tokenizer with CLIP's and plans its towers. A rank would need a second for that.
load_tokenizer("clip", 24)
_model = ModelConfig.from_dict(MODEL).replace(text_cfg={"hf_tokenizer_name": "sentencepiece", "pad_id": 0})
for _tower in ("image", "text"):
    tower_costs(_model, _tower, 4)

# torch.manual_seed would store the stack for devices that no rank uses, which takes 5 ms in every chunk of a step.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    _devices.manual_seed_all = lambda seed: None

# DeepSpeed runs the garbage collector when it builds a ZeRO-3 optimizer. Ranks do not visit frozen objects again.
gc.collect()
gc.freeze()


def log_as_rank() -> None:
    """Let megaclip's logger read the rank of this process. It has read that of the server when it was imported."""
    logging.getLogger("megaclip").handlers.clear()
    get_logger("megaclip")


__all__ = ["deepspeed", "log_as_rank", "megaclip", "pytest", "torch"]
