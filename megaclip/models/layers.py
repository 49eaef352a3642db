"""The layers of a transformer block: linear layers, whole or split over a tensor-parallel group, and layer norms.

Whole layers are PyTorch's. Split layers are Megatron-core's (Shoeybi et al., 2019, arXiv:1909.08053): the query, key
and value projections and the first MLP layer are split by output (`ColumnParallelLinear`), and the projections after
them by input (`RowParallelLinear`). So a block needs one sum over the group after the attention and one after the MLP,
and as many in the backward pass. Embeddings, norms and the final projections are kept whole on every rank.

Megatron's layers are used with an explicit group, and parameters without values (`megaclip.models.build` gives
them): both avoid Megatron's global state and its CUDA calls, so the same code runs on CPUs.

Layer norms are PyTorch's or, with `layer_norm` "apex", NVIDIA apex's memory-efficient one. The latter keeps its output
for the backward pass instead of its input.

Shapes: m rows of one rank, T ranks of the group, L tokens, C width.
"""

import functools
import re
from typing import Any

import torch
import torch.distributed
from torch import nn

from megaclip.comm.collectives import gather_rows
from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import ConfigError
from megaclip.models.config import TextConfig, VisionConfig
from megaclip.zero.parameters import gathered_shape

_SPLIT_BY_OUTPUT = re.compile(r".*\.(attn\.[qkv]_proj|mlp\.c_fc)\.(weight|bias)")
_SPLIT_BY_INPUT = re.compile(r".*\.(attn\.out_proj|mlp\.c_proj)\.weight")


def split_dim(name: str) -> int | None:
    """Return the dimension in which tensor parallelism splits the parameter of this name; None if it stays whole."""
    if _SPLIT_BY_OUTPUT.fullmatch(name):
        return 0
    return 1 if _SPLIT_BY_INPUT.fullmatch(name) else None


def whole_shape(name: str, parameter: Any, group: RankGroup) -> torch.Size:
    """Return the shape of the whole parameter, of which this rank has a part, perhaps partitioned by ZeRO-3."""
    shape = list(gathered_shape(parameter))
    if (dim := split_dim(name)) is not None:
        shape[dim] *= group.size
    return torch.Size(shape)


def own_part(name: str, whole: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return this rank's part of a whole parameter, a view."""
    dim = split_dim(name)
    return whole if dim is None else whole.chunk(group.size, dim)[group.rank]


class LayerFactory:
    """Factory of the layers in the blocks of one model.

    group: tensor-parallel group. layer_norm: "torch" or "apex".
    """

    def __init__(self, group: RankGroup = ONE_RANK, layer_norm: str = "torch") -> None:
        self.group = group
        self._norm: Any = nn.LayerNorm
        if layer_norm == "apex":
            require_apex()
            from apex.normalization import FusedLayerNorm

            self._norm = functools.partial(FusedLayerNorm, memory_efficient=True)

    def norm(self, width: int, eps: float = 1e-5) -> nn.Module:
        """Return a layer norm with weight and bias over the last dimension."""
        layer: nn.Module = self._norm(width, eps=eps)
        return layer

    def by_output(self, inputs: int, outputs: int, *, shares_input: bool = False, bias: bool = True) -> nn.Module:
        """Return a layer (.., inputs) -> (.., outputs / T).

        shares_input: several layers take the same input, which went through `shared_input`; this layer does not sum
        the gradient of its input over the group.
        """
        if self.group.size == 1:
            return nn.Linear(inputs, outputs, bias)
        options = {"bias": bias, "disable_grad_reduce": shares_input}
        layer: nn.Module = _megatron_layers()[0](inputs, outputs, self.group, **options)
        return layer

    def by_input(self, inputs: int, outputs: int) -> nn.Module:
        """Return a layer (.., inputs / T) -> (.., outputs) with a bias; its output is summed over the group."""
        if self.group.size == 1:
            return nn.Linear(inputs, outputs)
        layer: nn.Module = _megatron_layers()[1](inputs, outputs, self.group)
        return layer

    def shared_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, the input of several `by_output` layers; its gradient is summed over the group once."""
        return x if self.group.size == 1 else _SumGradient.apply(x, self.group)


def check_split(ranks: int, tower: VisionConfig | TextConfig) -> None:
    """Raise ConfigError unless this number of tensor-parallel ranks can split a tower: its heads and its MLPs."""
    if ranks > 1 and tower.gated:
        raise ConfigError(
            f"megaclip.tensor_parallel_size {ranks} cannot split EVA-02's layer norms inside attention and MLP; use 1"
        )
    sizes = {"attention heads": tower.heads, "hidden units of the MLP": int(tower.width * tower.mlp_ratio)}
    if isinstance(tower, VisionConfig) and tower.pool_heads:
        pooling = {"heads": tower.pool_heads, "hidden units": int(tower.width * tower.pool_mlp_ratio)}
        sizes |= {f"{name} of the attention pooling": size for name, size in pooling.items()}
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"megaclip.tensor_parallel_size {ranks} does not divide the {size} {name} of a tower; "
                "choose a size that divides both towers' heads, or 1"
            )


def own_rows(features: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return this rank's m rows of the (T * m, ..) rows of its replica.

    The backward pass gathers the gradients of all rows and divides them by T. Each rank's loss returns N times the
    gradient of its rows (the reduction contract of `megaclip.losses`); N / T = W is what DeepSpeed's average over the W
    replicas expects.
    """
    return features if group.size == 1 else _OwnRows.apply(features, group)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return rows.chunk(group.size)[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(gradient, group=ctx.group) / ctx.group.size, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group.handle)
        return total, None


def require_apex() -> None:
    """Raise ConfigError unless NVIDIA apex is installed with its fused layer norm.

    PyPI's package "apex" is unrelated, so the compiled extensions decide.
    """
    try:
        import amp_C  # noqa: F401
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization import FusedLayerNorm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"NVIDIA apex with its CUDA extensions cannot be imported ({error}); build it from "
            "https://github.com/NVIDIA/apex, or leave out megaclip.layer_norm"
        ) from None


@functools.cache
def _megatron_layers() -> tuple[Any, Any]:
    """Return the two classes of split layers. No other function of `megaclip.models` imports Megatron."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    def split(kind: Any, dim: int, **fixed: Any) -> Any:
        class Split(kind):
            # Without this, state dicts hold an empty `_extra_state` for every layer.
            get_extra_state = nn.Module.get_extra_state

            def __init__(self, inputs: int, outputs: int, group: RankGroup, **options: Any) -> None:
                config = ModelParallelConfig(
                    tensor_model_parallel_size=group.size, use_cpu_initialization=True, perform_initialization=False
                )
                given = {"config": config, "init_method": None, "tp_group": group.handle, **fixed, **options}
                super().__init__(inputs, outputs, **given)
                _mark_as_split(self.weight, dim)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                # Megatron-core 0.16.1 returns a non-contiguous output without summing it.
                return super().forward(x.contiguous())[0]

        return Split

    by_input = split(RowParallelLinear, 1, bias=True, input_is_parallel=True, skip_bias_add=False)
    return split(ColumnParallelLinear, 0, gather_output=False), by_input


def _mark_as_split(weight: Any, dim: int) -> None:
    """Set what DeepSpeed's gradient norm reads; Megatron-core 0.16.1 sets it only where it draws the initial values."""
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1
