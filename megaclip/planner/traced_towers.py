"""Costs of open_clip's towers, traced instead of calculated by formulas.

The tower is built on the meta device, where tensors have shapes and no values, and runs once without a graph and once
forward and backward, with two numbers of samples. `_LiveBytes` follows every storage from its creation to its end, so
the peaks are those of eager PyTorch. Bytes per sample are the slope between the two.

Attention counts as one fused kernel, which keeps queries, keys, values, its output and a float32 log-sum-exp. On the
meta device PyTorch would take the plain kernels, which keep the whole score matrix. Workspaces of convolution kernels
are unknown, and so is the time of everything except products. It is estimated as the time of reading the kept
activations twice in the forward pass and three times in the backward pass.

A partly locked tower is traced with its lock, so that the graph is that of its trained part.
"""

import functools
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megaclip.errors import ConfigError, first_line
from megaclip.models import DualEncoder, OpenClipConfig, meta_model
from megaclip.planner.tower_costs import PassCosts, TowerMemory

_FEW, _MANY = 512, 1024
"""Numbers of samples of the two traces, large enough that activations exceed the gradient of any one parameter."""


class Traced(NamedTuple):
    """Costs of one sample, or of all samples of a trace."""

    operations: float
    """Operations of products in a forward pass; a multiply-add is two. Attention is included."""
    forward_peak: float
    """Peak bytes of a forward pass without a graph, with the input."""
    kept: float
    """Bytes that a graph keeps until its backward pass, without the input."""
    backward_peak: float
    """Peak bytes of a forward and backward pass, with the input, without gradients of parameters."""
    block_inputs: float
    """Bytes of the inputs of all blocks that have trained parameters."""


def traced_memory(
    model: OpenClipConfig, name: str, unlocked_groups: int | None, compute_bytes: int, checkpointing: str
) -> TowerMemory:
    """Return the bytes of one sample in one of open_clip's towers.

    name: "image" or "text". unlocked_groups: number of trained groups of a partly locked tower; None: all of it is
    trained, or nothing. checkpointing: as for `own_towers.tower_memory`.
    """
    plain = trace(model, name, unlocked_groups, compute_bytes)
    traced = trace(model, name, unlocked_groups, compute_bytes, checkpoints=bool(checkpointing))
    on_host = traced.block_inputs if checkpointing == "cpu" else 0.0
    peak = traced.backward_peak - on_host
    return TowerMemory(
        forward_peak=plain.forward_peak,
        graph=traced.kept - on_host,
        forward_peak_with_graph=peak,
        backward_peak=peak,
        block_inputs=plain.block_inputs,
    )


def traced_pass_costs(model: OpenClipConfig, name: str, unlocked_groups: int | None, compute_bytes: int) -> PassCosts:
    """Return the work of one sample in the passes through one of open_clip's towers, or through the trained part of a
    partly locked one. The arguments are those of `traced_memory`."""
    traced, description = trace(model, name, unlocked_groups, compute_bytes), _description(model)
    products = traced.operations
    if unlocked_groups is not None:
        products = _graph_operations(description, name, unlocked_groups)
    blocks = _trained_blocks(description, None if unlocked_groups is None else name, unlocked_groups)
    return PassCosts(
        layers=blocks[name == "text"],
        block_inputs=traced.block_inputs,
        products=products,
        attention=0.0,
        forward_bytes=2 * traced.kept,
        backward_bytes=3 * traced.kept,
    )


def trace(
    model: OpenClipConfig, name: str, unlocked_groups: int | None, compute_bytes: int, *, checkpoints: bool = False
) -> Traced:
    """Return the costs of one sample. checkpoints: with activation checkpointing."""
    return _trace(_description(model), name, compute_bytes, checkpoints, unlocked_groups)


def _description(model: OpenClipConfig) -> str:
    return json.dumps(model.to_open_clip(), sort_keys=True)


def _tower(model: DualEncoder, name: str) -> nn.Module:
    return model.visual if name == "image" else model.text


def _locked_model(description: str, name: str | None, unlocked_groups: int | None) -> DualEncoder:
    """Return the model on the meta device, in training mode. name: tower that is locked, except for its last groups."""
    model = meta_model(OpenClipConfig.from_dict(json.loads(description)))
    if unlocked_groups is not None:
        (model.lock_image_tower if name == "image" else model.lock_text_tower)(unlocked_groups)
    return model.train()


@functools.lru_cache(maxsize=64)
def _trained_blocks(description: str, locked: str | None, unlocked_groups: int | None) -> tuple[int, int]:
    """Return the number of blocks with trained parameters in the image tower and in the text tower.

    locked: the partly locked tower, or None.
    """
    model = _locked_model(description, locked, unlocked_groups)
    image, text = (sum(map(_is_trained, model.tower_blocks(tower))) for tower in (model.visual, model.text))
    return image, text


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@functools.lru_cache(maxsize=64)
def _graph_operations(description: str, name: str, unlocked_groups: int | None) -> float:
    """Return half the operations of products in the backward pass of one sample."""
    model = _locked_model(description, name, unlocked_groups)
    with _fused_attention() as attention, _LiveBytes():  # transformers asks it about padding
        features = _tower(model, name)(_inputs(model, name, _FEW, torch.float32))
        with FlopCounterMode(display=False) as flops:
            features.sum().backward()
    return (flops.get_total_flops() + attention.backward_operations) / (2 * _FEW)


@functools.lru_cache(maxsize=64)
def _trace(description: str, name: str, compute_bytes: int, checkpoints: bool, unlocked_groups: int | None) -> Traced:
    model = _locked_model(description, name, unlocked_groups)
    if compute_bytes == 2:
        for parameter in model.parameters():  # as DeepSpeed casts a model: buffers stay
            parameter.data = parameter.data.bfloat16()
    if checkpoints:
        model.set_activation_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    few, many = (trace_tower(model, name, samples) for samples in (_FEW, _MANY))
    one = Traced(*((large - small) / (_MANY - _FEW) for small, large in zip(few, many, strict=True)))
    if unlocked_groups is None:
        return one
    # The pass with fewer samples may have its peak among gradients, the other one in the locked blocks.
    return one._replace(backward_peak=max(one.backward_peak, one.forward_peak))


def trace_tower(model: DualEncoder, name: str, samples: int) -> Traced:
    """Return the costs of a chunk of `samples` in a tower of a model on the meta device, in training mode."""
    tower = _tower(model, name)
    dtype = model.logit_scale.dtype
    block_inputs = 0

    def count(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal block_inputs
        first = arguments[0] if arguments else options["hidden_states"]
        block_inputs += first.numel() * first.element_size()

    def freed(parameter: torch.Tensor) -> None:
        parameter.grad = None  # the planner counts the gradients of parameters itself

    blocks = filter(_is_trained, model.tower_blocks(tower))
    hooks = [block.register_forward_pre_hook(count, with_kwargs=True) for block in blocks]
    hooks += [p.register_post_accumulate_grad_hook(freed) for p in tower.parameters() if p.requires_grad]
    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    try:
        tower.requires_grad_(False)  # FlopCounterMode follows the gradients of everything that requires one
        with _fused_attention() as attention, FlopCounterMode(display=False) as flops, _LiveBytes() as live:
            _check_features(model, name, samples)
        forward_peak = live.peak
        operations, inputs_of_blocks = flops.get_total_flops() + attention.operations, block_inputs
        for parameter in trained:
            parameter.requires_grad_(True)
        with _fused_attention(), _LiveBytes() as live:
            inputs = _inputs(model, name, samples, dtype)
            features = tower(inputs)
            kept = live.now - inputs.numel() * inputs.element_size()
            features.sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return Traced(operations, forward_peak, kept, live.peak, inputs_of_blocks)


def _check_features(model: DualEncoder, name: str, samples: int) -> None:
    """Run a forward pass. Raise ConfigError if the tower cannot encode its inputs, or not to (samples, embed_dim)."""
    tower, config = _tower(model, name), model.config
    section, key = ("vision_cfg", "image_size") if name == "image" else ("text_cfg", "context_length")
    setting = f"{section}.{key} {getattr(getattr(config, section), key)}"
    try:
        shape = tower(_inputs(model, name, samples, model.logit_scale.dtype)).shape
    except Exception as error:  # the libraries do not document what they raise
        raise ConfigError(
            f"{setting}: the {name} tower {type(tower).__name__} cannot encode such inputs: {type(error).__name__}: "
            f"{first_line(error)}; correct it, or choose another model"
        ) from error
    if shape != (samples, config.embed_dim):
        raise ConfigError(
            f"embed_dim {config.embed_dim}: the {name} tower {type(tower).__name__} returns {list(shape)[1:]} numbers "
            f"per sample; correct embed_dim, or the pooling and the projection in {section}"
        )


def _inputs(model: DualEncoder, name: str, samples: int, dtype: torch.dtype) -> torch.Tensor:
    if name == "image":
        size = model.config.vision_cfg.image_size
        return torch.empty(samples, 3, size, size, dtype=dtype, device="meta")
    return torch.empty(samples, model.config.text_cfg.context_length, dtype=torch.int64, device="meta")


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made inside the `with` statement and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool and args[0].is_meta:
            return True  # transformers asks whether a caption has no padding
        outputs = func(*args, **(kwargs or {}))
        known = {id(x.untyped_storage()) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for output in tree_iter(outputs):
            if isinstance(output, torch.Tensor) and id(output.untyped_storage()) not in known:
                self._add(output.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def end(_: Any) -> None:
            self.now -= nbytes
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, end)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class _Attention:
    """The operations of fused attention, forward and backward."""

    operations = 0.0
    backward_operations = 0.0


@contextmanager
def _fused_attention() -> Iterator[_Attention]:
    """Replace PyTorch's attention by a function with the memory of a fused kernel; count its operations."""
    counted = _Attention()

    def attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        operations = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        counted.operations += operations
        return _Fused.apply(query, key, value, counted, operations)

    replacement: Callable[..., Any] = attend
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", replacement):
        yield counted


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counted: _Attention, operations: float
    ) -> torch.Tensor:
        ctx.counted, ctx.operations = counted, operations
        out = _as_kernels_return(query, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.counted.backward_operations += 2 * ctx.operations
        query, key, value, *_ = ctx.saved_tensors
        return *(_as_kernels_return(part, part.shape[-1]) for part in (query, key, value)), None, None


def _as_kernels_return(like: torch.Tensor, channels: int) -> torch.Tensor:
    """Return an empty (.., H, L, channels) in the memory order (.., L, H, channels), which flattens without a copy."""
    *outer, heads, length, _ = like.shape
    return like.new_empty(*outer, length, heads, channels).transpose(-2, -3)
