"""Recorded losses equal plain ones bit by bit on 1 and 2 ranks, with CUDA graphs replaced by lists of operations.

`OperationList` replaces a CUDA graph on a CPU. It records PyTorch's operations and their tensors between the begin and
the end of a recording. A replay runs them again on the same memory. As on a GPU, a recording must keep all tensors that
it needs, must not read a tensor that is no longer written, and must not change the order of messages.
tests/gpu/test_small_batches_gpu.py uses real CUDA graphs.
"""

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss, SigLipLoss, small_batches
from megaclip.losses.batch_loss import SummedLoss
from tests.distributed.harness import run_ranks


class OperationList(TorchDispatchMode):
    """Replacement for a CUDA graph on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for function, args, kwargs, kept in self.operations:
            found = function(*args, **kwargs)
            pairs = zip(found, kept, strict=True) if isinstance(found, (tuple, list)) else [(found, kept)]
            for new, old in pairs:
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():  # neither a view nor in place
                    old.copy_(new)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the parts of torch.cuda that recordings use, so that CPUs record too."""
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
    replaced = {
        "CUDAGraph": OperationList,
        "graph_pool_handle": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda *device: stream,
        "stream": lambda chosen: contextlib.nullcontext(),
        "device": lambda chosen: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(SummedLoss, "records", lambda self, x, way: True))
        yield


def leaves(b: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return features of this rank, logit_scale and logit_bias."""
    generator = torch.Generator().manual_seed(1000 * seed + group_rank())
    x, y = (F.normalize(torch.randn(b, 5, generator=generator), dim=1).to(dtype) for _ in range(2))
    scalars = torch.tensor([5.0 + seed]), torch.tensor(-3.0 + seed)
    return [tensor.requires_grad_() for tensor in (x, y, *scalars)]


def results(loss: SummedLoss, arguments: list[Tensor]) -> list[Tensor]:
    value = loss(*arguments)
    return [value.detach(), *torch.autograd.grad(3 * value, arguments)]


def differences(kind: type[SummedLoss], b: int, dtype: torch.dtype, reduction: str) -> list[str]:
    """Return where a recorded loss differs from a plain one in five steps with different features and scalars."""
    way = {"exchange": "all_gather", "reduction": reduction}
    case = f"{kind.__name__} b={b} {dtype} {reduction} W={group_size()}"
    batches = [leaves(b, dtype, seed) for seed in range(5)]
    expected = [results(kind(**way), batch) for batch in batches]
    found = []
    with stand_ins():
        loss = kind(**way)
        for step, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
            if not all(map(torch.equal, results(loss, batch), wanted)):
                found.append(f"{case}: step {step}")
            if len(loss._recordings._recordings) != (step >= 2):
                found.append(f"{case}: {len(loss._recordings._recordings)} recordings after step {step}")
        values = [loss(*batch) for batch in batches[:2]]  # two forward passes before the first backward pass
        for number, (value, batch) in enumerate(zip(values, batches, strict=False)):
            if not all(map(torch.equal, torch.autograd.grad(3 * value, batch), expected[number][1:])):
                found.append(f"{case}: backward {number} after two forward passes")
        if len(copy.deepcopy(loss)._recordings._recordings):
            found.append(f"{case}: a copy shares recordings")
    return found


def check_everything() -> list[str]:
    cases = [
        (kind, b, dtype, reduction)
        for kind in (ClipLoss, SigLipLoss)
        for b, dtype in ((6, torch.float64), (7, torch.bfloat16))
        for reduction in ("feature", "scalar")
    ]
    return [line for case in cases for line in differences(*case)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_recorded_losses_have_the_bits_of_plain_ones(world_size: int) -> None:
    for found in run_ranks(check_everything, world_size):
        assert found == []


def keep_two_sizes() -> None:
    with stand_ins():
        loss = ClipLoss()
        for b in (4, 5, 6, 4):
            for seed in range(4):
                results(loss, leaves(b, torch.float32, seed))
    kept = [key[0][0] for key in loss._recordings._recordings]
    assert kept == [6, 4], kept


def test_the_oldest_recording_is_deleted_first() -> None:
    run_ranks(keep_two_sizes, 1)


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": True}])
def test_a_cpu_records_nothing(settings: dict[str, bool]) -> None:
    loss = ClipLoss(**settings)
    for seed in range(4):
        results(loss, leaves(4, torch.float32, seed))
    assert not loss._recordings._recordings


@pytest.mark.parametrize(
    ("settings", "ranks", "b", "negatives", "exchange", "expected"),
    [
        ({}, 1, 8, 0, "all_gather", True),
        ({}, 2, 8, 0, "all_gather", True),
        ({"cuda_graphs": False}, 1, 8, 0, "all_gather", False),
        ({}, 1, 16384, 0, "ring", True),
        ({}, 1, 16400, 0, "ring", False),  # too many operations
        ({}, 1024, 85, 0, "all_gather", True),
        ({}, 1024, 86, 0, "all_gather", False),  # 258 MiB of bfloat16 features and float32 gradients
        ({}, 1024, 8, 78, "all_gather", False),
        ({}, 2, 8, 0, "ring", False),
    ],
)
def test_small_batches_are_recorded_by_default_and_large_ones_never(
    settings: dict[str, bool],
    ranks: int,
    b: int,
    negatives: int,
    exchange: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small_batches, "implementation_for", lambda tiles, x: "triton")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group = SimpleNamespace(size=ranks, message_device=torch.device("cuda"))
    way: Any = SimpleNamespace(ranks=group, exchange=exchange, negatives=negatives, tiles=None)
    features: Any = SimpleNamespace(shape=(b, 512), is_cuda=True, dtype=torch.bfloat16)
    assert ClipLoss(**settings).records(features, way) == expected
