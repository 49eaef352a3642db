"""Copies of a checkpoint's content: independent of the originals, and with the same bytes in a file."""

import io
from collections import OrderedDict
from typing import Any

import torch

from megaclip.checkpoint.background import HostCopies


def content() -> dict[str, Any]:
    """Return content with tensors that share memory, views, parameters, and containers that occur twice."""
    flat = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    flat.ds_id = 3  # type: ignore[attr-defined]
    group = {"params": [0, 1], "lr": 0.1}
    module = OrderedDict(weight=weight.detach(), part=flat[3:7], all=flat, transposed=flat.view(3, 4).t())
    module._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {
        "module": module,
        "parameter": weight,
        "needs": flat[:5].clone().requires_grad_(),
        "empty": [torch.empty(0), torch.empty(0, 4, dtype=torch.bfloat16)],
        "scalar": (torch.tensor(3), 5, "text", None),
        "groups": [group, group],
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def overwrite(value: Any) -> None:
    """Change all tensors in place, as an update does."""
    if isinstance(value, torch.Tensor):
        value.detach().fill_(-1)
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            overwrite(part)


def test_a_copy_is_written_with_the_bytes_of_the_original_which_may_change_meanwhile():
    original = content()
    before = written(original)
    copied = HostCopies().copy(original)
    overwrite(original)
    original["groups"][0]["lr"] = 0.5
    assert written(original) != before
    assert written(copied) == before


def test_the_next_save_uses_the_same_memory_unless_sizes_change():
    copies, original = HostCopies(), {"a": torch.ones(1000), "b": torch.ones(10), "c": torch.ones(1000)}
    first = copies.copy(original)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    copies.reuse()
    original["b"] = torch.ones(20)
    second = copies.copy(original)
    assert {name for name in places if second[name].data_ptr() == places[name]} == {"a", "c"}
    assert torch.equal(second["b"], original["b"])
    assert places["a"] != places["c"]
