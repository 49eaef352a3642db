"""Evaluation over gloo ranks: every rank gets the metrics that numpy computes from the whole data in one process."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch

from megaclip.comm.collectives import gather_objects
from megaclip.comm.groups import group_rank, group_size
from megaclip.errors import DataError
from megaclip.evaluation import (
    Evaluator,
    ModelEncoder,
    classify,
    evaluate_pairs,
    image_features,
    ranking,
    retrieval_examples,
    scores,
)
from megaclip.evaluation.retrieval import retrieval, retrieval_ranks
from megaclip.evaluation.scores import count_bad_samples
from megaclip.models import ModelConfig, build_model
from tests.distributed.checks import Outcome, assert_passed, run_checks
from tests.distributed.harness import run_ranks
from tests.evaluation_oracle import (
    coarse_features,
    image_facts,
    paired_features,
    ranks_by_sorting,
    retrieval_by_sorting,
    unit_features,
)
from tests.tolerances import SIMILARITY, assert_close

WORLD_SIZES = (1, 2, 3)
DIM = 16
TINY_MIB = 2e-3
WORDS = torch.from_numpy(unit_features(np.random.default_rng(0), 300, DIM))
NAN = np.float32("nan")


def share(rows: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return the rows whose entry in `owner` is this rank."""
    return rows[owner % group_size() == group_rank()]


def padded(rows: np.ndarray, ids: np.ndarray, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` and `ids` with `count` padding rows of NaN before and after them."""
    poison = np.full((count, rows.shape[1]), NAN)
    filler = np.full(count, -1)
    return (
        torch.from_numpy(np.concatenate([poison, rows, poison])),
        torch.from_numpy(np.concatenate([filler, ids, filler])),
    )


# ------------------------------------------------------------------------------------------------ retrieval


def check_retrieval(image_count: int, captions: int, tile_budget_mib: float) -> None:
    """Images and their captions are on different ranks, in different numbers, and between padding rows of NaN."""
    generator = np.random.default_rng(image_count)
    images, texts, image_ids, text_image_ids = paired_features(generator, image_count, captions, DIM)
    owner_of_image = generator.integers(0, 6, size=len(images)) // 2
    owner_of_text = generator.integers(0, 4, size=len(texts)) // 2
    local_images = padded(share(images, owner_of_image), share(image_ids, owner_of_image), group_rank())
    local_texts = padded(share(texts, owner_of_text), share(text_image_ids, owner_of_text), 2)
    with mock.patch.object(ranking, "TILE_BUDGET_MIB", tile_budget_mib):
        got = retrieval(local_images[0], local_texts[0], local_images[1], local_texts[1])
    assert got == pytest.approx(retrieval_by_sorting(images, texts, image_ids, text_image_ids))


def check_ties(tile_budget_mib: float) -> None:
    generator = np.random.default_rng(5)
    images, texts = coarse_features(generator, 37), coarse_features(generator, 61)
    image_ids = np.arange(37)
    text_image_ids = np.concatenate([image_ids, generator.integers(0, 37, size=24)])
    similarities = images.astype(np.float64) @ texts.astype(np.float64).T
    is_right = image_ids[:, None] == text_image_ids
    image_owner, text_owner = np.arange(37), np.arange(61) // 7
    local = [share(images, image_owner), share(texts, text_owner), share(image_ids, image_owner)]
    with mock.patch.object(ranking, "TILE_BUDGET_MIB", tile_budget_mib):
        found = retrieval_ranks(*(torch.from_numpy(rows) for rows in [*local, share(text_image_ids, text_owner)]))
    expected = ranks_by_sorting(similarities, is_right), ranks_by_sorting(similarities.T, is_right.T)
    np.testing.assert_array_equal(found[0], share(expected[0], image_owner))
    np.testing.assert_array_equal(found[1], share(expected[1], text_owner))


def check_data_errors() -> None:
    """The first image of the second rank is also that of the first one. All ranks must raise an error."""
    features, ids = torch.eye(4)[:2], torch.tensor([7, group_rank()])
    with pytest.raises(DataError, match="an id twice") if group_size() > 1 else contextlib.nullcontext():
        retrieval(features, features, ids)


def check_examples() -> None:
    generator = np.random.default_rng(8)
    count = 4  # fewer than a query retrieves; some ranks have no image
    images, texts = unit_features(generator, count, DIM), unit_features(generator, count, DIM)
    ids, chosen = np.arange(count), np.array([0, 1, 3])
    local_images = padded(share(images, ids + 1), share(ids, ids + 1), 1)
    local_texts = padded(share(texts, ids // 2), share(ids, ids // 2), 0)
    examples = retrieval_examples(local_images[0], local_texts[0], local_images[1], local_texts[1], len(chosen))
    np.testing.assert_array_equal(examples.ids, chosen)
    similarities = texts.astype(np.float64) @ images.astype(np.float64).T
    assert_close(examples.similarities, similarities[np.ix_(chosen, chosen)], SIMILARITY)
    order = np.argsort(-similarities[chosen], axis=1)
    np.testing.assert_array_equal(examples.found_ids, order)
    np.testing.assert_array_equal(
        examples.ranks, [list(line).index(own) for line, own in zip(order, chosen, strict=True)]
    )


# ------------------------------------------------------------------------------------------------ zero-shot, pairs


class ToyModel:
    """Encoder that looks up text features by number, returns pixels as image features, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self, images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        self.calls.append((images is not None) + 2 * (tokens is not None))
        return None if images is None else images[:, 0, 0], None if tokens is None else WORDS[tokens[:, 0]]

    def check_ranks_are_in_step(self) -> None:
        """Under ZeRO-3 a rank that skips a call, or makes another kind of call, hangs the job."""
        assert all(calls == self.calls for calls in gather_objects(self.calls))


def tokenizer(texts: list[str]) -> torch.Tensor:
    """Return one token per text: the number in the text."""
    return torch.tensor([[int("".join(filter(str.isdigit, text)) or 0)] for text in texts])


def local_batches(features: np.ndarray, labels: np.ndarray, size: int = 4) -> list[SimpleNamespace]:
    """Return this rank's batches of an evaluation loader: every W-th row, padded with NaN rows on some ranks."""
    rows_per_rank = -(-len(features) // group_size())
    total = -(-rows_per_rank // size) * size
    mine = np.arange(len(features)) % group_size() == group_rank()
    missing = total - int(mine.sum())
    pixels = np.concatenate([features[mine], np.full((missing, DIM), NAN)])
    columns = [torch.from_numpy(pixels)[:, None, None, :]]
    for column in (labels[mine], labels[mine], np.nonzero(mine)[0]):
        columns.append(torch.from_numpy(np.concatenate([column, np.full(missing, -1)])))
    columns[1] = columns[1].clamp(min=0)[:, None]
    parts = [column.split(size) for column in columns]
    return [
        SimpleNamespace(images=i, tokens=t, labels=c, ids=d, **image_facts(i.numpy()))
        for i, t, c, d in zip(*parts, strict=True)
    ]


def check_zero_shot(class_count: int, image_count: int) -> None:
    generator, model = np.random.default_rng(class_count), ToyModel()
    labels = generator.integers(0, class_count, size=image_count)
    templates = ["{c}", "1{c}", "number {c}"]
    weights = (2 * WORDS[:class_count] + WORDS[[int(f"1{index}") for index in range(class_count)]]).double().numpy()
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    features = (weights[labels] + 1.5 * unit_features(generator, image_count, DIM)).astype(np.float32)
    data = SimpleNamespace(class_names=[str(index) for index in range(class_count)], templates=templates)
    prompts = Evaluator(model, None, tokenizer, 1, 0, text_batch_size=4).class_weights(data)  # type: ignore[arg-type]  # no transform
    with mock.patch.object(ranking, "TILE_BUDGET_MIB", TINY_MIB):
        found = classify(image_features(model, local_batches(features, labels)), prompts)
    ranks = ranks_by_sorting(features.astype(np.float64) @ weights.T, np.arange(class_count) == labels[:, None])
    np.testing.assert_array_equal(found.ranks, ranks)
    model.check_ranks_are_in_step()


def check_pairs(layout: str) -> None:
    """With 7 images, some ranks have only padding in their last batch. Ranks have different numbers of captions."""
    image_count = 7
    owner = np.sort(np.random.default_rng(2).integers(0, image_count, size=25 - image_count))
    owner = np.concatenate([np.arange(image_count), owner]) if layout != "one caption" else np.arange(image_count)
    words = np.arange(len(owner))
    features = unit_features(np.random.default_rng(4), image_count, DIM) + WORDS[:image_count].numpy()
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    model, numbers = ToyModel(), np.arange(image_count)
    pairs = local_batches(features[owner], words) if layout == "image repeated" else local_batches(features, numbers)
    if layout == "several captions":
        for batch in pairs:
            of_row = [words[owner == image] if image >= 0 else words[:1] for image in batch.ids.numpy()]
            batch.tokens = torch.from_numpy(np.concatenate(of_row))[:, None]
            batch.caption_rows = torch.arange(len(of_row)).repeat_interleave(torch.tensor([len(w) for w in of_row]))
    with mock.patch.object(scores, "_EXAMPLES", 3):
        result = evaluate_pairs(model, pairs)
    similarities = features.astype(np.float64) @ WORDS[:image_count].numpy().astype(np.float64).T
    assert result.metrics == pytest.approx(retrieval_by_sorting(features, WORDS[words].numpy(), numbers, owner))
    assert result.examples is not None and result.examples.ids.tolist() == [0, 3, 6]
    # The first caption of image i is word i.
    assert_close(result.examples.similarities, similarities[::3, [0, 3, 6]].T, SIMILARITY)
    model.check_ranks_are_in_step()


def check_loader_errors() -> None:
    """The last rank's loader fails at its second batch. All ranks must raise an error instead of waiting for it."""

    def failing() -> Iterator[SimpleNamespace]:
        for number, batch in enumerate(local_batches(WORDS[:12].numpy(), np.arange(12), size=2)):
            if number == 1 and group_rank() == group_size() - 1:
                raise DataError("too many bad samples")
            yield batch

    with pytest.raises(DataError, match="too many bad samples"):
        evaluate_pairs(ToyModel(), failing())
    with pytest.raises(DataError, match="too many bad samples"):
        classify(image_features(ToyModel(), failing()), WORDS[:12])


ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
}
TINY_TOWER = {"width": 16, "layers": 1}
TINY_MODEL = {
    "embed_dim": DIM,
    "vision_cfg": {**TINY_TOWER, "head_width": 8, "image_size": 8, "patch_size": 4},
    "text_cfg": {**TINY_TOWER, "heads": 2, "context_length": 20, "vocab_size": 50, "eos_id": 49, "pool_type": "last"},
}


def length_tokens(texts: list[str]) -> torch.Tensor:
    """Return each text's length, then as many other tokens, then the end of text, in a context of 20 tokens."""
    tokens = torch.zeros(len(texts), 20, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)], row[len(text)] = len(text), 49
    return tokens


def check_zero_3(pool_type: str) -> None:
    """A model with partitioned parameters and unequal amounts of data per rank gives the metrics of the whole model.

    With the pool type "eos" the captions are cut. Each rank cuts at its own longest caption.
    """
    torch.manual_seed(24)
    model = build_model(ModelConfig.from_dict(TINY_MODEL).replace(text_cfg={"pool_type": pool_type}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # the features of an untrained model hardly depend on the image
    images, tokens, ids = torch.rand(11, 3, 8, 8), torch.randint(0, 49, (11, 20)), np.arange(11)
    tokens[ids, np.maximum(ids % 9, 1)] = 49  # the captions end after 2 to 9 tokens
    labels = ids % 3
    with torch.no_grad():
        of_images, of_texts, _ = model(images, tokens)
        prompts = model(None, length_tokens(["a", "a!", "bb", "bb!", "cccc", "cccc!"]))[1].double().numpy()
    classes = prompts.reshape(3, 2, DIM).mean(axis=1)
    similarities = of_images.double().numpy() @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T
    ranks = ranks_by_sorting(similarities, np.arange(3) == labels[:, None])
    expected = retrieval_by_sorting(of_images.numpy(), of_texts.numpy(), ids, ids)
    assert 0 < expected["retrieval_r5_i2t"] < 1, "the data must not be trivial"
    pairs, correct = (of_images @ of_texts.T).double().numpy(), np.eye(11, dtype=bool)
    gaps = [abs(pairs - pairs.diagonal()), abs(pairs.T - pairs.diagonal())]
    assert min(gap[~correct].min() for gap in gaps) > 1e-3, "gaps must exceed rounding errors"

    engine, *_ = deepspeed.initialize(model=model, config=ZERO_3)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0, "every parameter must be partitioned"
    mine = torch.arange(group_rank(), 12, group_size())
    mine[mine == 11] = -1
    batches = [
        SimpleNamespace(
            images=images[i], tokens=tokens[i], labels=i.clamp(min=0) % 3, ids=i, **image_facts(images[i].numpy())
        )
        for i in mine.split(2)
    ]
    read: list[int] = []
    model.text.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    encode = ModelEncoder(engine, torch.Tensor.to, device=torch.device("cpu"), cut_captions=model.cut_captions)
    data = SimpleNamespace(class_names=["a", "bb", "cccc"], templates=["{c}", "{c}!"])
    weights = Evaluator(encode, None, length_tokens, 1, 0).class_weights(data)  # type: ignore[arg-type]  # no transform
    found = classify(image_features(encode, batches), weights)
    np.testing.assert_array_equal(found.ranks, ranks)
    assert evaluate_pairs(encode, batches).metrics == pytest.approx(expected)
    assert set(read) == ({20} if pool_type == "last" else {8, 16} if group_rank() == 0 else {8})


def check_bad_samples() -> None:
    """The limit holds for the samples of all ranks together: 10 of 30 may be bad."""
    loader = SimpleNamespace(bad_counts={"bad": 6 // group_size()}, dataset=range(30), max_bad_fraction=0.01)
    assert count_bad_samples(loader) == {"bad": 6}  # type: ignore[arg-type]  # a stand-in
    loader.bad_counts["no label"] = 6 // group_size()
    with pytest.raises(DataError, match="6 bad, 6 no label among 30 samples, over the limit 0"):
        count_bad_samples(loader)  # type: ignore[arg-type]


def checks(world_size: int) -> dict[str, Callable[[], None]]:
    """Return the checks of one launch by name."""
    result: dict[str, Callable[[], None]] = {}
    for image_count, captions, tile_budget_mib in itertools.product((1, 2, 63), (1, 3), (128, TINY_MIB)):
        name = f"retrieval, {image_count} images, {captions} captions each, tiles of {tile_budget_mib} MiB"
        result[name] = partial(check_retrieval, image_count, captions, tile_budget_mib)
    for tile_budget_mib in (128, 1e-4):
        result[f"ties, tiles of {tile_budget_mib} MiB"] = partial(check_ties, tile_budget_mib)
    result["data errors on every rank"] = check_data_errors
    result["examples"] = check_examples
    for class_count, image_count in ((1, 1), (2, 3), (7, 40), (23, 101)):
        name = f"zero-shot, {class_count} classes, {image_count} images"
        result[name] = partial(check_zero_shot, class_count, image_count)
    for layout in ("one caption", "several captions", "image repeated"):
        result[f"retrieval, {layout}"] = partial(check_pairs, layout)
    result["loader errors on every rank"] = check_loader_errors
    result["bad samples of all ranks"] = check_bad_samples
    if world_size == 2:
        for pool_type in ("last", "eos"):
            result[f"ZeRO-3, {pool_type}"] = partial(check_zero_3, pool_type)
    return result


def run_all_checks() -> Outcome:
    return run_checks(checks(group_size()))


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[Outcome]]:
    """Outcomes of every rank by world size."""
    return {1: [run_all_checks()], **{world_size: run_ranks(run_all_checks, world_size) for world_size in (2, 3)}}


@pytest.mark.parametrize(
    ("world_size", "name"), [(world_size, name) for world_size in WORLD_SIZES for name in checks(world_size)]
)
def test_every_rank_has_the_results_of_one_process(
    outcomes: dict[int, list[Outcome]], world_size: int, name: str
) -> None:
    assert_passed(outcomes[world_size], name)
