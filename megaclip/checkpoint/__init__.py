"""Checkpoints: atomic save, exact resume on any number of ranks, import from and export to open_clip's format."""
