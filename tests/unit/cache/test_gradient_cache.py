"""`GradientCache` in one process, against one plain step: inputs, losses, scalars, autocast and errors."""

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

from megaclip import ClipLoss, Encoded, GradientCache
from megaclip.cache import kept_graphs
from megaclip.cache.inputs import blank_of
from megaclip.cache.kept_graphs import GraphBudget
from megaclip.errors import ConfigError, DataError

ROWS = 7
Pair = namedtuple("Pair", ["x", "flag"])


@dataclass(frozen=True)
class Page:
    """Inputs of one sample in each row."""

    x: Tensor
    name: str = field(default="page", init=False)


@dataclass(slots=True)
class Texts:
    """Inputs with an attention mask, and features that have as many columns as there are tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    lengths: Tensor
    features: Tensor


def encoder_and_inputs() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), torch.randn(ROWS, 4).double(), torch.randn(ROWS, 4).double()


def own_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda inputs: inputs),
    "NumPy": (lambda x: {"x": x.numpy()}, lambda each: torch.from_numpy(each["x"])),
    "dictionary": (lambda x: {"x": x, "on": True, "none": None, "factor": torch.tensor(1.0)}, lambda each: each["x"]),
    "BatchEncoding": (lambda x: BatchEncoding({"x": x}), lambda each: each.x),
    "dataclass": (Page, lambda each: each.x),
    "named tuple": (lambda x: Pair(x, 3), lambda each: each.x),
    "nested": (lambda x: ({"x": x}, "a"), lambda each: each[0]["x"]),
    "list": (list, torch.stack),
}


@pytest.mark.parametrize("keep", [0, 1, "all", "auto"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_of_any_structure_are_divided_by_samples(structure: str, keep: int | str) -> None:
    encoder, x, y = encoder_and_inputs()
    pack, unpack = STRUCTURES[structure]
    assert structure == "list" or unpack(blank_of(pack(x[:0]))).shape == (1, 4)
    log_scale = nn.Parameter(torch.tensor(0.5).double())
    own_loss(encoder(x), encoder(y), log_scale.exp()).backward()
    parameters = [*encoder.parameters(), log_scale]
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    rows: list[int] = []

    def encode(inputs: Any) -> Tensor:
        rows.append(len(unpack(inputs)))
        return encoder(unpack(inputs))

    cache = GradientCache(own_loss, keep=keep)
    loss = cache.step(Encoded(encode, pack(x), chunk=3), Encoded(encoder, y, chunk=2), scale=log_scale.exp())
    assert loss.shape == () and not loss.requires_grad
    assert rows == [3, 3, 1] + {0: [3, 3, 1], 1: [3, 1], "all": [], "auto": [3, 3, 1]}[keep]
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_no_samples_add_no_gradient_where_features_of_zeros_have_no_direction() -> None:
    weight = nn.Parameter(torch.randn(4, 3).double())
    x, gradients = torch.randn(ROWS, 4).double(), []

    def encode(x: Tensor) -> Tensor:
        return (x @ weight) / (x @ weight).norm(dim=1, keepdim=True)

    for others in ({}, {"negatives": Encoded(encode, x[:0], chunk=2)}, {"negatives": Encoded(encode, x[:0])}):
        weight.grad = None
        GradientCache(ClipLoss()).step(Encoded(encode, x, chunk=2), Encoded(encode, -x, chunk=3), 5.0, **others)
        gradients.append(weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Texts, namedtuple("NamedTexts", Texts.__slots__), BatchEncoding])
def test_chunks_by_tokens_are_sorted_cut_and_put_back_in_order(kind: type) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(9, 3).double()
    lengths = torch.tensor([2, 5, 1, 3, 5, 4, 1])
    mask = (torch.arange(6) < lengths[:, None]).long()
    inputs: Any = Texts(torch.randint(9, (ROWS, 6)), mask, lengths, torch.randn(ROWS, 6).double())
    values = {name: getattr(inputs, name) for name in Texts.__slots__}
    inputs = kind(values) if kind is BatchEncoding else kind(**values)
    shapes = []

    def encode(batch: Any) -> Tensor:
        shapes.append(tuple(batch.input_ids.shape))
        tokens = (table(batch.input_ids) * batch.attention_mask[..., None]).sum(1)
        return tokens + batch.lengths[:, None] + batch.features.sum(1, keepdim=True)

    weights = torch.randn(ROWS, 3).double()
    loss = GradientCache(lambda x: (x * weights).sum()).step(Encoded(encode, inputs, tokens=10))
    got = table.weight.grad.clone()
    assert shapes[:3] == [(2, 5), (2, 4), (3, 2)] and len(shapes) == 6
    table.weight.grad = None
    plain = (encode(inputs) * weights).sum()
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)
    torch.testing.assert_close(got, table.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("division", [{"chunk": 2}, {"tokens": 10}, {}])
def test_a_rank_without_hard_negatives_takes_part(division: dict[str, int]) -> None:
    encoder, x, _ = encoder_and_inputs()
    negatives = {"x": x[:0], "attention_mask": torch.ones(0, 4)}

    def loss(x: Tensor, negatives: Tensor) -> Tensor:
        assert negatives.shape == (0, 3)
        return x.sum() + negatives.sum()

    def encode(batch: dict) -> Tensor:
        return encoder(batch["x"].view(len(batch["x"]), -1, 2).flatten(1))  # as attention: fails without rows

    GradientCache(loss).step(Encoded(encoder, x, chunk=3), negatives=Encoded(encode, negatives, **division))
    torch.testing.assert_close(encoder.weight.grad, x.sum(0).expand(3, 4))


def test_a_users_own_split_and_a_loss_with_parameters() -> None:
    """Flattened patches: samples are not rows. The loss has a margin and slices of the features, two losses added."""
    encoder, _, _ = encoder_and_inputs()
    counts = [2, 3, 1, 2]
    patches, starts = torch.randn(8, 4).double(), [0, 2, 5, 6, 8]

    class Matryoshka(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.margin = nn.Parameter(torch.tensor(0.3).double())

        def forward(self, x: Tensor, *, labels: Tensor) -> Tensor:
            return sum(F.cross_entropy(x[:, :n] - self.margin * F.one_hot(labels, 3)[:, :n], labels) for n in (2, 3))

    def pool(batch: dict) -> Tensor:
        return torch.stack([part.mean(0) for part in encoder(batch["patches"]).split(batch["counts"])])

    def split(batch: dict) -> list[dict]:
        halves = ((0, 3), (3, 4))
        return [{"patches": patches[starts[a] : starts[b]], "counts": batch["counts"][a:b]} for a, b in halves]

    loss, labels = Matryoshka(), torch.tensor([0, 1, 1, 0])
    batch = {"patches": patches, "counts": counts}
    parameters = [*encoder.parameters(), loss.margin]
    loss(pool(batch), labels=labels).backward()
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    GradientCache(loss).step(Encoded(pool, batch, split=split), labels=labels)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    with pytest.raises(DataError, match=r"have tensors of \[4, 8\] rows, so.*split="):
        GradientCache(loss).step(Encoded(pool, batch, chunk=2), labels=labels)


CALLS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "module": lambda encoder: encoder,
    "function": lambda encoder: lambda inputs: encoder(inputs),
    "method": lambda encoder: encoder.forward,
    "partial": lambda encoder: functools.partial(lambda module, inputs: module(inputs), encoder),
}


@pytest.mark.parametrize(
    ("keep", "call"), [(0, "module"), (1, "function"), (0, "function"), (0, "method"), (0, "partial")]
)
def test_chunks_run_under_the_callers_autocast_and_statistics_change_once(keep: int, call: str) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    dtypes = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = [torch.cat([encoder(part) for part in each.split(4)]) for each in (x, y)]
        own_loss(*features, torch.tensor(1.0)).backward()
    expected = [parameter.grad.clone() for parameter in encoder.parameters()]
    statistics = encoder[1].running_mean.clone()
    encoder.zero_grad()
    encoder[1].reset_running_stats()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        dtypes.append(a.dtype)
        return own_loss(a, b, torch.tensor(1.0))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        GradientCache(loss, keep=keep).step(*(Encoded(CALLS[call](encoder), each, chunk=4) for each in (x, y)))
    assert dtypes == [torch.bfloat16]
    assert torch.equal(encoder[1].running_mean, statistics)
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=1e-3)


def test_weights_that_only_later_chunks_use_receive_gradients_under_autocast() -> None:
    """Autocast caches the weights that it casts. A cast without a graph must not be used again with one."""
    torch.manual_seed(0)
    first, second, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(6, 4)

    def encode(inputs: dict) -> Tensor:
        return (second if inputs["number"] else first)(inputs["x"])

    def split(whole: Tensor) -> list[dict]:
        return [{"x": part, "number": number} for number, part in enumerate(whole.split(2))]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        GradientCache(lambda y: y.float().square().sum()).step(Encoded(encode, x, split=split))
    assert first.weight.grad is not None and second.weight.grad is not None


def under_float16(function: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        return function()


def test_the_gradients_of_float16_autocast_are_scaled() -> None:
    """The gradients of the features are below the smallest float16, 6e-8, without their scale."""
    torch.manual_seed(0)
    encoder, x = nn.Linear(4, 3), torch.randn(6, 4)
    (encoder(x).square().sum() * 1e-9).backward()
    expected = [parameter.grad for parameter in encoder.parameters()]
    encoder.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    cache = GradientCache(lambda y: y.float().square().sum() * 1e-9, scaler=scaler)
    loss = under_float16(lambda: cache.step(Encoded(encoder, x, chunk=2)))
    assert loss.item() < 1e-6
    scaler.unscale_(torch.optim.SGD(encoder.parameters(), lr=0.0))
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.01, atol=1e-11)


def test_random_numbers_continue_after_a_step_as_without_a_second_encoding() -> None:
    encoder, x, _ = encoder_and_inputs()
    dropped = nn.Sequential(encoder, nn.Dropout(0.5))
    numbers = []
    for keep in (0, "all"):
        torch.manual_seed(1)
        GradientCache(lambda x: x.sum(), keep=keep).step(Encoded(dropped, x, chunk=2))
        numbers.append(torch.rand(3))
    assert torch.equal(*numbers)


@pytest.mark.parametrize(("duration_s", "fifth"), [(1.0, 5), (3.0, 0)])
def test_graphs_are_kept_after_two_steps_in_the_measured_free_memory(
    duration_s: float, fifth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten bytes per element of the first encoder's graphs, 2 of the second's; 1,000 bytes are free, 50 as a margin.

    The second step takes 2 s. The fourth takes `duration_s` per second of it, and then decides about the fifth.
    """
    now = [0.0]
    monkeypatch.setattr(kept_graphs.time, "perf_counter", lambda: now[0])
    memory = {
        "is_available": lambda: True,
        "mem_get_info": lambda: (1000, 1000),
        "max_memory_reserved": lambda: 300,
        "memory_reserved": lambda: 200,
        "synchronize": lambda: None,
    }
    for name, function in memory.items():
        monkeypatch.setattr(torch.cuda, name, function)
    kept, sizes = GraphBudget("auto"), [[20, 20, 10], [100, 30]]
    numbers = []
    for step in range(5):
        numbers.append(kept.number(sizes if step != 3 else [[40, 40], [100]]))
        for encoder, bytes_per_element in enumerate((10, 2)):
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
            kept.before_graph()
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda size=10 * bytes_per_element: size)
            kept.after_graph(encoder, 10)
        now[0] += duration_s if step == 3 else 2.0
        kept.step_done()
    # 850 bytes: 220 + 220 + 110 + 220 fit, and then 66 more; of larger chunks 440 fit and another 440 do not.
    assert numbers == [0, 0, 5, 1, fifth]
    undivided = GraphBudget("auto")
    for _ in range(4):
        assert undivided.number([[]]) == 0
        undivided.step_done()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: GradientCache(own_loss, keep="most"), "keep='most': use"),
        (lambda x: GradientCache(own_loss, engine=3), "engine is a int; pass a DeepSpeed engine"),
        (lambda x: Encoded(nn.Identity(), x, chunk=2, tokens=3), "takes one of chunk, tokens and split"),
        (lambda x: Encoded(nn.Identity(), x, chunk=0), "chunk must be a positive integer"),
        (lambda x: GradientCache(own_loss).step(Encoded(lambda x: {"a": x}, x, chunk=2)), "returned a dict; it"),
        (lambda x: GradientCache(lambda x: {"a": x}).step(Encoded(nn.Identity(), x)), "the loss returned a dict; it"),
        (
            lambda x: GradientCache(lambda x: x).step(Encoded(nn.Linear(4, 2).double(), x[:3])),
            r"returned a tensor of shape \(3, 2\); it must return one scalar tensor",
        ),
        (lambda x: GradientCache(own_loss).step(Encoded(nn.Identity(), x, split=lambda x: [])), "no chunks"),
        (lambda x: GradientCache(own_loss).step(Encoded(nn.Identity(), x, tokens=2)), "requires inputs with an attent"),
        (
            lambda x: GradientCache(own_loss).step(Encoded(nn.Identity(), ("a", "b"), chunk=1)),
            "no tensor, array or list",
        ),
        (lambda x: under_float16(lambda: GradientCache(own_loss).step(Encoded(nn.Linear(4, 2), x))), "pass scaler="),
    ],
)
def test_what_cannot_work_is_refused_with_advice(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call(encoder_and_inputs()[1])
