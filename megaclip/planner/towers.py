"""Costs of one micro-batch through one tower: bytes that autograd keeps for the backward pass, and operations.

A pre-norm block of width C and MLP width r C keeps, per token and in units of C numbers: its input, the norms' outputs
(2), queries, keys and values (3), attention's output, the sum after attention, and the MLP's two hidden layers (2 r):
8 + 2 r. QuickGELU keeps its sigmoid too (r), LayerScale its two inputs (2). Where one token stands for the sample, the
last block keeps its input, a norm's output, keys and values of every token (4), the rest of that one token. In float32,
whatever the precision: mean and deviation of two norms (4 numbers) and attention's log-sum-exp per head.
`tests/unit/test_planner_towers.py` compares the formula with the bytes that autograd saves.

The peak of the backward pass is at the last whole block's MLP (the gradient of its output and of its hidden layer), or,
if that is more, at the pooled block's attention (gradients of keys and values). With activation checkpointing only the
blocks' inputs are kept, and one block is run again.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megaclip.models import ModelConfig
from megaclip.planner.cluster import Rates
from megaclip.planner.workload import Parameters, Workload


@dataclass(frozen=True)
class Tower:
    """Sizes of one tower that its costs depend on."""

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    tokens: int
    """Tokens per sample, after patch dropout."""
    pooled: bool
    """Whether one token stands for the sample, so that the last block computes only that one."""
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

    @property
    def _ratio(self) -> float:
        return self.hidden / self.width

    @property
    def _block(self) -> float:
        """Numbers that a whole block saves per token, in the compute dtype, in units of the width."""
        ratio = self._ratio
        return 8 + 2 * ratio + (ratio if self.quick_gelu else 0) + (2 if self.layer_scale else 0)

    @property
    def _blocks(self) -> float:
        """Numbers that all blocks save per token, in units of the width."""
        return (self.layers - 1) * self._block + (4 if self.pooled else self._block)

    @property
    def _mlp_gradients(self) -> float:
        """Numbers per token that a whole block's MLP takes in its backward pass, beside those saved."""
        return 1 + self._ratio * (2 if self.quick_gelu else 1)

    def saved_bytes(self, samples: int, compute_bytes: int) -> float:
        """Return what autograd keeps of a forward pass without checkpointing, without the tower's input."""
        numbers = self._blocks + self.stem_copies + self.head_copies
        return samples * (self._token_bytes(numbers, self.layers, compute_bytes) + self.patch_numbers * compute_bytes)

    def backward_peak(self, samples: int, compute_bytes: int, checkpointing: str) -> float:
        """Return the peak of input, activations and their gradients during the backward pass."""
        if checkpointing:
            inputs = 1 if checkpointing == "cpu" else self.layers + (-1 if self.pooled else 1)
            numbers = inputs - 1 + self._block + self._mlp_gradients
            blocks = 1
        else:
            whole = (self.layers - 1 if self.pooled else self.layers) * self._block + self._mlp_gradients
            numbers = max(whole, self._blocks + 2) if self.pooled else whole
            blocks = self.layers
        numbers += self.stem_copies
        kept = self.input_numbers + self.patch_numbers
        return samples * (self._token_bytes(numbers, blocks, compute_bytes) + kept * compute_bytes)

    def forward_peak(self, samples: int, compute_bytes: int) -> float:
        """Return the peak of a forward pass without graph: the input and one block's working set."""
        kept = self.input_numbers * compute_bytes
        return samples * (self._token_bytes(2 + 2 * self._ratio, 0, compute_bytes) + kept)

    def block_input_bytes(self, samples: int, compute_bytes: int) -> float:
        """Return the bytes of all blocks' inputs, which are what activation checkpointing keeps."""
        return samples * self.tokens * self.width * self.layers * compute_bytes

    def forward_operations(self) -> float:
        """Return the operations of one sample's forward pass; a multiply-add is two. The backward pass has twice as
        many."""
        rest = 2 * self.width * (2 * self.width + 2 * self.hidden)  # one token's query, output and MLP
        keys_values = 4 * self.width**2
        attention = 4 * self.tokens * self.width
        whole_block = self.tokens * (rest + keys_values + attention)
        last = self.tokens * keys_values + rest + attention if self.pooled else whole_block
        return (self.layers - 1) * whole_block + last + self.stem_operations

    def _token_bytes(self, numbers: float, blocks: int, compute_bytes: int) -> float:
        """Return one sample's bytes: `numbers` widths per token, and the float32 statistics of so many blocks."""
        return self.tokens * (numbers * self.width * compute_bytes + blocks * (16 + 4 * self.heads))


def image_tower(model: ModelConfig) -> Tower:
    """Return the image tower's sizes in training, where patch dropout removes patches."""
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
    )


def text_tower(model: ModelConfig) -> Tower:
    """Return the text tower's sizes."""
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
    )


class TowerWork(NamedTuple):
    """A tower, its parameters, and its chunks per step."""

    tower: Tower
    parameters: Parameters
    micro_batch: int
    chunks: int


def tower_work(workload: Workload) -> tuple[TowerWork, TowerWork]:
    """Return the work of the image tower and of the text tower, on one rank in one step."""
    (image, text), parameters, batch = towers(workload), workload.parameters, workload.batch
    return (
        TowerWork(image, parameters[0], batch.micro_batch, batch.accumulation),
        TowerWork(text, parameters[1], batch.text_micro_batch, batch.text_chunks),
    )


def forward_seconds(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Return the seconds of one sample's forward pass through the image tower and through the text tower."""
    image, text = towers(workload)
    return image.forward_operations() / rates.image_flops, text.forward_operations() / rates.text_flops


def towers(workload: Workload) -> tuple[Tower, Tower]:
    """Return the sizes of the image tower and of the text tower."""
    pair = image_tower(workload.model), text_tower(workload.model)
    if workload.megaclip.compile_blocks:  # the compiler computes QuickGELU's sigmoid again instead of keeping it
        pair = replace(pair[0], quick_gelu=False), replace(pair[1], quick_gelu=False)
    return pair
