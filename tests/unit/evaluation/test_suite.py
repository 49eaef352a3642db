"""`evaluate` on one process: groups of captions, bad samples, missing data. distributed/test_evaluation.py: metrics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaclip.data.batch import BadSample, RawSample
from megaclip.errors import DataError
from megaclip.evaluation import ModelEncoder, evaluate, group_captions
from megaclip.evaluation.caption_groups import CaptionGroups, encode_captions
from tests.evaluation_oracle import image_facts, raw_pair, retrieval_by_sorting, unit_features

DIM, BATCH = 8, 4
WORDS = torch.from_numpy(unit_features(np.random.default_rng(0), 500, DIM))


def tokenizer(texts: list[str]) -> torch.Tensor:
    """Return one token per text: the number in the text."""
    return torch.tensor([[int("".join(filter(str.isdigit, text)) or 0)] for text in texts])


def encode(
    images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return None if images is None else images[:, 0, 0], None if tokens is None else WORDS[tokens[:, 0]]


class Pairs:
    """Dataset in which equal features are equal images; `batches` returns the batches of an evaluation loader."""

    def __init__(self, features: np.ndarray, captions: list[str]) -> None:
        self.features, self.captions = features, captions

    def __len__(self) -> int:
        return len(self.captions)

    def read(self, sample_id: int) -> RawSample:
        return raw_pair(self.features[sample_id], self.captions[sample_id], sample_id)

    def batches(self) -> list[SimpleNamespace]:
        padding = -len(self) % BATCH
        poison = np.full((padding, DIM), np.nan, dtype=np.float32)
        images = torch.from_numpy(np.concatenate([self.features, poison]))[:, None, None, :]
        tokens = torch.cat([tokenizer(self.captions), torch.zeros(padding, 1, dtype=torch.int64)])
        ids = torch.cat([torch.arange(len(self)), torch.full((padding,), -1)])
        parts = [part.split(BATCH) for part in (images, tokens, ids)]
        return [
            SimpleNamespace(images=i, tokens=t, ids=d, **image_facts(i.numpy())) for i, t, d in zip(*parts, strict=True)
        ]


def noisy_images(words: np.ndarray) -> np.ndarray:
    features = WORDS[torch.from_numpy(words)].numpy() + 0.8 * unit_features(np.random.default_rng(1), len(words), DIM)
    return (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def test_captions_of_equal_images_form_one_group() -> None:
    images = np.arange(3, dtype=np.float32)[:, None].repeat(DIM, axis=1)[[0, 1, 0, 2, 1]]
    groups = group_captions(Pairs(images, ["a 1", "b 2\n\n c 3 ", "d 4", "", "e 5"]))
    assert groups.image_of_pair.tolist() == [0, 1, 0, 3, 1]
    assert groups.texts == ["a 1", "b 2", "c 3", "d 4", "e 5"]  # the pair without a caption is a bad sample
    assert groups.image_ids.tolist() == [0, 1, 1, 0, 1]
    assert groups.leading_ids.tolist() == [0, 1, -1, -1, -1]
    assert groups.image_ids_of(torch.tensor([4, 1, -1, 2, 0])).tolist() == [-1, 1, -1, -1, 0]


def test_an_image_whose_first_pair_has_no_caption_keeps_its_others() -> None:
    images = np.arange(2, dtype=np.float32)[:, None].repeat(DIM, axis=1)[[0, 0, 1]]
    groups = group_captions(Pairs(images, ["", "a cat", "a dog"]))
    assert groups.of_images(torch.tensor([False, True, True])).texts == ["a cat", "a dog"]
    assert groups.image_ids_of(torch.tensor([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize("several_captions", [False, True])
def test_bad_samples_are_left_out(several_captions: bool) -> None:
    """Pair 3 cannot be read and image 0 cannot be decoded. The loader gives both id -1; their captions are removed."""
    words = np.arange(23)
    pairs = Pairs(noisy_images(words), [f"word {word}" for word in words])
    batches = pairs.batches()
    batches[0].ids[[0, 3]] = -1
    batches[0].images[[0, 3]] = float("nan")
    groups = None
    if several_captions:
        good_read = pairs.read

        def read(sample_id: int) -> RawSample:
            if sample_id == 3:
                raise BadSample("damaged", "3")
            return good_read(sample_id)

        pairs.read = read  # type: ignore[method-assign]
        groups = group_captions(pairs)
    result = evaluate(encode, tokenizer=tokenizer, pairs=batches, captions=groups, example_count=40)
    kept = np.delete(words, [0, 3])
    assert result.metrics == pytest.approx(retrieval_by_sorting(pairs.features[kept], WORDS[kept].numpy(), kept, kept))
    assert result.examples is not None and result.examples.ids.tolist() == kept.tolist()


def test_missing_data_raises() -> None:
    with pytest.raises(DataError, match="got neither"):
        evaluate(encode, tokenizer=tokenizer)
    for captions in (None, CaptionGroups(torch.arange(2), [], torch.arange(0), torch.arange(0))):
        with pytest.raises(DataError, match="at least one batch"):
            evaluate(encode, tokenizer=tokenizer, pairs=[], captions=captions)


def test_model_encoder_casts_and_normalises() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, images: torch.Tensor | None, tokens: torch.Tensor | None) -> tuple:
            assert images is None or images.dtype == torch.bfloat16
            text = None if tokens is None else tokens.to(torch.bfloat16) * self.weight.bfloat16()
            return images, text, self.weight

    def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (pixels.float() / 2).to(dtype)

    model = ModelEncoder(Model(), normalise, device=torch.device("cpu"), image_dtype=torch.bfloat16)
    images, texts = model(torch.tensor([[3, 4]], dtype=torch.uint8), torch.tensor([[5, 12]]))
    assert images is not None and texts is not None and not texts.requires_grad
    torch.testing.assert_close(images, torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(texts, torch.tensor([[5 / 13, 12 / 13]]))
    assert model(images=torch.ones(1, 2, dtype=torch.uint8))[1] is None
    assert model(tokens=torch.ones(1, 2))[0] is None


def test_captions_of_similar_length_are_encoded_together_and_return_in_their_order() -> None:
    texts = [f"{'very ' * (7 * row % 10)}long text {row}" for row in range(10)]
    batches: list[list[int]] = []

    def recording(
        images: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        assert tokens is not None
        batches.append(tokens[:, 0].tolist())
        return encode(images, tokens)

    assert torch.equal(encode_captions(recording, texts, tokenizer, batch_size=4), WORDS[:10])
    lengths = [[len(texts[row]) for row in batch] for batch in batches]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert max(lengths[0]) <= min(lengths[1]) and max(lengths[1]) <= min(lengths[2])
