"""Costs of one micro-batch through one tower: bytes that autograd keeps for the backward pass, and operations.

The formulas are those of MegaCLIP's own towers. open_clip's towers are traced (`planner.traced_towers`).

A pre-norm block of width C and MLP width r C keeps, per token and in units of C numbers: its input, the norms' outputs
(2), queries, keys and values (3), attention's output, the sum after attention, and the MLP's two hidden layers (2 r): 8
+ 2 r. QuickGELU keeps its sigmoid too (r), LayerScale its two inputs (2). With selective recomputation it keeps neither
the norms' outputs nor the activation function's: 6 + r. Where one token stands for the sample, the last block keeps its
input, a norm's output, keys and values of every token (4), the rest of that one token. Always in float32: mean and
deviation of two norms (4 numbers) and attention's log-sum-exp per head. `tests/unit/planner/test_towers.py` compares
the formula with the bytes that autograd saves.

With tensor parallelism over T ranks, a chunk of m rows per rank is T m rows in the towers. Each rank keeps its part of
queries, keys, values, attention's output and the hidden layers, (4 + 2 r) / T, and the rest whole: 4. The part of the
operations in the blocks is T m rows divided by T; patch embedding and projection run on all T m rows on every rank.
Sizes are given for this rank's m rows and include the memory of all T m rows.

A locked tower whose last groups are trained keeps a graph of these groups only: of N groups, the projection and N - 1
blocks. The blocks below run without a graph. `Tower.part_with_graph` is a tower of the trained blocks. With few blocks
the tensors of one token are not negligible, so they are counted for a part: what a pooled block keeps of its own token,
and the input and output of the last norm.

The peak of the backward pass is at the last whole block's MLP (the gradient of its output and of its hidden layer), or,
if that is more, at the pooled block's attention (gradients of keys and values). With activation checkpointing only the
blocks' inputs are kept, and one block is run again.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megaclip.models import ModelConfig, ModelDescription, OpenClipConfig
from megaclip.planner.constants import COMPILED_TIME, RECOMPUTE_TIME
from megaclip.planner.traced_towers import TracedTower, traced_image_tower, traced_text_tower
from megaclip.planner.workload import Parameters, Workload


@dataclass(frozen=True)
class Tower:
    """Sizes of one tower that its costs depend on."""

    name: str
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
    stem_copies: int
    """Number of (tokens, width) tensors that the parts before the blocks keep."""
    head_copies: int
    """Number of (tokens, width) tensors that the parts after the blocks keep."""
    input_bytes: int
    """Bytes of one sample in the step store: uint8 pixels, int32 tokens."""
    input_numbers: int
    """Numbers of one sample that the tower takes in the compute dtype (0 for tokens, which stay integers)."""
    patch_numbers: int
    """Numbers of one sample's patches, which the patch embedding keeps."""
    stem_operations: int
    """Operations of one sample's forward pass outside the blocks; a multiply-add is two."""
    tensor_ranks: int = 1
    """Number of ranks that the blocks are split over."""
    recomputes: bool = False
    """True if layer norms and activation functions are computed again in the backward pass, as with
    megaclip.selective_recompute."""
    projection_operations: int = 0
    """Operations of one sample's projection in a forward pass, which `stem_operations` includes."""
    stem_numbers: int = 0
    """Numbers of one sample that a forward pass holds until the end of the blocks, beside the blocks' own: the
    embedded patches."""
    unlocked_groups: int | None = None
    """Number of trained groups of a locked tower. None: the tower is not locked."""
    is_part: bool = False
    """True for the part of a locked tower that has a graph."""

    @property
    def whole(self) -> "Tower":
        """The tower without a lock."""
        return replace(self, unlocked_groups=None)

    @property
    def part_with_graph(self) -> "Tower":
        """The trained part of a partly locked tower, as a tower; otherwise the tower itself."""
        groups = self.unlocked_groups
        if not groups or groups > self.layers + 1:  # nothing is trained, or the stem is
            return self
        return replace(
            self,
            layers=groups - 1,
            pooled=self.pooled and groups > 1,
            stem_copies=0,
            head_copies=self.head_copies if groups > 1 else 0,
            patch_numbers=0,
            stem_operations=self.projection_operations,
            unlocked_groups=None,
            is_part=True,
        )

    @property
    def _ratio(self) -> float:
        return self.hidden / self.width

    @property
    def _block(self) -> float:
        """Numbers that a whole block saves per token, in the compute dtype, in units of the width."""
        ratio = self._ratio
        split = 4 + ratio if self.recomputes else 4 + 2 * ratio + (ratio if self.quick_gelu else 0)
        return (2 if self.recomputes else 4) + (2 if self.layer_scale else 0) + split / self.tensor_ranks

    @property
    def _blocks(self) -> float:
        """Numbers that all blocks save per token, in units of the width."""
        return (self.layers - 1) * self._block + (2 + 2 / self.tensor_ranks if self.pooled else self._block)

    @property
    def _pooled_block_rows(self) -> float:
        """Numbers that a pooled block saves of its one token, in units of the width, with a copy of the token itself.
        Counted in a part only: in a whole tower they are negligible."""
        return self._block - 1 - 2 / self.tensor_ranks if self.is_part and self.pooled else 0

    @property
    def _head_rows(self) -> int:
        """Numbers that the parts after the blocks save of one token, in units of the width. Counted in a part only."""
        if not self.is_part:
            return 0
        return 2 if self.layers and not self.head_copies else 1  # the projection's input, and the norm's

    @property
    def _mlp_gradients(self) -> float:
        """Numbers per token that a whole block's MLP takes in its backward pass, beside those saved."""
        return 1 + self._ratio * (2 if self.quick_gelu or self.recomputes else 1) / self.tensor_ranks

    @property
    def _inputs(self) -> int:
        """Numbers in the compute dtype of one sample's input, with the gathered input of the replica's other ranks."""
        return self.input_numbers * (1 if self.tensor_ranks == 1 else 1 + self.tensor_ranks)

    def saved_bytes(self, samples: int, compute_bytes: int) -> float:
        """Return what autograd keeps of a forward pass without checkpointing, without the tower's input."""
        if (part := self.part_with_graph) is not self:
            return part.saved_bytes(samples, compute_bytes)
        numbers = self._blocks + self.stem_copies + self.head_copies
        others = self.tensor_ranks * (self.patch_numbers + (self._pooled_block_rows + self._head_rows) * self.width)
        return samples * (self._token_bytes(numbers, self.layers, compute_bytes) + others * compute_bytes)

    def graph_bytes(self, samples: int, compute_bytes: int, checkpointing: str) -> float:
        """Return the bytes on the GPU that a graph keeps until its backward pass, without the tower's input."""
        if not checkpointing:
            return self.saved_bytes(samples, compute_bytes)
        if (part := self.part_with_graph) is not self:
            return part.graph_bytes(samples, compute_bytes, checkpointing)
        outside = self._token_bytes(self.stem_copies + self.head_copies, 0, compute_bytes)
        others = self.tensor_ranks * (self.patch_numbers + self._head_rows * self.width) * compute_bytes
        inputs = self.block_input_bytes(samples, compute_bytes) if checkpointing == "gpu" else 0.0
        return samples * (outside + others) + inputs

    def backward_peak(self, samples: int, compute_bytes: int, checkpointing: str) -> float:
        """Return the peak of input, activations and their gradients during the backward pass.

        The forward pass before it may have a higher peak if the tower is partly locked: see `forward_peak`.
        """
        if (part := self.part_with_graph) is not self:
            return part.backward_peak(samples, compute_bytes, checkpointing)
        if self.is_part and self.layers == int(self.pooled):  # no block computes all tokens
            numbers = self._blocks + 2 / self.tensor_ranks if self.pooled else 0.0
            blocks = self.layers
        elif checkpointing:
            inputs = 1 if checkpointing == "cpu" else self.layers + (-1 if self.pooled else 1)
            numbers = inputs - 1 + self._block + self._mlp_gradients
            blocks = 1
        else:
            whole = (self.layers - 1 if self.pooled else self.layers) * self._block + self._mlp_gradients
            numbers = max(whole, self._blocks + 2 / self.tensor_ranks) if self.pooled else whole
            blocks = self.layers
        numbers += self.stem_copies
        rows = (self._pooled_block_rows + self._head_rows) * self.width
        kept = self._inputs + self.tensor_ranks * (self.patch_numbers + rows)
        return samples * (self._token_bytes(numbers, blocks, compute_bytes) + kept * compute_bytes)

    def forward_peak(self, samples: int, compute_bytes: int) -> float:
        """Return the peak of a forward pass without graph: the input, one block's working set and what its callers
        hold."""
        kept = self._inputs * compute_bytes
        ranks = self.tensor_ranks
        block = self._token_bytes(4 + (3 if self.quick_gelu else 2) * self._ratio / ranks, 0, compute_bytes)
        in_blocks = block + ranks * self.stem_numbers * compute_bytes
        in_stem = ranks * (self.stem_numbers + max(self.patch_numbers, 2 * self.stem_numbers)) * compute_bytes
        return samples * (max(in_blocks, in_stem) + kept)

    def peak_of_forward_with_graph(self, samples: int, compute_bytes: int, checkpointing: str) -> float:
        """Return the peak of a partly locked tower's forward pass that makes a graph."""
        locked = self.forward_peak(samples, compute_bytes)
        graph = self.graph_bytes(samples, compute_bytes, checkpointing)
        if checkpointing:
            return locked + graph
        stem = self.tensor_ranks * (self.stem_numbers + self.tokens * self.width)
        return max(locked, samples * (self._inputs + stem) * compute_bytes + graph)

    def block_input_bytes(self, samples: int, compute_bytes: int) -> float:
        """Return the bytes of the blocks' inputs that activation checkpointing keeps: all, or those of the blocks with
        a graph."""
        if (part := self.part_with_graph) is not self:
            return part.block_input_bytes(samples, compute_bytes)
        return samples * self.tensor_ranks * self.tokens * self.width * self.layers * compute_bytes

    def summed_numbers(self, forward: float, backward: int) -> float:
        """Return the numbers of one sample that all blocks sum over the tensor-parallel ranks per step.

        forward, backward: sums per block. Where one token stands for the sample, the last block sums that token only,
        except for the gradient of attention's input.
        """
        whole_blocks = (self.layers - 1 if self.pooled else self.layers) * (forward + backward) * self.tokens
        last = forward + backward // 2 * (1 + self.tokens) if self.pooled else 0
        return (whole_blocks + last) * self.width

    def product_operations(self) -> float:
        """Return one rank's operations of matrix products for one of its samples in a forward pass.

        A multiply-add is two operations. The backward pass has twice as many.
        """
        rest = 2 * self.width * (2 * self.width + 2 * self.hidden)  # one token's query, output and MLP
        keys_values = 4 * self.width**2
        whole_block = self.tokens * (rest + keys_values)
        last = self.tokens * keys_values + rest if self.pooled else whole_block
        return (self.layers - 1) * whole_block + last + self.tensor_ranks * self.stem_operations

    def _token_bytes(self, numbers: float, blocks: int, compute_bytes: int) -> float:
        """Return the bytes for one of this rank's samples: `numbers` widths per token, and the float32 statistics of so
        many blocks."""
        statistics = 16 + 4 * self.heads // self.tensor_ranks
        return self.tensor_ranks * self.tokens * (numbers * self.width * compute_bytes + blocks * statistics)


def image_tower(model: ModelDescription, tensor_ranks: int = 1) -> Tower | TracedTower:
    """Return the image tower's costs in training, where patch dropout removes patches."""
    return traced_image_tower(model) if isinstance(model, OpenClipConfig) else own_image_tower(model, tensor_ranks)


def text_tower(model: ModelDescription, tensor_ranks: int = 1) -> Tower | TracedTower:
    """Return the text tower's costs."""
    return traced_text_tower(model) if isinstance(model, OpenClipConfig) else own_text_tower(model, tensor_ranks)


def own_image_tower(model: ModelConfig, tensor_ranks: int = 1) -> Tower:
    """Return the sizes of MegaCLIP's image tower in training, where patch dropout removes patches."""
    vision = model.vision_cfg
    patches = vision.grid_size**2
    kept = max(1, int(patches * (1 - vision.patch_dropout))) if vision.patch_dropout else patches
    pixels = 3 * vision.image_size**2
    return Tower(
        name="image",
        layers=vision.layers,
        width=vision.width,
        hidden=int(vision.width * vision.mlp_ratio),
        heads=vision.heads,
        tokens=kept + 1,
        pooled=vision.pool_type == "tok",
        quick_gelu=model.quick_gelu,
        layer_scale=vision.ls_init_value is not None,
        stem_copies=0 if vision.no_ln_pre else 1,
        head_copies=0 if vision.pool_type == "tok" or vision.final_ln_after_pool else 1,
        input_bytes=pixels,
        input_numbers=pixels,
        patch_numbers=3 * vision.patch_size**2 * patches,
        stem_operations=2 * patches * 3 * vision.patch_size**2 * vision.width + 2 * vision.width * model.embed_dim,
        tensor_ranks=tensor_ranks,
        projection_operations=2 * vision.width * model.embed_dim,
        stem_numbers=patches * vision.width,
    )


def own_text_tower(model: ModelConfig, tensor_ranks: int = 1) -> Tower:
    """Return the sizes of MegaCLIP's text tower."""
    text = model.text_cfg
    return Tower(
        name="text",
        layers=text.layers,
        width=text.width,
        hidden=int(text.width * text.mlp_ratio),
        heads=text.heads,
        tokens=text.context_length,
        pooled=True,
        quick_gelu=model.quick_gelu,
        layer_scale=text.ls_init_value is not None,
        stem_copies=0,
        head_copies=0,
        input_bytes=4 * text.context_length,
        input_numbers=0,
        patch_numbers=0,
        stem_operations=2 * text.width * model.embed_dim,
        tensor_ranks=tensor_ranks,
        projection_operations=2 * text.width * model.embed_dim,
    )


class TowerWork(NamedTuple):
    """A tower, its parameters, and its chunks per step."""

    tower: Tower | TracedTower
    parameters: Parameters
    micro_batch: int
    chunks: int
    kept: int
    """Number of chunks whose graphs are kept."""
    encoded_again: int
    """Number of chunks that are encoded twice."""


def tower_work(workload: Workload, *, mean: bool = False) -> tuple[TowerWork, TowerWork]:
    """Return the work of the image tower and of the text tower, on one rank in one step. mean: as for `towers`."""
    (image, text), parameters, batch = towers(workload, mean=mean), workload.parameters, workload.batch
    kept, again = workload.kept, workload.encoded_again
    return (
        TowerWork(image, parameters[0], batch.micro_batch, batch.accumulation, kept.image, again[0]),
        TowerWork(text, parameters[1], batch.text_micro_batch, batch.text_chunks, kept.text, again[1]),
    )


def compiled_time(workload: Workload) -> tuple[float, float]:
    """Return the time of the image tower and of the text tower over that of plain PyTorch."""
    if workload.megaclip.compile is not True:
        return 1.0, 1.0
    own = "towers" if workload.compiles_image_tower else "blocks"
    image, text = COMPILED_TIME["open_clip" if isinstance(workload.model, OpenClipConfig) else own]
    longer = RECOMPUTE_TIME if workload.megaclip.selective_recompute is True else 1.0
    return longer * image, longer * text


def towers(workload: Workload, *, mean: bool = False) -> tuple[Tower | TracedTower, Tower | TracedTower]:
    """Return the sizes of the image tower and of the text tower, with their locks.

    mean: captions have the mean length after cutting, which time and traffic depend on. Default: the full length, which
    a chunk with a long caption has, and which memory is planned for.
    """
    if isinstance(workload.model, OpenClipConfig):
        share = workload.text_positions / workload.model.text_cfg.context_length if mean else 1.0
        return (
            replace(traced_image_tower(workload.model), unlocked_groups=_partly_unlocked(workload, 0)),
            replace(traced_text_tower(workload.model), unlocked_groups=_partly_unlocked(workload, 1), share=share),
        )
    ranks = workload.tensor_ranks
    pair = (
        replace(own_image_tower(workload.model, ranks), unlocked_groups=workload.image_unlocked),
        replace(own_text_tower(workload.model, ranks), unlocked_groups=workload.text_unlocked),
    )
    if mean:
        pair = pair[0], replace(pair[1], tokens=workload.text_positions)
    if workload.megaclip.compile is True:  # the compiler computes QuickGELU's sigmoid again instead of keeping it
        recomputes = workload.megaclip.selective_recompute is True
        image, text = (replace(tower, quick_gelu=False, recomputes=recomputes) for tower in pair)
        pair = image, text
    return pair


def _partly_unlocked(workload: Workload, tower: int) -> int | None:
    """Return the number of unlocked groups of one of open_clip's towers. None: all or nothing of it is trained.

    With 0 groups, towers of timm and Hugging Face keep a trained projection.
    """
    unlocked = (workload.image_unlocked, workload.text_unlocked)[tower]
    if unlocked is None:
        return None
    parameters = workload.parameters[tower]
    return unlocked if parameters.trainable and parameters.frozen else None
