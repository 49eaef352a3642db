"""What a model can do: zero-shot classification and image-text retrieval, exact, on all ranks, and pictures of both.

`evaluate_datasets` is the whole room in one call; its parts can be used alone. Metric names: `zero_shot_top1`,
`zero_shot_top5`, `retrieval_r1_i2t`, `_r5_`, `_r10_` and likewise `_t2i`. Ties count against the model (`ranking`).
"""

from megaclip.evaluation.captions import CaptionGroups, group_captions
from megaclip.evaluation.datasets import evaluate_datasets
from megaclip.evaluation.encoder import Encode, ModelEncoder
from megaclip.evaluation.example_pictures import example_pictures
from megaclip.evaluation.examples import RetrievalExamples, retrieval_examples
from megaclip.evaluation.retrieval import retrieval
from megaclip.evaluation.suite import Evaluation, ZeroShotTask, evaluate
from megaclip.evaluation.zero_shot import class_weights, zero_shot

__all__ = [
    "CaptionGroups",
    "Encode",
    "Evaluation",
    "ModelEncoder",
    "RetrievalExamples",
    "ZeroShotTask",
    "class_weights",
    "evaluate",
    "evaluate_datasets",
    "example_pictures",
    "group_captions",
    "retrieval",
    "retrieval_examples",
    "zero_shot",
]
