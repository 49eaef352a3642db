"""Compare FastClipLoss on 1 to 4 ranks with a reference in one process, to 1e-10 in float64.

Every variant, exchange and reduction takes several steps. The test compares values, feature gradients under the
reduction contract, temperature gradients, state and temperatures. Samples are new, known, or twice in a batch.
"""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.errors import CheckpointError, DataError
from megaclip.losses import FastClipLoss
from megaclip.losses.fastclip import inner_rate
from megaclip.losses.settings import VARIANTS
from tests.distributed.fastclip_oracle import (
    ADAM_EPS,
    BETAS,
    BOUNDS,
    EPS,
    RATE,
    RHO,
    Oracle,
    batch_g,
    gamma_of,
    individual,
    learned,
)
from tests.distributed.harness import run_ranks
from tests.tolerances import FASTCLIP, Comparison, assert_close, compare, exceeded

SAMPLES, DIMENSION, TAU = 26, 5, 0.3
BATCH = 18
BATCH_OF_WORLD = {4: 20}  # BATCH is not a multiple of four ranks
EPOCHS = (0.0, 0.6, 1.4, 7.0)
GAMMA_MIN, GAMMA_EPOCHS = 0.4, 3.0
# Last value: the samples' state is fetched before the call of the loss, or by the loss.
WAYS = [
    ("ring", "feature", "fetched before"),
    ("ring", "scalar", "fetched by the loss"),
    ("all_gather", "feature", "fetched by the loss"),
    ("all_gather", "scalar", "fetched before"),
]


def batch_of(step: int, batch: int | None = None) -> tuple[Tensor, Tensor, list[int]]:
    """Return features and ids of a step. In every step except the first, ids repeat within the batch."""
    batch = batch or BATCH_OF_WORLD.get(group_size(), BATCH)
    generator = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, batch, DIMENSION, generator=generator, dtype=torch.float64)
    ids = torch.randperm(SAMPLES, generator=generator)[:batch]
    if step:
        ids[batch // 2 :] = ids[torch.randint(batch, (batch - batch // 2,), generator=generator)]
    return F.normalize(x, dim=1), F.normalize(x + noise, dim=1), ids.tolist()


def make_loss(variant: str, **options) -> FastClipLoss:
    settings = {
        "samples": SAMPLES,
        "gamma_min": GAMMA_MIN,
        "gamma_epochs": GAMMA_EPOCHS,
        "gamma_per": "step",
        "rho": RHO,
        "eps": EPS,
        "temperature": TAU,
        "temperature_min": BOUNDS[0],
        "temperature_max": BOUNDS[1],
        "temperature_learning_rate": RATE,
        "temperature_betas": BETAS,
        "temperature_eps": ADAM_EPS,
        "state_dtype": torch.float64,
    }
    return FastClipLoss(variant, **{**settings, **options}).double()


def local_part(whole: Tensor) -> Tensor:
    return whole.chunk(group_size())[group_rank()]


def one_step(loss: FastClipLoss, step: int, epoch: float, fetched_before: bool = False):
    """Compute value and gradients of this rank, then update. Return both."""
    x, y, ids = batch_of(step)
    own_ids = local_part(torch.tensor(ids))
    given = loss.fetch(own_ids) if fetched_before else own_ids
    images, texts = (local_part(whole).clone().requires_grad_() for whole in (x, y))
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    value = loss(images, texts, scale, ids=given, epoch=epoch)
    value.backward()
    own = loss.temperature.log_scale.grad
    own = None if own is None else own.clone()
    assert scale.grad.item() == 0
    loss.step()
    return value.detach(), images.grad, texts.grad, own


def check_against_oracle(ways: list[tuple[str, str, str]] = WAYS) -> list[str]:
    return [problem for variant in VARIANTS for problem in compare_steps(variant, ways)]


def compare_steps(variant: str, ways: list[tuple[str, str, str]]) -> list[str]:
    """Return the differences between the given exchanges and reductions of one variant and the reference."""
    found = []
    oracle = Oracle(variant, SAMPLES, TAU)
    losses = {}
    for way in ways:
        exchange, reduction, _ = way
        losses[way] = make_loss(variant, exchange=exchange, reduction=reduction)
    for step, epoch in enumerate(EPOCHS):
        gamma = gamma_of(VARIANTS[variant].gamma_schedule, epoch, GAMMA_MIN, GAMMA_EPOCHS)
        taus = torch.stack([oracle.tau[sample, side].detach() for sample in batch_of(step)[2] for side in (0, 1)])
        expected = oracle.step(*batch_of(step), gamma)
        for way, loss in losses.items():
            value, d_image, d_text, d_scale = one_step(loss, step, epoch, way[2] == "fetched before")
            pairs = {
                "value": (torch.tensor(value, dtype=torch.float64), expected.loss),
                "d_image": (d_image, group_size() * local_part(expected.d_image)),
                "d_text": (d_text, group_size() * local_part(expected.d_text)),
                **state_pairs(loss, oracle),
            }
            if learned(variant):
                pairs["d_log_scale"] = (d_scale, expected.d_log_scale)
                pairs["log_scale"] = (loss.temperature.log_scale, oracle.log_scale)
            elif d_scale is not None:
                found.append(f"{variant} has a temperature gradient")
            if individual(variant):  # for a model's logit_scale: the mean over the batch before the update
                pairs["log_scale"] = (loss.log_scale, taus.log().mean().neg().reshape(1))
            case = f"{variant} {way} step {step}"
            found += exceeded(distance(*pair, f"{name} {case}") for name, pair in pairs.items())
    return found


def distance(got: Tensor, wanted: Tensor, what: str) -> Comparison:
    return compare(got, wanted, FASTCLIP, what)


def state_pairs(loss: FastClipLoss, oracle: Oracle) -> dict[str, tuple[Tensor, Tensor]]:
    """Return this rank's state of the samples seen so far, and that of the reference."""
    seen = torch.tensor(sorted({sample for sample, _ in oracle.u}))
    mine = seen[seen % group_size() == group_rank()]
    rows = loss.state.values[mine // group_size()]
    wanted = torch.tensor([[oracle.u[i, 0], oracle.u[i, 1]] for i in mine.tolist()], dtype=torch.float64)
    pairs = {"u": (rows[:, :2].exp(), wanted.reshape(-1, 2))}
    if individual(oracle.variant):
        tau = [[oracle.tau[i, side].item() for side in (0, 1)] for i in mine.tolist()]
        pairs["tau_i"] = (rows[:, 2:4], torch.tensor(tau, dtype=torch.float64).reshape(-1, 2))
    return pairs


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_every_variant_exchange_and_reduction_equals_the_reference(world_size):
    for found in run_ranks(check_against_oracle, world_size):
        assert found == []


def test_every_variant_equals_the_reference_on_two_nodes():
    """On two nodes the ring has two levels."""
    ways = [way for way in WAYS if way[0] == "ring"]
    for found in run_ranks(check_against_oracle, 4, ways, environment={"LOCAL_WORLD_SIZE": "2"}):
        assert found == []


# -------------------------------------------------------------------------------------------------------------- resume


def steps_from(loss: FastClipLoss, first: int, last: int) -> list[float]:
    return [one_step(loss, step, EPOCHS[step])[0] for step in range(first, last)]


def save_after_two(variant: str) -> tuple[bytes, list[float]]:
    loss = make_loss(variant)
    steps_from(loss, 0, 2)
    stream = io.BytesIO()
    torch.save(loss.checkpoint_state(), stream)
    return stream.getvalue(), steps_from(loss, 2, len(EPOCHS))


def resume(variant: str, parts: list[bytes]) -> list[float]:
    loss = make_loss(variant)
    loss.load_checkpoint_state([torch.load(io.BytesIO(part), weights_only=True) for part in parts])
    return steps_from(loss, 2, len(EPOCHS))


def save_all() -> list:
    return [save_after_two(variant) for variant in VARIANTS]


def resume_all(saved: list[list]) -> list:
    return [resume(variant, parts) for variant, parts in zip(VARIANTS, saved, strict=True)]


@pytest.fixture(scope="module")
def saved_by_two() -> list[list]:
    return run_ranks(save_all, 2)


@pytest.mark.parametrize("loaded_by", [2, 3])
def test_resume_is_exact_at_any_world_size(saved_by_two, loaded_by):
    """Resume on the same number of ranks with the same bits. Other numbers of ranks give losses within the bound.

    Bits are compared on the same machine only, with the same instruction set and number of threads.
    """
    parts = [[rank[case][0] for rank in saved_by_two] for case in range(len(saved_by_two[0]))]
    expected = [losses for _, losses in saved_by_two[0]]
    for resumed in run_ranks(resume_all, loaded_by, parts):
        if loaded_by == 2:
            assert resumed == expected
        for got, wanted in zip(resumed, expected, strict=True):
            assert_close(got, wanted, FASTCLIP)


# ------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "isogclr"])
def test_whole_dataset_in_one_batch_gives_the_gradient_of_the_objective(variant):
    """With gamma = 1 and the dataset as the batch, the gradient equals that of the papers' objective, including eps."""
    x, y, _ = batch_of(0)
    loss = make_loss(variant, samples=BATCH)
    ours = [t.clone().requires_grad_() for t in (x, y)]
    value = loss(*ours, ids=torch.arange(BATCH), epoch=0.0)
    value.backward()
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    log_scale = loss.temperature.log_scale.detach().clone().requires_grad_()
    if individual(variant):
        taus = [torch.full((BATCH,), TAU, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    else:
        taus = [torch.exp(-log_scale), torch.exp(-log_scale)]
    g1, g2 = batch_g(a, b, *taus)
    if variant == "fastclip_v0":
        objective = (torch.log(EPS + g1) + torch.log(EPS + g2)).mean()
    else:
        rho = RHO if variant in ("fastclip_v2", "fastclip_v3") else 0.0
        objective = (taus[0] * (torch.log(EPS + g1) + rho) + taus[1] * (torch.log(EPS + g2) + rho)).mean()
    objective.backward()
    assert_close(value, objective, FASTCLIP)
    assert_close(ours[0].grad, a.grad, FASTCLIP)
    assert_close(ours[1].grad, b.grad, FASTCLIP)
    if learned(variant):
        assert_close(loss.temperature.log_scale.grad, log_scale.grad, FASTCLIP)
    if individual(variant):
        got = loss._pending.temperature_gradient / BATCH
        assert_close(got, torch.stack([t.grad for t in taus], 1), FASTCLIP)


def test_nothing_overflows_at_temperature_a_hundredth():
    """Every positive is the worst match: s_ij - s_ii is 2, so exp(200) overflows float32."""
    x = F.normalize(torch.ones(6, 4), dim=1).requires_grad_()
    y = (-x.detach()).clone()
    y[3:] *= -1
    loss = FastClipLoss("fastclip_v3", samples=6, temperature=0.01)
    for _ in range(3):
        y = y.detach().requires_grad_()
        value = loss(x, y, ids=torch.arange(6), epoch=1.0)
        value.backward()
        loss.step()
        assert value.isfinite() and x.grad.isfinite().all() and y.grad.isfinite().all()
    # tau * log g is about 2 for the three bad pairs (images: the log of 3/5 e^200), and about 0 for the others.
    assert 0 < value.item() < 4 + 2 * 6.5


@pytest.mark.parametrize(("epoch", "expected"), [(0, 1.0), (1, 0.95), (9, 0.6), (18, 0.2), (30, 0.2)])
def test_inner_rate_follows_the_published_cosine(epoch, expected):
    got = inner_rate("cosine", epoch, minimum=0.2, epochs=18)
    assert got == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * epoch / 18)) / 2 if epoch < 18 else 0.2)
    assert got == pytest.approx(expected, abs=0.06)
    assert inner_rate("constant", epoch, minimum=0.2, epochs=18) == (1.0 if epoch == 0 else 0.2)


def test_inner_rate_per_epoch_is_constant_within_an_epoch():
    states = []
    for per, epoch in (("epoch", 1.0), ("epoch", 1.9), ("step", 1.9)):
        loss = make_loss("fastclip_v1", gamma_per=per)
        for step in (0, 1):
            x, y, _ = batch_of(step)
            x.requires_grad_()
            loss(x, y, ids=torch.tensor(batch_of(0)[2]), epoch=0.0 if step == 0 else epoch).backward()
            loss.step()
        states.append(loss.state.values.nan_to_num())
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_wrong_ids_batches_and_checkpoints_are_refused():
    x, y, _ = batch_of(0, 4)
    loss = make_loss("fastclip_v3")
    with pytest.raises(DataError, match="sample id 26 is outside the dataset of 26 samples"):
        loss(x, y, ids=torch.tensor([0, 1, 26, 3]), epoch=0.0)
    with pytest.raises(DataError, match="sample id -1 is outside"):
        loss(x, y, ids=torch.tensor([0, 1, -1, 3]), epoch=0.0)
    with pytest.raises(DataError, match="one int64 sample id per row"):
        loss(x, y, ids=torch.tensor([0, 1, 2]), epoch=0.0)
    with pytest.raises(ValueError, match="at least 2 samples"):
        loss(x[:1], y[:1], ids=torch.tensor([0]), epoch=0.0)
    with pytest.raises(RuntimeError, match="before step"):
        loss.step()
    other = make_loss("fastclip_v3", samples=27)
    with pytest.raises(CheckpointError, match="saved with samples 26, this run has 27"):
        other.load_checkpoint_state([loss.checkpoint_state()])
    with pytest.raises(CheckpointError, match="with the loss fastclip_v3, not fastclip_v1"):
        make_loss("fastclip_v1").load_checkpoint_state([loss.checkpoint_state()])
    first_of_two = loss.checkpoint_state()
    first_of_two["samples"] |= {"world_size": 2, "values": first_of_two["samples"]["values"][::2]}
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks, but only the parts of ranks \[0\] were found"):
        loss.load_checkpoint_state([first_of_two])
    with pytest.raises(CheckpointError, match="holds no per-sample state"):
        loss.load_checkpoint_state([])
