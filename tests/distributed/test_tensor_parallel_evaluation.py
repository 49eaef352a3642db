"""Evaluation with tensor-parallel towers equals one process: retrieval with several captions per image.

Ranks have different numbers of captions, and some have only padding. The ranks of a replica encode their rows together.
The expected scores are computed by numpy from the features of one whole model. test_evaluation.py tests other layouts.
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
Scores = dict[int, dict[str, float]]


def pixels() -> Tensor:
    return torch.randint(256, (IMAGES, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def captions() -> list[str]:
    words = torch.randint(3, 32, (len(OWNER), 5), generator=torch.Generator().manual_seed(2))
    return [" ".join(map(str, row)) for row in words.tolist()]


def tokenize(texts: list[str]) -> Tensor:
    """Return the numbers in each text and the end of text. Return zeros for a blank text."""
    rows = [[*map(int, text.split())] or [0] * 5 for text in texts]
    return torch.tensor([[*row, 2] for row in rows])


def batches() -> list[SimpleNamespace]:
    """Return this rank's batches of ROWS images with all their captions, padded to equal numbers on all ranks."""
    rows = -(-IMAGES // (group_size() * ROWS)) * ROWS
    ids = torch.arange(group_rank(), rows * group_size(), group_size())
    found, texts, images = [], captions(), pixels()
    for own in ids.split(ROWS):
        places = own.clamp(max=IMAGES - 1)
        lines = [[texts[row] for row in np.flatnonzero(place == OWNER)] for place in places.tolist()]
        batch = SimpleNamespace(
            images=images[places], ids=own.masked_fill(own >= IMAGES, -1), **image_facts(images[places].numpy())
        )
        batch.tokens = tokenize([text for of_image in lines for text in of_image])
        batch.caption_rows = torch.arange(ROWS).repeat_interleave(torch.tensor([len(of_image) for of_image in lines]))
        found.append(batch)
    return found


def evaluate_all(size: int) -> tuple[Scores, dict[int, dict[str, np.ndarray]]]:
    """Train two steps and evaluate. Return the scores and the whole parameters by stage."""
    scores, parameters = {}, {}
    for stage in STAGES:
        case = split(Case(stage, 3), size)
        engine = start_engine(case)
        for step in range(2):
            backpropagate(engine, case, step)
            set_learning_rate(engine, 0.2)
            update(engine)
        encode = ModelEncoder(engine, TRANSFORM.normalise, device=torch.device("cpu"))
        scores[stage] = evaluate_pairs(encode, batches()).metrics
        parameters[stage] = whole_parameters(engine)
    return scores, parameters


def scores_of_one_process(parameters: dict[str, np.ndarray]) -> dict[str, float]:
    model = build_model(MODEL)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()})
    with torch.no_grad():
        images = model(TRANSFORM.normalise(pixels()), None)[0].numpy()
        texts = model(None, tokenize(captions()))[1].numpy()
    return retrieval_by_sorting(images, texts, np.arange(IMAGES), OWNER)


@pytest.fixture(scope="module")
def evaluated() -> list[tuple[Scores, dict[int, dict[str, np.ndarray]]]]:
    """Scores and parameters of four ranks, two replicas."""
    return run_ranks(evaluate_all, 4, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_scores_are_those_of_one_process(evaluated, stage):
    for scores, parameters in evaluated:
        expected = scores_of_one_process(parameters[stage])
        assert 0 < expected["retrieval_r1_i2t"] < 1 and 0 < expected["retrieval_r5_t2i"] < 1, "the data are too easy"
        assert scores[stage] == pytest.approx(expected)
