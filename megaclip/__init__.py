"""MegaCLIP trains CLIP models on DeepSpeed, with contrastive batches of millions of samples in little memory.

`import megaclip` registers the tile operations for PyTorch and DeepSpeed (`megaclip.ops.registration`). It imports
neither of them.
"""

from megaclip.ops.registration import register_operations

__version__ = "0.1.0"

register_operations()
