"""CoCa's decoder and its loss against open_clip's own model and loss, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from megaclip.models import build_model, caption_decoder, meta_model
from megaclip.models.caption_decoder import CaptionDecoder
from megaclip.models.descriptions import load_model_config
from megaclip.models.open_clip_keys import to_open_clip
from megaclip.objectives import Caption
from megaclip.open_clip_package import import_open_clip
from tests.open_clip_families import COCA, CUT_CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family

CASES = {
    "attentional pooling": {"text_cfg": {"pad_id": 3}},
    "patch tokens": {"vision_cfg": {"attentional_pool": False}, "init_logit_bias": -3.0},
}


def captions() -> torch.Tensor:
    """Return captions of 1 to all tokens, without id 3, padded with 0."""
    tokens = torch.randint(4, VOCAB_SIZE, (5, CUT_CONTEXT_LENGTH), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate((1, 9, 17, 2, CUT_CONTEXT_LENGTH)):
        tokens[row, length:] = 0
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_features_losses_and_gradients_equal_open_clips(tmp_path, monkeypatch, case):
    monkeypatch.setattr(caption_decoder, "LOGITS_AT_ONCE", 7 * VOCAB_SIZE)  # several parts, the last one smaller
    config, tokens = family(COCA, tmp_path).replace(**CASES[case]), captions()
    pad_id = config.text_cfg.pad_id
    tokens = tokens.where(tokens != 0, pad_id)
    images = torch.randn(5, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.float64)
    torch.manual_seed(0)
    model, package = build_model(config).double().train(), import_open_clip()
    description = config.to_open_clip()
    del description["custom_text"]
    theirs = package.CoCa(**description, pad_id=pad_id).double().train()
    theirs.load_state_dict(to_open_clip(model.state_dict(), config))  # equal names and shapes

    expected = theirs(images, tokens)
    expected.pop("logit_bias", None)
    losses = package.loss.CoCaLoss(2.0, 1.0, pad_id=pad_id)(**expected)
    sum(losses).backward()
    model.objective = Caption()
    model.objective.attach(model)
    counts = model.objective.counts(tokens, {})
    count = counts["caption"]
    assert count == int((tokens[:, 1:] != pad_id).sum())
    received = {"pair": {"fields": {}, "counts": counts, "is_repeated": False}}
    x, y, *_, results = model(images, tokens, None, received)
    caption_sum = results["pair"]["caption"]
    logits = x @ y.T * model.logit_scale.exp()
    contrastive = (F.cross_entropy(logits, torch.arange(5)) + F.cross_entropy(logits.T, torch.arange(5))) / 2
    torch.testing.assert_close((contrastive, 2 * caption_sum / count), losses, rtol=1e-12, atol=1e-12)
    (contrastive + 2 * caption_sum / count).backward()
    ours = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    torch.testing.assert_close(to_open_clip(ours, config), gradients, rtol=1e-9, atol=1e-11)


class OwnAttention(torch.nn.Module):
    """An attention module that takes none of the options of `nn.MultiheadAttention`, as in open_clip 4."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, k_x=None, v_x=None, attn_mask=None):
        others = (each if each is not None else x for each in (k_x, v_x))
        return self.inner(x, *others, need_weights=False, attn_mask=attn_mask)[0]


def test_blocks_with_another_attention_module_compute_the_same(tmp_path):
    decoder, tokens = build_model(family(COCA, tmp_path)).text_decoder, captions()
    width = decoder.ln_final.weight.shape[0]
    states = torch.randn(5, 4, width), torch.randn(5, CUT_CONTEXT_LENGTH, width)
    expected = decoder(*states, tokens)
    methods = {"attention": lambda self, q_x, k_x, v_x, attn_mask: self.attn(q_x, k_x, v_x, attn_mask)}
    for block in decoder.resblocks:
        block.attn = OwnAttention(block.attn)
        block.__class__ = type("Block", (type(block).__base__,), methods)
    decoder.attn_mask = decoder._buffers.pop("attn_mask")
    weights = {name: value.clone() for name, value in decoder.state_dict().items()}
    again = CaptionDecoder(decoder, decoder.pad_id)
    again.load_state_dict(weights)
    torch.testing.assert_close(again(*states, tokens), expected)


@pytest.mark.parametrize("labels", [[], [0, 4, 4, 1, 3]])
def test_no_labels_have_no_loss_and_zero_gradients(labels):
    hidden = torch.randn(len(labels), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    arguments = hidden, weight, torch.tensor(labels, dtype=torch.int64)
    total = caption_decoder.linear_cross_entropy(*arguments)
    expected = F.cross_entropy(hidden @ weight, arguments[2], reduction="sum")
    torch.testing.assert_close(total, expected)
    found, wanted = (torch.autograd.grad(each, (hidden, weight)) for each in (total, expected))
    torch.testing.assert_close(found, wanted)


def test_initial_values_of_the_last_projection(tmp_path):
    """open_clip leaves the values of fresh memory there."""
    weight = build_model(family(COCA, tmp_path)).text_decoder.text_projection
    assert weight.detach().std() * math.sqrt(len(weight)) == pytest.approx(1, abs=0.1)


def test_words_that_the_decoder_has_no_logit_for_are_no_labels():
    """RoBERTa has 50,265 words, and open_clip's decoder 49,408 logits. Its padding is 1."""
    model = meta_model(load_model_config("coca_roberta-ViT-B-32"))
    assert model.text_decoder.label_count(torch.tensor([[0, 5, 50264, 49407, 2, 1, 1]])) == 3
