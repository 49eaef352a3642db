"""Checkpoints: atomic save and exact resume; open_clip in and out."""
