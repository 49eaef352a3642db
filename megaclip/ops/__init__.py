"""Tiles of the similarity matrix on one device; knows no ranks and no autograd."""
