"""Costs of MegaCLIP's own towers, by formulas.

**Memory.** A pre-norm block of width C and MLP width r C keeps, per token and in units of C numbers: its input, the
norms' outputs (2), queries, keys and values (3), attention's output, the sum after attention, and the MLP's two hidden
layers (2 r): 8 + 2 r. QuickGELU keeps its sigmoid too (r), LayerScale its two inputs (2). With selective recomputation
it keeps neither the norms' outputs nor the activation function's: 6 + r. Where one token stands for the sample, the
last block keeps its input, a norm's output, keys and values of every token (4), the rest of that one token. Always in
float32: mean and deviation of two norms (4 numbers) and attention's log-sum-exp per head.

The peak of the backward pass is at the last whole block's MLP (the gradient of its output and of its hidden layer), or,
if that is more, at the pooled block's attention (gradients of keys and values). With activation checkpointing only the
blocks' inputs are kept, and one block is run again.

**Time.** Three kinds of kernels run one after the other: matrix products, attention, and kernels that only read and
write memory (norms, activation functions, sums). Products grow with the square of the width, the others with the width,
so a wide tower reaches a larger share of the GPU's product rate than a narrow one. The third kind reads and writes, per
token of a block and in units of C numbers:

    forward   two norms 4, two residual sums 6, GELU 2 r
    backward  two norms 6, two sums of residual gradients 6, sums of the gradients of queries, keys and values 6, GELU
              3 r, gradients of the biases 5 + r

QuickGELU takes 7 r and 14 r, LayerScale 4 and 12 more. Attention is counted in whole tiles of tokens, and twice in the
backward pass.

**Tensor parallelism** over T ranks: a chunk of m rows per rank is T m rows in the towers. Each rank keeps its part of
queries, keys, values, attention's output and the hidden layers, (4 + 2 r) / T, and the rest whole: 4. Norms and
residual sums are whole on every rank; GELU and the gradients of the split biases are divided by T. Megatron-core's
layers add their biases in kernels of their own: 4 for the whole outputs of attention and MLP, 6 + 2 r for the split
ones. The gradient of attention's input is copied before it is summed: 2. The part of the products in the blocks is T m
rows divided by T; patch embedding and projection run on all T m rows on every rank.

**Locks.** Of N trained groups, the projection and N - 1 blocks have a graph. With few blocks the tensors of one token
are not negligible, so they are counted for such a part: what a pooled block keeps of its own token, and the input and
output of the last norm.

`tests/unit/planner/test_own_towers.py` compares the formulas with the bytes that autograd saves and with PyTorch's
operations.
"""

import math
from dataclasses import dataclass, replace

from megaclip.models import ModelConfig
from megaclip.planner.constants import ATTENTION_CHANNELS, ATTENTION_TILE
from megaclip.planner.tower_costs import PassCosts, TowerMemory


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of one tower, or of its part with a graph, that its costs depend on."""

    layers: int
    width: int
    hidden: int
    heads: int
    tokens: float
    """Tokens per sample, after patch dropout; for the time of a text tower whose captions are cut, their mean."""
    pooled: bool
    """True if one token stands for the sample, so that the last block computes only that one."""
    quick_gelu: bool
    layer_scale: bool
    projection_operations: int
    """Operations of one sample's projection in a forward pass; a multiply-add is two."""
    tensor_ranks: int = 1
    """Number of ranks that the blocks are split over."""
    recomputes: bool = False
    """True if layer norms and activation functions are computed again in the backward pass, as with
    megaclip.selective_recompute."""
    stem_copies: int = 0
    """Number of (tokens, width) tensors that the parts before the blocks keep."""
    head_copies: int = 0
    """Number of (tokens, width) tensors that the parts after the blocks keep."""
    pixels: int = 0
    """Numbers of one sample that the tower takes in the compute dtype (0 for tokens, which stay integers)."""
    patch_numbers: int = 0
    """Numbers of one sample's patches, which the patch embedding keeps."""
    embedded_numbers: int = 0
    """Numbers of one sample's embedded patches, which a forward pass holds until the end of the blocks."""
    embedding_operations: int = 0
    """Operations of one sample's patch embedding in a forward pass."""
    is_part: bool = False
    """True for the part of a partly locked tower that has a graph."""

    def part(self, groups: int) -> "TowerSizes":
        """Return the part with a graph if the last `groups` groups of the tower are trained, and not its stem."""
        return replace(
            self,
            layers=groups - 1,
            pooled=self.pooled and groups > 1,
            stem_copies=0,
            head_copies=self.head_copies if groups > 1 else 0,
            patch_numbers=0,
            embedding_operations=0,
            is_part=True,
        )

    @property
    def mlp_ratio(self) -> float:
        return self.hidden / self.width

    @property
    def block_numbers(self) -> float:
        """Numbers that a whole block saves per token, in the compute dtype, in units of the width."""
        ratio = self.mlp_ratio
        split = 4 + ratio if self.recomputes else 4 + 2 * ratio + (ratio if self.quick_gelu else 0)
        return (2 if self.recomputes else 4) + (2 if self.layer_scale else 0) + split / self.tensor_ranks

    @property
    def numbers_of_blocks(self) -> float:
        """Numbers that all blocks save per token, in units of the width."""
        block = self.block_numbers
        return (self.layers - 1) * block + (2 + 2 / self.tensor_ranks if self.pooled else block)

    @property
    def pooled_block_rows(self) -> float:
        """Numbers that a pooled block saves of its one token, in units of the width, with a copy of the token itself.
        Counted in a part only: in a whole tower they are negligible."""
        return self.block_numbers - 1 - 2 / self.tensor_ranks if self.is_part and self.pooled else 0

    @property
    def head_rows(self) -> int:
        """Numbers that the parts after the blocks save of one token, in units of the width. Counted in a part only."""
        if not self.is_part:
            return 0
        return 2 if self.layers and not self.head_copies else 1  # the projection's input, and the norm's

    @property
    def mlp_gradients(self) -> float:
        """Numbers per token that a whole block's MLP takes in its backward pass, beside those saved."""
        return 1 + self.mlp_ratio * (2 if self.quick_gelu or self.recomputes else 1) / self.tensor_ranks

    @property
    def input_numbers(self) -> int:
        """Numbers in the compute dtype of one sample's input, with the gathered input of the replica's other ranks."""
        return self.pixels * (1 if self.tensor_ranks == 1 else 1 + self.tensor_ranks)

    def token_bytes(self, numbers: float, blocks: int, compute_bytes: int) -> float:
        """Return the bytes for one of this rank's samples: `numbers` widths per token, and the float32 statistics of so
        many blocks."""
        statistics = 16 + 4 * self.heads // self.tensor_ranks
        return self.tensor_ranks * self.tokens * (numbers * self.width * compute_bytes + blocks * statistics)


def image_sizes(model: ModelConfig, tensor_ranks: int = 1) -> TowerSizes:
    """Return the sizes of the image tower in training, where patch dropout removes patches."""
    vision = model.vision_cfg
    patches = vision.grid_size**2
    kept = max(1, int(patches * (1 - vision.patch_dropout))) if vision.patch_dropout else patches
    patch_numbers = 3 * vision.patch_size**2 * patches
    return TowerSizes(
        layers=vision.layers,
        width=vision.width,
        hidden=int(vision.width * vision.mlp_ratio),
        heads=vision.heads,
        tokens=kept + 1,
        pooled=vision.pool_type == "tok",
        quick_gelu=model.quick_gelu,
        layer_scale=vision.ls_init_value is not None,
        projection_operations=2 * vision.width * model.embed_dim,
        tensor_ranks=tensor_ranks,
        stem_copies=0 if vision.no_ln_pre else 1,
        head_copies=0 if vision.pool_type == "tok" or vision.final_ln_after_pool else 1,
        pixels=3 * vision.image_size**2,
        patch_numbers=patch_numbers,
        embedded_numbers=patches * vision.width,
        embedding_operations=2 * patch_numbers * vision.width,
    )


def text_sizes(model: ModelConfig, tensor_ranks: int = 1) -> TowerSizes:
    """Return the sizes of the text tower."""
    text = model.text_cfg
    return TowerSizes(
        layers=text.layers,
        width=text.width,
        hidden=int(text.width * text.mlp_ratio),
        heads=text.heads,
        tokens=text.context_length,
        pooled=True,
        quick_gelu=model.quick_gelu,
        layer_scale=text.ls_init_value is not None,
        projection_operations=2 * text.width * model.embed_dim,
        tensor_ranks=tensor_ranks,
    )


def tower_memory(whole: TowerSizes, part: TowerSizes, compute_bytes: int, checkpointing: str) -> TowerMemory:
    """Return the bytes of one sample. part: `whole`, or the part of it that has a graph.

    checkpointing: activation checkpointing, "", "gpu" or "cpu" (the blocks' inputs are kept in host memory).
    """
    forward, graph = _forward_peak(whole, compute_bytes), _graph(part, compute_bytes, checkpointing)
    stem = whole.tensor_ranks * (whole.embedded_numbers + whole.tokens * whole.width)
    beside_graph = forward if checkpointing else (whole.input_numbers + stem) * compute_bytes
    return TowerMemory(
        forward_peak=forward,
        graph=graph,
        forward_peak_with_graph=max(forward, beside_graph + graph),
        backward_peak=_backward_peak(part, compute_bytes, checkpointing),
        block_inputs=_block_inputs(part, compute_bytes),
    )


def pass_costs(tower: TowerSizes, compute_bytes: int) -> PassCosts:
    """Return the work of one sample in the passes through `tower`."""
    forward, backward = _moved_numbers(tower)
    whole_blocks, last = (tower.layers - 1, 1) if tower.pooled else (tower.layers, 0)
    return PassCosts(
        layers=tower.layers,
        block_inputs=_block_inputs(tower, compute_bytes),
        products=_product_operations(tower),
        attention=attention_operations(tower),
        forward_bytes=forward * compute_bytes,
        backward_bytes=backward * compute_bytes,
        # The last block sums one token, except for the gradient of attention's input.
        forward_sum=(whole_blocks * tower.tokens + last) * tower.width,
        backward_sums=(2 * whole_blocks * tower.tokens + last * (1 + tower.tokens)) * tower.width,
    )


def attention_operations(tower: TowerSizes) -> float:
    """Return one rank's operations of attention for one of its samples in a forward pass, in whole tiles."""
    keys = _whole(tower.tokens, ATTENTION_TILE)
    width = tower.heads * _whole(tower.width // tower.heads, ATTENTION_CHANNELS)
    last = ATTENTION_TILE if tower.pooled else keys
    return 4 * ((tower.layers - 1) * keys + last) * keys * width


def _whole(size: float, tile: int) -> int:
    return math.ceil(size / tile) * tile


def _forward_peak(tower: TowerSizes, compute_bytes: int) -> float:
    ranks, embedded = tower.tensor_ranks, tower.embedded_numbers
    block = tower.token_bytes(4 + (3 if tower.quick_gelu else 2) * tower.mlp_ratio / ranks, 0, compute_bytes)
    in_blocks = block + ranks * embedded * compute_bytes
    in_stem = ranks * (embedded + max(tower.patch_numbers, 2 * embedded)) * compute_bytes
    return max(in_blocks, in_stem) + tower.input_numbers * compute_bytes


def _graph(tower: TowerSizes, compute_bytes: int, checkpointing: str) -> float:
    copies, rows = tower.stem_copies + tower.head_copies, float(tower.head_rows)
    if not checkpointing:
        tokens = tower.token_bytes(tower.numbers_of_blocks + copies, tower.layers, compute_bytes)
        rows += tower.pooled_block_rows
    else:
        tokens = tower.token_bytes(copies, 0, compute_bytes)
        tokens += _block_inputs(tower, compute_bytes) if checkpointing == "gpu" else 0.0
    return tokens + tower.tensor_ranks * (tower.patch_numbers + rows * tower.width) * compute_bytes


def _block_inputs(tower: TowerSizes, compute_bytes: int) -> float:
    return tower.tensor_ranks * tower.tokens * tower.width * tower.layers * compute_bytes


def _backward_peak(tower: TowerSizes, compute_bytes: int, checkpointing: str) -> float:
    blocks = tower.layers
    pooled_block = tower.numbers_of_blocks + 2 / tower.tensor_ranks
    if tower.is_part and tower.layers == int(tower.pooled):  # no block computes all tokens
        numbers = pooled_block if tower.pooled else 0.0
    elif checkpointing:
        inputs = 1 if checkpointing == "cpu" else tower.layers + (-1 if tower.pooled else 1)
        numbers = inputs - 1 + tower.block_numbers + tower.mlp_gradients
        blocks = 1
    else:
        whole_blocks = tower.layers - 1 if tower.pooled else tower.layers
        numbers = whole_blocks * tower.block_numbers + tower.mlp_gradients
        if tower.pooled:
            numbers = max(numbers, pooled_block)
    rows = (tower.pooled_block_rows + tower.head_rows) * tower.width
    kept = tower.input_numbers + tower.tensor_ranks * (tower.patch_numbers + rows)
    return tower.token_bytes(numbers + tower.stem_copies, blocks, compute_bytes) + kept * compute_bytes


def _product_operations(tower: TowerSizes) -> float:
    """Return one rank's operations of matrix products for one of its samples in a forward pass."""
    rest = 2 * tower.width * (2 * tower.width + 2 * tower.hidden)  # one token's query, output and MLP
    keys_values = 4 * tower.width**2
    whole_block = tower.tokens * (rest + keys_values)
    last = tower.tokens * keys_values + rest if tower.pooled else whole_block
    outside = tower.tensor_ranks * (tower.embedding_operations + tower.projection_operations)
    return (tower.layers - 1) * whole_block + last + outside


def _moved_numbers(tower: TowerSizes) -> tuple[float, float]:
    """Return the numbers that one rank's norms, activation functions and sums read and write for one of its samples,
    in a forward and in a backward pass. Of a pooled last block only the norm and the gradients of all tokens count."""
    ranks, ratio = tower.tensor_ranks, tower.mlp_ratio
    scales, splits = tower.layer_scale, ranks > 1
    gelu_forward, gelu_backward = (7, 14) if tower.quick_gelu else (2, 3)
    block = (
        ranks * (10 + 4 * scales + 4 * splits) + gelu_forward * ratio + (6 + 2 * ratio) * splits,
        ranks * (20 + 12 * scales + 2 * splits) + (gelu_backward + 1) * ratio + 3,
    )
    last = (ranks * 2 + 4 * splits, ranks * (9 + 2 * splits) + 2) if tower.pooled else block
    forward, backward = (
        tower.tokens * tower.width * ((tower.layers - 1) * every + once)
        for every, once in zip(block, last, strict=True)
    )
    return forward, backward
