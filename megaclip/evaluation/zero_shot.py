"""Zero-shot classification over all ranks: top-1 and top-5 accuracy with an ensemble of prompts per class.

A class is the mean of the unit text features of its prompts ("a photo of a {c}", ...), scaled to unit length again
(Radford et al. 2021, section 3.1.4). The prompts are shared out over ranks, the class weights (C, D) gathered; then
every rank classifies its own images. Ties count against the model, as `ranking` says; with five classes or fewer
top-5 is 1 by definition.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from megaclip.comm.collectives import gather_rows, sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.encoder import Encode, in_step
from megaclip.evaluation.ranking import ahead, similarity_tiles, tile_side

TOP = (1, 5)
CLASS_PLACE = "{c}"


def zero_shot(
    encode: Encode,
    batches: Iterable[Any],
    class_names: Sequence[str],
    templates: Sequence[str],
    tokenizer: Callable[[list[str]], torch.Tensor],
    *,
    group: Any = None,
    prompt_batch_size: int = 256,
    tile_budget_mib: float = 128,
) -> dict[str, float]:
    """`zero_shot_top1` and `zero_shot_top5` over the images of all ranks, the same on every rank. Every rank must
    call it.

    batches: this rank's `LabelledBatch`es (images (b, 3, H, W), labels (b,), ids (b,); id -1 is padding and counts
    nowhere), the same number on every rank. templates: each holds `{c}`, the place of the class name. Raises
    DataError for bad classes, templates or labels.
    """
    weights = class_weights(encode, class_names, templates, tokenizer, group=group, prompt_batch_size=prompt_batch_size)
    totals = torch.zeros(len(TOP) + 2, dtype=torch.int64, device=weights.device)
    for batch in in_step(batches, group=group):
        features, _ = encode(images=batch.images)
        assert features is not None, "encode(images=...) returns image features"
        kept = (batch.ids != PADDING_ID).to(weights.device)
        totals += _count_hits(features[kept], batch.labels.to(weights.device)[kept], weights, tile_budget_mib)
    *hits, images, bad_labels = sum_over_ranks(totals, group=group).tolist()
    if bad_labels:
        raise DataError(f"expected labels below {len(class_names)}, the number of classes, got {bad_labels} others")
    if not images:
        raise DataError("zero-shot classification needs at least one image, got none: all rows are padding")
    return {f"zero_shot_top{k}": hit / images for k, hit in zip(TOP, hits, strict=True)}


def class_weights(
    encode: Encode,
    class_names: Sequence[str],
    templates: Sequence[str],
    tokenizer: Callable[[list[str]], torch.Tensor],
    *,
    group: Any = None,
    prompt_batch_size: int = 256,
) -> torch.Tensor:
    """The class embeddings (C, D) float32, unit length, on every rank. Every rank calls `encode` equally often."""
    _check_prompts(class_names, templates)
    per_rank = -(-len(class_names) // group_size(group))
    # Ranks past the last class encode the last one again, so that nobody skips a call; those rows fall off the end
    # below.
    first = group_rank(group) * per_rank
    mine = [min(first + row, len(class_names) - 1) for row in range(per_rank)]
    prompts = [template.replace(CLASS_PLACE, class_names[index]) for index in mine for template in templates]
    features = []
    for start in range(0, len(prompts), prompt_batch_size):
        _, text_features = encode(tokens=tokenizer(prompts[start : start + prompt_batch_size]))
        assert text_features is not None, "encode(tokens=...) returns text features"
        features.append(normalize(text_features.float(), dim=-1))
    means = torch.cat(features).unflatten(0, (per_rank, len(templates))).mean(dim=1)
    return gather_rows(normalize(means, dim=-1), group=group)[: len(class_names)]


def _check_prompts(class_names: Sequence[str], templates: Sequence[str]) -> None:
    if not class_names or not templates:
        raise DataError(
            f"zero-shot classification expects class names and templates, got {len(class_names)} and {len(templates)}"
        )
    for template in templates:
        if CLASS_PLACE not in template:
            raise DataError(f"expected '{CLASS_PLACE}' in every template (the class name goes there), got {template!r}")


def _count_hits(
    features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, tile_budget_mib: float
) -> torch.Tensor:
    """[hits at 1, hits at 5, images, bad labels] (4,) int64 for features (b, D), labels (b,), weights (C, D)."""
    valid = (labels >= 0) & (labels < len(weights))
    features, good_labels = features[valid], labels[valid]
    right = (features.double() * weights[good_labels].double()).sum(dim=1)
    ranks = torch.zeros_like(good_labels)
    side = tile_side(weights.shape[1], tile_budget_mib)
    for first in range(0, len(weights), side):
        classes = torch.arange(first, min(first + side, len(weights)), device=weights.device)
        for rows, similarities in similarity_tiles(features, weights[classes], side):
            wrong = good_labels[rows, None] != classes
            ranks[rows] += ahead(similarities, right[rows, None], wrong).sum(dim=1)
    hits = [(ranks < k).sum() for k in TOP]
    return torch.stack([*hits, ranks.new_tensor(len(labels)), (~valid).sum()])
