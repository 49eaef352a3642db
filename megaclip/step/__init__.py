"""One training step over a contrastive batch of any size: the gradient cache and what feeds it.

- `gradient_cache`: the towers' chunks, the loss and the cached gradients of a step, on the core of `megaclip.cache`.
- `sample_store`: a rank's share of the batch, which a thread reads in the background. `batch` copies its chunks to the
  device. `caption_chunks` sorts and cuts captions.
- `objective_terms`: the terms of an objective beside the contrastive loss: their gradients and values.
- `layout`: the rules by which a step is laid out, which its plan shares: kept graphs and pieces of captions.
"""
