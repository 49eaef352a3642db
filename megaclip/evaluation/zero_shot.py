"""Zero-shot classification over all ranks: top-1 and top-5 accuracy with an ensemble of prompts per class.

The embedding of a class is the mean of the unit text features of its prompts ("a photo of a {c}", ...), scaled to unit
length (Radford et al. 2021, section 3.1.4). Each rank encodes the prompts of a part of the classes, and the class
embeddings (C, D) are gathered. Then every rank classifies its own images. Ties count against the model (`ranking`).
With five classes or fewer, top-5 accuracy is always 1.
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
    """Return `zero_shot_top1` and `zero_shot_top5` over the images of all ranks, equal on every rank.

    Every rank must call it.

    Args:
        batches: this rank's `LabelledBatch`es, the same number on every rank: images (b, 3, H, W), labels (b,), ids
            (b,). Rows with id -1 are padding and are ignored.
        class_names: name of each class, in the order of the labels.
        templates: prompts, each with `{c}` at the place of the class name.
        prompt_batch_size: number of prompts that a rank encodes at once.
        tile_budget_mib: memory for one tile of similarities with its operands, in MiB.

    Raises:
        DataError: class names, templates or labels are not valid.
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
        count = len(class_names)
        raise DataError(f"labels of {count} classes must be from 0 to {count - 1}, got {bad_labels} others")
    if not images:
        raise DataError("zero-shot classification requires at least one image, got only padding rows; check the data")
    return {f"zero_shot_top{k}": hit / images for k, hit in zip(TOP, hits, strict=True)}


def class_weights(
    encode: Encode,
    class_names: Sequence[str],
    templates: Sequence[str],
    tokenizer: Callable[[list[str]], torch.Tensor],
    *,
    group: Any = None,
    prompt_batch_size: int,
) -> torch.Tensor:
    """Return the class embeddings (C, D) float32, of unit length, on every rank.

    Every rank must call it; it calls `encode` equally often on every rank. The arguments are those of `zero_shot`.
    """
    _check_prompts(class_names, templates)
    per_rank = -(-len(class_names) // group_size(group))
    # Ranks without classes of their own encode the last class again, because no rank may skip a call. The last line
    # removes those rows.
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
            f"zero-shot classification requires class names and templates, got {len(class_names)} and {len(templates)}"
        )
    for template in templates:
        if CLASS_PLACE not in template:
            raise DataError(f"every template requires '{CLASS_PLACE}' at the place of the class name, got {template!r}")


def _count_hits(
    features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, tile_budget_mib: float
) -> torch.Tensor:
    """Count [hits at 1, hits at 5, images, bad labels] (4,) int64 of features (b, D), labels (b,), weights (C, D)."""
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
