"""Imports that most ranks of a test need. The harness loads them once, in the server that it forks the ranks from.

Without this module each rank of each launch would spend about 3 s of CPU time on them. `megaclip` must not be imported
here: its logger reads the rank from the environment, which a rank sets after it has been forked. No import may start a
thread, because a fork copies only the calling thread.
"""

import functools
import gc
import importlib

import cpuinfo
import deepspeed
import pytest
import torch
import torch._dynamo

# deepspeed.initialize imports this module, which calls torch.compile and so imports the whole of torch._inductor.
importlib.import_module("deepspeed.runtime.zero.muon.original_muon")

# DeepSpeed's CPU optimizers ask for the CPU's name whenever one is built. Each answer starts a process of about 1 s.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

# DeepSpeed collects garbage when it builds a ZeRO-3 optimizer. Frozen objects are not visited again in every rank.
gc.collect()
gc.freeze()

__all__ = ["deepspeed", "pytest", "torch"]
