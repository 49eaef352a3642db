"""MegaCLIP: CLIP training on DeepSpeed, with contrastive batches of millions in little memory.

`import megaclip` registers the tile operations with PyTorch and DeepSpeed (`megaclip.ops.registration`), without
importing either.
"""

from megaclip.ops.registration import register_operations

__version__ = "0.1.0"

register_operations()
