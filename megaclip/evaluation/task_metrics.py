"""Metrics of the tasks of a suite, computed in numpy from the results of all images, under the names of DataComp.

DataComp (Gadre et al. 2023) and CLIP_benchmark define the metrics. In both, the order of a sort breaks ties, which
depends on the order of the classes or images. Here ties count against the model, as in `ranking`.
"""

from collections.abc import Sequence

import numpy as np

from megaclip.evaluation.ranking import TIE_TOLERANCE
from megaclip.evaluation.zero_shot import Classified

Metrics = dict[str, float | None]
"""Metrics by name, the main one of a kind of task first. None: not defined, such as top-5 accuracy of four classes."""


def accuracy_metrics(found: Classified, class_count: int) -> Metrics:
    """Return accuracy, and the averages of recall and F1 over the classes that have images.

    `acc5` is None with fewer than five classes. `F1-macro_all` is the metric of iWildCam (Koh et al. 2021).
    """
    hits = found.ranks == 0
    images = np.bincount(found.labels, minlength=class_count)
    found_of_class = np.bincount(found.labels[hits], minlength=class_count)
    selected = np.bincount(found.predictions, minlength=class_count)
    present = images > 0
    return {
        "acc1": found.accuracy(1),
        "acc5": found.accuracy(5) if class_count >= 5 else None,
        "mean_per_class_recall": float(np.mean(found_of_class[present] / images[present])),
        "F1-macro_all": float(np.mean(2 * found_of_class[present] / (images + selected)[present])),
    }


def group_metrics(found: Classified, groups: np.ndarray, field: str, worst: str) -> Metrics:
    """Return the accuracy, the accuracy and the number of images of each group, and the accuracy of the worst group.

    Args:
        groups: number of the group of each image, (n,) int64.
        field: name of the groups, such as "region".
        worst: name of the worst accuracy, such as "acc_worst_region". "acc_top5_wg" is accuracy at 5, others at 1.
    """
    name = worst.rpartition("_w")[0]
    hits = found.ranks < (5 if name == "acc_top5" else 1)
    metrics: Metrics = {f"{name}_avg": float(np.mean(hits))}
    accuracies = []
    for group in np.unique(groups).tolist():
        of_group = hits[groups == group]
        accuracies.append(float(np.mean(of_group)))
        metrics |= {f"{name}_{field}:{group}": accuracies[-1], f"count_{field}:{group}": len(of_group)}
    return metrics | {worst: min(accuracies)}


def mean_average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean over the classes of the average precision, 0 for a class without images.

    scores: (n, C) float64. targets: whether an image has a class, (n, C) bool.
    """
    precisions = []
    for of_class, truth in zip(np.nan_to_num(scores, nan=-9.0).T, targets.T, strict=True):
        descending = np.argsort(-of_class)
        tie = np.cumsum(np.diff(of_class[descending], prepend=np.inf) < -TIE_TOLERANCE)
        hits = truth[descending][np.lexsort((truth[descending], tie))]
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        precisions.append(precision[hits].sum() / max(1, hits.sum()))
    return float(np.mean(precisions))


def selection_metrics(similarities: Sequence[np.ndarray]) -> Metrics:
    """Return text, image and group score of Winoground (Thrush et al. 2022) and SugarCrepe (Hsieh et al. 2023).

    similarities: of the images and captions of each item, all (images, captions) float64. Image i belongs to caption i;
    captions or images after the shorter of the two are wrong answers. `text_acc` is the fraction of items whose images
    all select their caption, `image_acc` that of items whose captions all select their image, `acc` that of both.
    """
    values = np.stack(similarities)
    own = np.diagonal(values, axis1=1, axis2=2)
    others = np.where(np.eye(*values.shape[1:]) == 1, -np.inf, values)
    count = own.shape[1]
    text = (others[:, :count].max(axis=2) < own - TIE_TOLERANCE).all(axis=1)
    image = (others[:, :, :count].max(axis=1) < own - TIE_TOLERANCE).all(axis=1)
    rights = {"acc": text & image, "image_acc": image, "text_acc": text}
    return {name: float(np.mean(right)) for name, right in rights.items()}


def association_metrics(similarities: Sequence[np.ndarray], is_right: Sequence[np.ndarray]) -> Metrics:
    """Return the Jaccard indices of WinoGAViL (Bitton et al. 2022) of all items, and by their number of candidates.

    The model selects as many candidates as are right. similarities: of the candidates of each item and its cue, (c,)
    float64. is_right: (c,) bool.
    """
    scores, counts = [], np.array(list(map(len, is_right)))
    for values, right in zip(similarities, is_right, strict=True):
        wrong_ahead = ~(values < values[right, None] - TIE_TOLERANCE) & ~right
        hits = np.count_nonzero(np.sort(wrong_ahead.sum(axis=1)) + np.arange(right.sum()) < right.sum())
        scores.append(hits / (2 * right.sum() - hits))
    metrics: Metrics = {}
    for name, rows in (("10-12", counts >= 10), ("5-6", counts <= 6)):
        metrics[f"jaccard_score_{name}"] = float(np.mean(np.array(scores)[rows])) if rows.any() else None
    return metrics | {"avg_jaccard_score": float(np.mean(scores))}
