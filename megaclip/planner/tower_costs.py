"""Costs of one sample in a tower, traced on the meta device, where tensors have shapes and no values.

The tower runs once without a graph and once forward and backward, with two numbers of samples. `_Trace` follows every
storage from its creation to its end, so the peaks are those of eager PyTorch, and adds up the bytes that operations
read and write. Costs per sample are the slope between the two. The blocks of MegaCLIP's own towers are alike, so costs
of deep towers are extrapolated from those with three and four blocks.

Attention counts as one fused kernel, which keeps queries, keys, values, its output and a float32 log-sum-exp. On the
meta device PyTorch would take the plain kernels, which keep the whole score matrix. Workspaces of convolution kernels
are unknown.

A locked tower whose last groups are trained is traced with its lock, so that the graph is that of its trained part. A
tensor-parallel tower is traced with the layers of one rank, which has the rows of all ranks of its replica.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from megaclip.comm.groups import RankGroup
from megaclip.config.section import LoraSettings
from megaclip.errors import ConfigError, first_line
from megaclip.models import DualEncoder, ModelConfig, ModelDescription, layers, meta_model
from megaclip.models.blocks import QuickGELU
from megaclip.models.clip import ClipModel
from megaclip.models.lora import add_adapters, check_use_of_adapters
from megaclip.models.open_clip_layers import repeated_blocks
from megaclip.planner.constants import ATTENTION_CHANNELS, ATTENTION_TILE

_FEW, _MANY = 512, 1024
"""Numbers of samples of the two traces, large enough that activations exceed the gradient of any one parameter."""
_BLOCKS = 4
"""Number of blocks of the deeper tower from which a tower of equal blocks is extrapolated."""

Costs = TypeVar("Costs", bound=tuple)


class Pass(NamedTuple):
    """Work of one sample, or of all samples of a trace, in a pass through a tower or through its trained part."""

    layers: int
    """Number of blocks."""
    block_inputs: float
    """Bytes of the inputs of the blocks."""
    products: float
    """Operations of matrix products and convolutions; a multiply-add is two."""
    attention: float
    """Operations of fused attention, in whole tiles."""
    moved: float
    """Bytes that all other operations read and write."""
    sums: float
    """Numbers that tensor-parallel ranks add up."""


NO_WORK = Pass(0, 0.0, 0.0, 0.0, 0.0, 0.0)


class TowerCosts(NamedTuple):
    """Costs of one sample, or of all samples of a trace. With tensor parallelism they include the replica's other
    ranks' rows."""

    forward_peak: float
    """Peak bytes of a forward pass without a graph, with the input."""
    graph: float
    """Bytes that a graph keeps until its backward pass, without the input."""
    backward_peak: float
    """Peak bytes of a forward and backward pass, with the input, without gradients of parameters."""
    recomputed: float
    """Bytes of `graph` that selective recomputation does not keep: outputs of layer norms and activation functions."""
    largest_recomputed: float
    """Bytes of the largest of these outputs."""
    fused: float
    """Bytes of `graph` that compiled code never keeps: SwiGLU's activation, and its product."""
    forward: Pass
    """A forward pass through the whole tower."""
    backward: Pass
    """The backward pass, through the part with a graph."""


def tower_costs(
    model: ModelDescription,
    name: str,
    compute_bytes: int,
    *,
    unlocked_groups: int | None = None,
    checkpointing: str = "",
    compiled: bool = False,
    recomputes: bool = False,
    tensor_ranks: int = 1,
    lora: LoraSettings | None = None,
) -> TowerCosts:
    """Return the costs of one of a rank's samples.

    Args:
        name: "image" or "text".
        compute_bytes: bytes of a parameter and an activation, 2 or 4.
        unlocked_groups: number of trained groups of a partly locked tower; None: all of it is trained, or nothing.
        checkpointing: activation checkpointing, "", "gpu" or "cpu" (the blocks' inputs are kept in host memory).
        compiled: compiled code turns queries and keys by rotary embeddings in one kernel. Without checkpointing it
            keeps fewer bytes of some blocks.
        recomputes: selective recomputation of a compiled tower lowers them further.
        tensor_ranks: number of ranks that the blocks are split over.
        lora: adapters, which are trained instead of the weights.

    Raises:
        ConfigError: the tower cannot encode its inputs, or not to `embed_dim` numbers.
    """
    arguments = (model, name, compute_bytes, unlocked_groups, tensor_ranks, lora)
    costs = _traced(*arguments, checkpoints=False, fuses=compiled)
    if checkpointing:
        with_checkpoints = _traced(*arguments, checkpoints=True, fuses=compiled)
        on_host = costs.backward.block_inputs if checkpointing == "cpu" else 0.0
        graph, peak = with_checkpoints.graph - on_host, with_checkpoints.backward_peak - on_host
    elif compiled:
        graph = costs.graph - costs.fused - recomputes * costs.recomputed
        peak = costs.backward_peak - costs.fused - recomputes * (costs.recomputed - costs.largest_recomputed)
    else:
        return costs
    return costs._replace(graph=graph, backward_peak=max(peak, costs.forward_peak) if unlocked_groups else peak)


def attention_operations(queries: int, keys: int, heads: int, channels: int) -> float:
    """Return the operations of attention for one sample in a forward pass, in whole tiles of tokens and channels."""
    whole = [math.ceil(size / ATTENTION_TILE) * ATTENTION_TILE for size in (queries, keys)]
    return 4.0 * math.prod(whole) * heads * math.ceil(channels / ATTENTION_CHANNELS) * ATTENTION_CHANNELS


@functools.lru_cache(maxsize=128)
def _traced(
    config: ModelDescription,
    name: str,
    compute_bytes: int,
    unlocked_groups: int | None,
    tensor_ranks: int,
    lora: LoraSettings | None,
    checkpoints: bool,
    fuses: bool,
) -> TowerCosts:
    model = rank_model(config, {name: unlocked_groups}, tensor_ranks, lora)
    if compute_bytes == 2:
        for parameter in model.parameters():  # as DeepSpeed casts a model: buffers stay
            parameter.data = parameter.data.bfloat16()
    if checkpoints:
        model.set_activation_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    with mock.patch("megaclip.models.blocks.rotate", _FusedRotation.apply) if fuses else nullcontext():
        return _one_sample_of_all_blocks(model, name, unlocked_groups, tensor_ranks, has_adapters=lora is not None)


def _one_sample_of_all_blocks(
    model: DualEncoder, name: str, unlocked_groups: int | None, tensor_ranks: int, *, has_adapters: bool
) -> TowerCosts:
    tower: Any = model.visual if name == "image" else model.text
    blocks = tower.transformer.resblocks if isinstance(model, ClipModel) else []
    more = len(blocks) - _BLOCKS
    if more > 0 and unlocked_groups is None and not has_adapters:
        del blocks[1 : 1 + more]
        deep = _one_sample(model, name, tensor_ranks)
        del blocks[1]
        shallow = _one_sample(model, name, tensor_ranks)
        one = _combined(deep, shallow, lambda large, small: large + more * (large - small))
    else:
        one = _one_sample(model, name, tensor_ranks)
    if tensor_ranks > 1:  # beside the gathered input
        own = _inputs(model, name, 1).nbytes
        one = one._replace(forward_peak=one.forward_peak + own, backward_peak=one.backward_peak + own)
    if unlocked_groups is None:
        return one
    # The pass with fewer samples may have its peak among gradients, the other one in the locked blocks.
    return one._replace(backward_peak=max(one.backward_peak, one.forward_peak))


def _one_sample(model: DualEncoder, name: str, tensor_ranks: int) -> TowerCosts:
    """Return the costs of one of a rank's samples in a tower."""
    few, many = (trace_tower(model.train(), name, samples) for samples in (_FEW, _MANY))
    one = _combined(many, few, lambda large, small: tensor_ranks * (large - small) / (_MANY - _FEW))
    forward = one.forward._replace(layers=few.forward.layers)
    return one._replace(forward=forward, backward=one.backward._replace(layers=few.backward.layers))


def _combined(first: Costs, second: Costs, of: Callable[[float, float], float]) -> Costs:
    """Return the costs that `of` computes from the same cost of both."""
    pairs = zip(first, second, strict=True)
    values: list[Any] = [_combined(a, b, of) if isinstance(a, Pass) else of(a, b) for a, b in pairs]
    return type(first)(*values)


def trace_tower(model: DualEncoder, name: str, samples: int) -> TowerCosts:
    """Return the costs of a chunk of `samples` in a tower of a model on the meta device, in training mode.

    A caption decoder is a part of the text tower where a graph is made. Its work is that of the backward pass.

    Raises ConfigError if the tower cannot encode its inputs, or not to `embed_dim` numbers, or a decoder cannot read
    them.
    """
    tower = model.visual if name == "image" else model.text
    decoder = model.parts().get("decoder") if name == "text" else None
    blocks, decoder_blocks = repeated_blocks(tower), [] if decoder is None else repeated_blocks(decoder)
    image_tokens = torch.empty(0) if decoder is None else _image_tokens(model, samples)
    of_both = [*blocks, *decoder_blocks]
    trained_blocks = {block for block in of_both if any(parameter.requires_grad for parameter in block.parameters())}
    inputs_of_blocks: dict[nn.Module, int] = {}
    gated = {module.ln_inner for block in of_both for module in block.modules() if getattr(module, "c_gate", None)}
    recomputed: list[int] = [0]
    fused: list[int] = [0]
    with_gradient: set[torch.Tensor] = set()

    def count_input(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs_of_blocks[block] = (arguments[0] if arguments else options["hidden_states"]).nbytes

    def count_output(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        recomputed.append(output.nbytes)
        fused.append(2 * output.nbytes * (module in gated))

    def freed(parameter: torch.Tensor) -> None:
        with_gradient.add(parameter)
        parameter.grad = None  # the planner counts the gradients of parameters itself

    with torch.no_grad(), _Trace():
        _check_features(model, tower, name, samples)  # and compute what towers compute only once
    with ExitStack() as hooks:
        for block in of_both:
            hooks.callback(block.register_forward_pre_hook(count_input, with_kwargs=True).remove)
        for block in model.blocks_to_compile(tower):
            for module in block.modules():
                if block in trained_blocks and isinstance(module, nn.LayerNorm | nn.GELU | QuickGELU):
                    hooks.callback(module.register_forward_hook(count_output).remove)
        with torch.no_grad(), _Trace() as without_graph:
            tower(_inputs(model, name, samples))
        forward = without_graph.ended(len(blocks), sum(inputs_of_blocks.values()))
        if decoder is not None:
            with torch.no_grad(), _Trace():
                _check_decoder(decoder, tower, image_tokens, _inputs(model, name, samples))
    with ExitStack() as hooks, _Trace() as graph:
        for parameter in (*tower.parameters(), *(() if decoder is None else decoder.parameters())):
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(freed).remove)
        inputs = _inputs(model, name, samples)
        outputs = tower(inputs)
        graph.ended(0, 0)
        results = [output.sum() for output in outputs] if isinstance(outputs, tuple) else [outputs.sum()]
        if decoder is not None:
            results[1] = decoder(image_tokens, outputs[1], inputs, inputs[:, 1:].numel())
        kept = graph.now - inputs.nbytes
        del outputs
        sum(results).backward()
    check_use_of_adapters(tower, with_gradient)
    backward = graph.ended(len(trained_blocks), sum(inputs_of_blocks[block] for block in trained_blocks))
    outputs_of_norms = sum(recomputed), max(recomputed), sum(fused)
    return TowerCosts(without_graph.peak, kept, graph.peak, *outputs_of_norms, forward, backward)


def _check_features(model: DualEncoder, tower: nn.Module, name: str, samples: int) -> None:
    """Run a forward pass. Raise ConfigError if the tower cannot encode its inputs, or not to (samples, embed_dim)."""
    config = model.config
    section, key = ("vision_cfg", "image_size") if name == "image" else ("text_cfg", "context_length")
    setting = f"{section}.{key} {getattr(getattr(config, section), key)}"
    try:
        features = tower(_inputs(model, name, samples))
        shape = (features[0] if isinstance(features, tuple) else features).shape
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


def _image_tokens(model: DualEncoder, samples: int) -> torch.Tensor:
    """Return tokens of images, which a caption decoder reads and sends a gradient to."""
    with torch.no_grad(), _Trace():  # for its known sizes
        _, tokens = model.visual(_inputs(model, "image", 1))
    return torch.empty(samples, *tokens.shape[1:], dtype=tokens.dtype, device="meta", requires_grad=True)


def _check_decoder(decoder: nn.Module, text: nn.Module, image_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise ConfigError if a caption decoder cannot read the tokens of the towers."""
    try:
        decoder(image_tokens, text(tokens)[1], tokens, 1)
    except RuntimeError as error:
        raise ConfigError(
            f"multimodal_cfg: the caption decoder cannot read the tokens of the towers: {first_line(error)}; its width "
            "must be that of text_cfg, and that of the image tokens: embed_dim with vision_cfg.attentional_pool, else "
            "vision_cfg.width"
        ) from error


def _inputs(model: DualEncoder, name: str, samples: int) -> torch.Tensor:
    if name == "image":
        size = model.config.vision_cfg.image_size
        return torch.empty(samples, 3, size, size, dtype=model.logit_scale.dtype, device="meta")
    return torch.empty(samples, model.config.text_cfg.context_length, dtype=torch.int64, device="meta")


class _Trace(TorchDispatchMode):
    """Bytes of the storages that operations have made inside the `with` statement and that still exist, and the work of
    these operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.products = self.moved = self.attention = self.sums = 0.0
        self._seen: dict[int, Any] = {}
        self._patches = ExitStack()

    def __enter__(self) -> "_Trace":
        self._patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", self._attend))
        self._patches.enter_context(mock.patch.object(torch.distributed, "all_reduce", self._add_up))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def ended(self, blocks: int, block_inputs: float) -> Pass:
        """Return the work since the last call."""
        work = Pass(blocks, block_inputs, self.products, self.attention, self.moved, self.sums)
        self.products = self.moved = self.attention = self.sums = 0.0
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool and args[0].is_meta:
            return True  # transformers asks whether a caption has no padding
        kwargs = kwargs or {}
        key = func, _signature(args), _signature((*kwargs.items(),))
        is_known = key in _OUTPUTS
        outputs = _empty_like(_OUTPUTS[key]) if is_known else func(*args, **kwargs)
        read, written = _tensors((args, *kwargs.values())), _tensors((outputs,))
        made = {id(x.untyped_storage()) for x in written} - {id(x.untyped_storage()) for x in read}
        for output in written:
            if id(output.untyped_storage()) in made:
                self._add(output.untyped_storage())
        is_whole = all(x.nbytes == x.untyped_storage().nbytes() for x in written)
        if not is_known and 0 < len(made) == len(written) and is_whole and all(x.is_meta for x in (*read, *written)):
            _OUTPUTS[key] = _empty_like(outputs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=outputs)
        elif not func.is_view and packet not in _WITHOUT_TRAFFIC:
            self.moved += sum(x.numel() * x.element_size() for x in (*read, *written))
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

    def _attend(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        *outer, heads, queries, channels = query.shape
        operations = math.prod(outer) * attention_operations(queries, key.shape[-2], heads, channels)
        self.attention += operations
        return _FusedAttention.apply(query, key, value, self, operations)

    def _add_up(self, tensor: torch.Tensor, **_: Any) -> None:
        self.sums += tensor.numel()


_OUTPUTS: dict[tuple[Any, ...], Any] = {}
"""Tensors like the outputs of operations on the meta device, by operation and arguments. PyTorch computes the sizes of
many outputs in Python, which takes a millisecond."""


def _signature(value: Any) -> Any:
    """Return what the sizes of outputs depend on: sizes and types of tensors, and other arguments as they are."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else (type(value), value)


def _empty_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.new_empty_strided(value.shape, value.stride())  # torch.empty_like is Python code here too
    return tuple(map(_empty_like, value)) if isinstance(value, list | tuple) else value


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in nested lists and tuples."""
    parts = (_tensors(value) if isinstance(value, list | tuple) else [value] for value in values)
    return [x for part in parts for x in part if isinstance(x, torch.Tensor)]


_WITHOUT_TRAFFIC = {torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.new_empty}
"""Operations that are no views by their schema, and neither read nor write."""


class _FusedAttention(torch.autograd.Function):
    """Attention with the memory of a fused kernel."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: Any, value: Any, trace: _Trace, operations: float) -> torch.Tensor:
        ctx.trace, ctx.operations = trace, operations
        out = _as_kernels_return(query, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.trace.attention += 2 * ctx.operations
        query, key, value, *_ = ctx.saved_tensors
        return *(_as_kernels_return(part, part.shape[-1]) for part in (query, key, value)), None, None


class _FusedRotation(torch.autograd.Function):
    """`megaclip.models.rotary.rotate` in one kernel, which reads and writes its input once."""

    @staticmethod
    def forward(ctx: Any, x_bHLK: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        return torch.neg(x_bHLK)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.neg(gradient), None


def _as_kernels_return(like: torch.Tensor, channels: int) -> torch.Tensor:
    """Return an empty (.., H, L, channels) in the memory order (.., L, H, channels), which flattens without a copy."""
    *outer, heads, length, _ = like.shape
    return like.new_empty(*outer, length, heads, channels).transpose(-2, -3)


def rank_model(
    config: ModelDescription, unlocked: dict[str, int | None], tensor_ranks: int, lora: LoraSettings | None
) -> DualEncoder:
    """Return one rank's part of the model on the meta device. Sums over tensor-parallel ranks are only counted.

    unlocked: number of trained groups of each locked tower, by its name. None: the tower is not locked.
    """
    if tensor_ranks == 1:
        model: DualEncoder = meta_model(config)
    else:
        assert isinstance(config, ModelConfig), "Workload.of refuses tensor parallelism of open_clip's modules"
        parts = mock.patch.object(layers, "_megatron_layers", lambda: (_SplitByOutput, _SplitByInput))
        with parts, torch.device("meta"):
            model = ClipModel(config, RankGroup(handle=None, rank=0, size=tensor_ranks))
    for name, groups in unlocked.items():
        if groups is not None:
            model.lock_tower(name, groups)
    if lora is not None:
        add_adapters(model, lora.model_dump())
    return model


class _SplitByOutput(nn.Linear):
    """One rank's part of Megatron-core's layer of this kind, which adds its bias in a kernel of its own."""

    def __init__(self, inputs: int, outputs: int, group: RankGroup, disable_grad_reduce: bool, bias: bool) -> None:
        super().__init__(inputs, outputs // group.size, bias)
        self.sums_gradient = not disable_grad_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sums_gradient and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: torch.distributed.all_reduce(gradient))
        out = F.linear(x, self.weight)
        return out if self.bias is None else out + self.bias


class _SplitByInput(nn.Linear):
    """One rank's part of Megatron-core's layer of this kind."""

    def __init__(self, inputs: int, outputs: int, group: RankGroup) -> None:
        super().__init__(inputs // group.size, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight)
        torch.distributed.all_reduce(out)
        return out + self.bias
