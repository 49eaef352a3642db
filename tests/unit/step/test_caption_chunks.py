"""Lengths of captions by the text tower's own pooling rule, and the chunks that they are sorted and cut into."""

import logging

import pytest
import torch

from megaclip.comm.parallelism import ONE_RANK
from megaclip.data import ImageTransform
from megaclip.models import TextConfig, build_model, load_model_config
from megaclip.models.packing import Pieces
from megaclip.models.text import CUT_MULTIPLE, caption_lengths, cut_length, is_cut_exact, reason_not_to_cut
from megaclip.step.batch import DeviceFeed
from megaclip.step.caption_chunks import CaptionChunks, division_of_captions
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed.memory_batch import MemoryBatch, PlainEngine, cross_entropy
from tests.tolerances import FEATURES, TOWER_GRADIENT, assert_close, assert_far

EOS = 2
LENGTHS = [12, 5, 24, 2, 9, 17, 9, 1, 8, 16]
"""Number of tokens of each caption. The caption of 1 has no end of text, and that of 24 fills the context."""


def text_model(**text):
    torch.manual_seed(0)
    config = load_model_config("demo-tiny").replace(text_cfg={"eos_id": EOS, **text})
    return build_model(config).double()


def tokens_of(pool_type: str) -> torch.Tensor:
    """Return tokens (10, 24) of captions that end at LENGTHS.

    Random tokens and another end of text follow each caption's end.
    """
    generator = torch.Generator().manual_seed(1)
    end, words = (511, (3, 511)) if pool_type == "argmax" else (EOS, (3, 512))
    tokens = torch.randint(*words, (len(LENGTHS), 24), generator=generator)
    for row, length in zip(tokens, LENGTHS, strict=True):
        if length > 1:
            row[[length - 1, -1]] = end
        elif pool_type == "argmax":
            row[0] = end
    return tokens


def test_lengths_end_with_the_pooled_token():
    for pool_type in ("argmax", "eos"):
        config = text_model(pool_type=pool_type).config.text_cfg
        assert caption_lengths(tokens_of(pool_type), config).tolist() == LENGTHS
        assert caption_lengths(tokens_of(pool_type).int(), config).tolist() == LENGTHS
    blank = torch.zeros(1, 24, dtype=torch.int32)
    assert caption_lengths(blank, TextConfig(pool_type="argmax")).tolist() == [1]
    assert caption_lengths(blank, TextConfig(pool_type="eos")).tolist() == [1]


@pytest.mark.parametrize("pool_type", ["argmax", "eos", "first", "last"])
@pytest.mark.parametrize("no_causal_mask", [False, True])
def test_features_depend_on_no_token_behind_the_pooled_one_exactly_where_captions_are_cut(pool_type, no_causal_mask):
    """With pool_type "first" the second token has no effect either, but such captions have no length."""
    model = text_model(pool_type=pool_type, no_causal_mask=no_causal_mask)
    tokens = tokens_of(pool_type)[:, :-1]  # without the second end of text
    changed = tokens.clone()
    for row, length in zip(changed, LENGTHS, strict=True):
        row[length:] = 7
    with torch.no_grad():
        features, others = model(None, tokens)[1], model(None, changed)[1]
    text = model.config.text_cfg
    if is_cut_exact(text) or (pool_type == "first" and not no_causal_mask):
        assert_close(features, others, FEATURES["float64"])
    else:
        assert_far(features, others, FEATURES["float64"], "features that ignore the padding")
    assert is_cut_exact(text) == (pool_type in ("argmax", "eos") and not no_causal_mask)
    assert (reason_not_to_cut(text) is None) == is_cut_exact(text)


@pytest.mark.parametrize(("text_chunks", "positions"), [(1, 160), (3, 144)])
def test_a_step_encodes_fewer_positions_and_has_the_gradients_of_padded_captions(text_chunks, positions):
    model, padded = text_model(pool_type="argmax"), text_model(pool_type="argmax")
    size, tokens = model.config.vision_cfg.image_size, tokens_of("argmax")[:9]
    pixels = torch.randint(256, (9, 3, size, size), dtype=torch.uint8)
    feed = DeviceFeed(torch.device("cpu"), torch.float64, ImageTransform(size).normalise)
    batch = MemoryBatch(pixels.chunk(3), tokens, feed, text_chunks=text_chunks, cut=model.config.text_cfg)
    engine, seeds = PlainEngine(model), RandomState(seed=0, step=0, replica=0)
    accumulate_gradients(engine, cross_entropy, batch, lambda: [torch.zeros(1)], seeds, coalesce=False)
    x, y, _ = padded(ImageTransform(size).normalise(pixels, torch.float64), tokens)
    cross_entropy(x, y, torch.ones(1)).backward()
    for name, parameter in padded.text.named_parameters():
        assert_close(model.text.get_parameter(name).grad, parameter.grad, TOWER_GRADIENT, name)
    assert engine.text_positions == 2 * positions  # of 2 x 9 x 24: the passes without a graph and with one


def test_an_evaluation_cuts_captions_unless_they_must_keep_their_padding():
    tokens = tokens_of("eos")
    short = tokens[[row for row, length in enumerate(LENGTHS) if length <= 12]]
    cuts, keeps = (text_model(pool_type=pool_type) for pool_type in ("eos", "last"))
    assert torch.equal(cuts.cut_captions(short), short[:, :16]) and torch.equal(cuts.cut_captions(tokens), tokens)
    assert keeps.cut_captions(short) is short


def test_captions_are_cut_at_multiples_and_at_the_context_length():
    config = TextConfig(context_length=77)
    assert CUT_MULTIPLE == 8
    assert [cut_length(tokens, config) for tokens in (1, 8, 9, 16, 72, 73, 77)] == [8, 8, 16, 16, 72, 77, 77]
    assert len({cut_length(tokens, config) for tokens in range(1, 78)}) == 10


def chunks_of(count: int, lengths=LENGTHS) -> CaptionChunks:
    """Return chunks of captions whose first token is their row."""
    tokens = torch.zeros(len(lengths), 24, dtype=torch.int32)
    for row, length in enumerate(lengths):
        tokens[row, 0] = 100 + row
        tokens[row, 1:length] = 1
        if length > 1:
            tokens[row, length - 1] = EOS
    config = TextConfig(context_length=24, pool_type="eos", eos_id=EOS)
    return CaptionChunks.cut(tokens, count, config)


def test_chunks_hold_every_caption_whole_the_longest_first():
    chunks = chunks_of(5)
    tokens = list(chunks)
    assert [tuple(chunk.shape) for chunk in tokens] == [(2, 24), (2, 16), (2, 16), (2, 8), (2, 8)]
    assert chunks.pieces == [((2, length),) for length in (24, 16, 16, 8, 8)]
    rows = [int(row[0]) - 100 for chunk in tokens for row in chunk]
    assert rows == chunks.order.tolist() == [2, 5, 9, 0, 4, 6, 8, 1, 3, 7]  # rows of equal length keep their order
    for chunk, index in zip(tokens, chunks.order.split(2), strict=True):
        assert torch.equal(chunk, chunks.tokens[index][:, : chunk.shape[1]])
        assert not chunks.tokens[index][:, chunk.shape[1] :].any()
    assert chunks.mean_tokens == pytest.approx(sum(LENGTHS) / len(LENGTHS))
    assert chunks.saved_share == pytest.approx(1 - 72 / 120)
    assert chunks.summary() == (
        "captions of 10.3 tokens on average, in chunks cut at 24, 16, 16, 8, 8 of 24: 40% of the text tower's token "
        "positions are saved"
    )


def test_one_chunk_is_cut_and_keeps_its_order():
    chunks = chunks_of(1, [3, 9, 5])
    (tokens,) = chunks
    assert chunks.order is None and torch.equal(tokens, chunks.tokens[:, :16])


def test_the_first_chunk_is_divided_into_pieces_of_an_eighth_an_eighth_a_quarter_and_a_half():
    lengths = [3, 24, 3, 9, 12, 2, 16, 3, 17, 2, 3, 4, 16, 5, 3, 2, 2, 1]
    chunks = chunks_of(2, lengths)
    assert chunks.pieces == [((2, 24), (7, 16)), ((9, 8),)]  # neighbours of equal length are one piece
    assert (chunks.pieces_of(0), chunks.pieces_of(1)) == (chunks.pieces[0], None)
    assert [tuple(tokens.shape) for tokens in chunks] == [(9, 24), (9, 8)]
    assert chunks.saved_share == pytest.approx(1 - (2 * 24 + 7 * 16 + 9 * 8) / (18 * 24))
    one = chunks_of(1, lengths)
    assert one.pieces == [((2, 24), (6, 16), (10, 8))]
    assert [tuple(tokens.shape) for tokens in one] == [(18, 24)]


def test_captions_of_one_length_are_one_piece_and_keep_their_order():
    """The captions must not be divided into pieces of equal length.

    Attention would run four times and the results would be copied into one tensor, without any saving.
    """
    for count in (1, 2):
        chunks = chunks_of(count, [20, 17] * 8)
        assert chunks.order is None and chunks.pieces == [((16 // count, 24),)] * count
        assert torch.equal(torch.cat(list(chunks)), chunks.tokens)
        # Pieces as on ranks whose captions have other lengths; the next test explains them.
        assert chunks.pieces_of(0) == chunks.pieces[0] and chunks_of(count, [20, 1] * 8).pieces_of(1) is None


def gradient_order(pieces: Pieces) -> list[str]:
    """Return the parameters of a text tower in the order in which a backward pass finishes their gradients."""
    text = text_model().text
    names: list[str] = []
    for name, parameter in text.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    tokens = torch.full((16, 24), 9)
    tokens[:, 7] = EOS
    text(tokens, pieces).square().sum().backward()
    return names


def test_gradients_are_ready_in_one_order_whatever_the_pieces():
    """DeepSpeed sums the gradients of all ranks in this order. It does not compare names."""
    first, *others = map(
        gradient_order,
        [((16, 8),), ((2, 24), (14, 8)), ((2, 24), (2, 16), (12, 8)), ((2, 24), (2, 20), (4, 16), (8, 8))],
    )
    assert len(first) > 20 and all(other == first for other in others)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_the_log_gives_the_reason_why_captions_keep_their_padding(log):
    last = TextConfig(pool_type="last")
    for setting, text in (("auto", TextConfig()), (True, TextConfig()), (False, TextConfig()), ("auto", last)):
        division_of_captions(setting, text, tensor_ranks=1, ranks=ONE_RANK, pairs=False)
    assert log.messages == [
        "captions are encoded with their padding, 77 tokens each: megaclip.cut_captions is false",
        'captions are encoded with their padding, 77 tokens each: the text tower\'s "pool_type" is "last"',
    ]
