"""MegaCLIP: CLIP training on DeepSpeed, with contrastive batches of millions in little memory."""

__version__ = "0.1.0"
