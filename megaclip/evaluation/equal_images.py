"""Recognise equal images, for datasets with one pair per caption, in which an image is repeated (COCO, Flickr)."""

from typing import Any

import torch

from megaclip.comm.collectives import gather_rows
from megaclip.data.batch import PADDING_ID


def first_equal_image(pair_ids: torch.Tensor, digests: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Return the id of each pair's image, the smallest id of all pairs with an equal image, (n,) int64.

    Every rank must call it, with equally many rows. Ranks exchange only a 64-bit digest per pair.

    pair_ids: (n,) int64, unique over all ranks; padding has PADDING_ID and keeps it. digests: (n,) int64.
    """
    gathered = gather_rows(torch.stack([pair_ids, digests], dim=1), group=group)
    all_ids, all_digests = gathered[gathered[:, 0] != PADDING_ID].unbind(1)
    if not len(all_ids):
        return pair_ids
    all_ids, order = all_ids.sort()
    _, distinct = all_digests[order].unique(return_inverse=True)
    smallest = all_ids.clone().scatter_reduce_(0, distinct, all_ids, reduce="amin", include_self=False)
    places = torch.searchsorted(all_ids, pair_ids).clamp(max=len(all_ids) - 1)
    return torch.where(pair_ids == PADDING_ID, PADDING_ID, smallest[distinct[places]])
