"""MegaCLIP trains CLIP models on DeepSpeed, with contrastive batches of millions of samples in little memory.

`import megaclip` does not import PyTorch or DeepSpeed. The first use of `ClipLoss`, `SigLipLoss` or `FastClipLoss`
imports `megaclip.losses`, which imports both and registers the tile operations with them. `GradientCache` and `Encoded`
are those of `megaclip.cache.gradient_cache`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaclip.cache.gradient_cache import Encoded, GradientCache
    from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss

__version__ = "0.1.0"

__all__ = ["ClipLoss", "Encoded", "FastClipLoss", "GradientCache", "SigLipLoss", "__version__"]

PROCESS_AND_PARENT = (os.getpid(), os.getppid())
"""Ids of this process and of its parent: a rank and its launcher.

They are read now because the launcher may end while a rank imports PyTorch, which takes seconds
(`megaclip.guards.signals`)."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "cache.gradient_cache" if name in ("Encoded", "GradientCache") else "losses"
    return getattr(importlib.import_module(f"megaclip.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
