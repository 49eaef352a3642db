"""Imports that most ranks of a test need. The harness imports this module once, in the server that forks the ranks.

Without this module, each rank of each launch would spend about 3 s of CPU time on these imports. Do not import
`megaclip` here: its logger reads the rank from the environment, which a rank sets after it has been forked. No import
may start a thread, because a fork copies only the calling thread.
"""

import functools
import gc
import importlib

import cpuinfo
import deepspeed
import pytest
import torch
import torch._dynamo

# deepspeed.initialize imports this module. It calls torch.compile and so imports all of torch._inductor.
importlib.import_module("deepspeed.runtime.zero.muon.original_muon")

# DeepSpeed's CPU optimizers query the CPU's name whenever one is built. Each query starts a process of about 1 s.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

# torch.manual_seed would store the stack for devices that no rank uses, which takes 5 ms in every chunk of a step.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    _devices.manual_seed_all = lambda seed: None

# DeepSpeed runs the garbage collector when it builds a ZeRO-3 optimizer. Ranks do not visit frozen objects again.
gc.collect()
gc.freeze()

__all__ = ["deepspeed", "pytest", "torch"]
