"""Evaluation with tensor-parallel towers equals one process: retrieval with one and with several captions per image.

Ranks have different numbers of captions, and some have only padding. The ranks of a replica encode their rows together.
The expected scores are computed by numpy from the features of one whole model.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.evaluation import ModelEncoder, evaluate_pairs
from megaclip.models import build_model
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed.engine_cases import MODEL, TRANSFORM, Case, backpropagate, start_engine, whole_parameters
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_tensor_parallel import split
from tests.evaluation_oracle import image_facts, retrieval_by_sorting

pytestmark = MEGATRON

IMAGES, ROWS = 7, 2
OWNER = np.array([0, 0, 0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 6])
"""Image index of each caption. Images have one to five captions."""
STAGES = (1, 3)
LAYOUTS = ("one caption", "captions on lines", "image repeated")
Scores = dict[tuple[int, str], dict[str, float]]


def pixels() -> Tensor:
    return torch.randint(256, (IMAGES, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def captions() -> list[str]:
    words = torch.randint(3, 32, (len(OWNER), 5), generator=torch.Generator().manual_seed(2))
    return [" ".join(map(str, row)) for row in words.tolist()]


def tokenize(texts: list[str]) -> Tensor:
    """Return the numbers in each text and the end of text. Return zeros for a blank text."""
    rows = [[*map(int, text.split())] or [0] * 5 for text in texts]
    return torch.tensor([[*row, 2] for row in rows])


class Pairs:
    """Dataset of images (n, 3, 8, 8) and their captions."""

    def __init__(self, images: Tensor, texts: list[str]) -> None:
        self.images, self.texts = images, texts

    def __len__(self) -> int:
        return len(self.texts)

    def batches(self) -> list[SimpleNamespace]:
        """Return this rank's batches of ROWS rows, padded to equal numbers of batches on all ranks."""
        rows = -(-len(self) // (group_size() * ROWS)) * ROWS
        ids = torch.arange(group_rank(), rows * group_size(), group_size())
        inside = ids.clamp(max=len(self) - 1)
        ids = ids.masked_fill(ids >= len(self), -1)
        batches = []
        for places, batch_ids in zip(inside.split(ROWS), ids.split(ROWS), strict=True):
            images, lines = self.images[places], [self.texts[place].split("\n") for place in places.tolist()]
            batch = SimpleNamespace(images=images, ids=batch_ids, **image_facts(images.numpy()))
            batch.tokens = tokenize([text for texts in lines for text in texts])
            batch.caption_rows = torch.arange(ROWS).repeat_interleave(torch.tensor([len(texts) for texts in lines]))
            batches.append(batch)
        return batches


def dataset(layout: str) -> Pairs:
    texts, images = captions(), pixels()
    if layout == "image repeated":
        return Pairs(images[torch.from_numpy(OWNER)], texts)
    of_image = [[text for text, owner in zip(texts, OWNER, strict=True) if owner == image] for image in range(IMAGES)]
    if layout == "captions on lines":
        return Pairs(images, ["\n".join(lines) for lines in of_image])
    return Pairs(images, [lines[0] for lines in of_image])


def evaluate_all(size: int) -> tuple[Scores, dict[int, dict[str, np.ndarray]]]:
    """Train two steps and evaluate. Return the scores by stage and layout, and the whole parameters by stage."""
    scores, parameters = {}, {}
    for stage in STAGES:
        case = split(Case(stage, 3), size)
        engine = start_engine(case)
        for step in range(2):
            backpropagate(engine, case, step)
            set_learning_rate(engine, 0.2)
            update(engine)
        encode = ModelEncoder(engine, TRANSFORM.normalise, device=torch.device("cpu"))
        for layout in LAYOUTS:
            scores[stage, layout] = evaluate_pairs(encode, dataset(layout).batches(), example_count=3).metrics
        parameters[stage] = whole_parameters(engine)
    return scores, parameters


def scores_of_one_process(parameters: dict[str, np.ndarray], layout: str) -> dict[str, float]:
    model = build_model(MODEL)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()})
    owner, texts = OWNER, captions()
    if layout == "one caption":
        _, first = np.unique(OWNER, return_index=True)
        owner, texts = OWNER[first], [texts[index] for index in first]
    with torch.no_grad():
        images = model(TRANSFORM.normalise(pixels()), None)[0].numpy()
        return retrieval_by_sorting(images, model(None, tokenize(texts))[1].numpy(), np.arange(IMAGES), owner)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)], ids="size {}".format)
def evaluated(request) -> list[tuple[Scores, dict[int, dict[str, np.ndarray]]]]:
    """Scores and parameters of four ranks."""
    return run_ranks(evaluate_all, 4, request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_scores_are_those_of_one_process(evaluated, stage, layout):
    for scores, parameters in evaluated:
        expected = scores_of_one_process(parameters[stage], layout)
        assert 0 < expected["retrieval_r1_i2t"] < 1 and 0 < expected["retrieval_r5_t2i"] < 1, "the data are too easy"
        assert scores[stage, layout] == pytest.approx(expected)
