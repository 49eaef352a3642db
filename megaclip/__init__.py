"""MegaCLIP trains CLIP models on DeepSpeed, with contrastive batches of millions of samples in little memory.

`import megaclip` registers the tile operations for PyTorch and DeepSpeed (`megaclip.ops.registration`). It imports
neither of them.
"""

import os

from megaclip.ops.registration import register_operations

__version__ = "0.1.0"

PROCESS_AND_PARENT = (os.getpid(), os.getppid())
"""This process and the one that has started it: a rank and its launcher. The launcher may end while a rank imports
PyTorch, which takes seconds (`megaclip.engine.launcher`)."""

register_operations()
