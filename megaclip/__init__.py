"""MegaCLIP trains CLIP models on DeepSpeed, with contrastive batches of millions of samples in little memory.

`import megaclip` registers the tile operations for PyTorch and DeepSpeed (`megaclip.ops.registration`). It imports
neither of them. `ClipLoss`, `SigLipLoss` and `FastClipLoss` are imported from `megaclip.losses` when they are first
used, which imports both.
"""

from typing import TYPE_CHECKING, Any

from megaclip.ops.registration import register_operations

if TYPE_CHECKING:
    from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss

__version__ = "0.1.0"

__all__ = ["ClipLoss", "FastClipLoss", "SigLipLoss", "__version__"]

register_operations()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megaclip import losses

    return getattr(losses, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
