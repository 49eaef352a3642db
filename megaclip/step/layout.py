"""Rules that a run and its plan share: which graphs are kept, whether captions are cut, and where embeddings and images
are kept.

Each rule is a function of plain numbers. The planner applies the rules to planned figures. A run follows its own plan
(`megaclip.engine.preflight`). After its first steps it applies `graphs_that_fit` again, to the memory that these steps
left free. The rule for exchange and reduction is `megaclip.losses.plan.choose_way`.

If an argument describes both towers, the image tower comes first.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megaclip.config import TrainingConfig
from megaclip.config.training import TextChunks
from megaclip.errors import ConfigError
from megaclip.models import ModelDescription, OpenClipConfig, OpenClipText, TextConfig
from megaclip.models.text import is_cut_exact
from megaclip.planner.constants import EMBEDDINGS_SHARE, LEAST_CUT_CHUNKS, LEAST_KEPT_SHARE, RECOMPUTE_SHARE
from megaclip.planner.traced_towers import traced_image_tower, traced_text_tower


class ImagePlace(NamedTuple):
    """Place where a step's images are kept between the two passes over them."""

    name: str
    """"cpu" (host memory), "disk", "reread" (not kept: those that are encoded twice are read twice) or "once" (not
    kept: each is read once)."""
    fits: bool
    """True if the place has enough free bytes."""

    @property
    def keeps(self) -> bool:
        """True if the images stay in this place until the next step."""
        return self.name in ("cpu", "disk")


class KeptGraphs(NamedTuple):
    """Number of chunks of each tower whose graphs a step keeps from their forward pass to their backward pass: the
    first chunks of the tower. The others are encoded twice, without and with a graph."""

    image: int
    text: int


def encodes_together(chunks: Sequence[int], trained: Sequence[bool]) -> bool:
    """Return whether one forward pass encodes the whole share of a rank: both towers are trained, in one chunk each."""
    return all(trained) and all(count == 1 for count in chunks)


def backward_passes(chunks: Sequence[int], trained: Sequence[bool]) -> int:
    """Return the number of backward passes of a step; without a trained tower there is one, for the loss's scalars."""
    return 1 if encodes_together(chunks, trained) else max(1, sum(_graphs(chunks, trained)))


def kept_graphs(number: int, chunks: Sequence[int], trained: Sequence[bool]) -> KeptGraphs:
    """Return the kept graphs of each tower if a step keeps `number` graphs, or all if it has fewer.

    The image tower's graphs come first. Memory is planned for captions of full length, and most captions are shorter,
    so per byte an image graph saves more computation. It also saves reading its images again. If a step has one
    backward pass, its graphs are always kept.

    chunks: number of chunks of each tower in a step. trained: whether the tower has trainable parameters.
    """
    image, text = _graphs(chunks, trained)
    if backward_passes(chunks, trained) == 1:
        number = image + text
    images = min(number, image)
    return KeptGraphs(image=images, text=min(number - images, text))


def graphs_that_fit(kept: int, graph_bytes: Sequence[float], free: float) -> int:
    """Return the number of graphs that fit if a step keeps `kept` graphs now and has `free` bytes left at its peak.

    The number does not increase if all graphs that fit are fewer than LEAST_KEPT_SHARE of the step's graphs.

    graph_bytes: largest number of bytes by which each graph of the step raises the peak, in the order of `kept_graphs`.
    """
    fitting = sum(total <= free for total in itertools.accumulate(graph_bytes[kept:]))
    return kept + fitting if kept + fitting >= LEAST_KEPT_SHARE * len(graph_bytes) else kept


def _graphs(chunks: Sequence[int], trained: Sequence[bool]) -> list[int]:
    """Return the number of graphs of each tower in a step."""
    return [count if is_trained else 0 for count, is_trained in zip(chunks, trained, strict=True)]


def cuts_captions(setting: bool | str, text: TextConfig | OpenClipText) -> bool:
    """Return whether each chunk of captions is cut at its longest caption. setting: megaclip.cut_captions."""
    return setting is not False and is_cut_exact(text)


def piece_rows(rows: int, chunk: int, chunks: int, text: TextConfig | OpenClipText, tensor_ranks: int) -> list[int]:
    """Return the number of rows of each piece that a chunk of sorted captions is divided into.

    The first of one or two chunks is divided into an eighth, an eighth, a quarter and a half: usual captions have a few
    long ones and many of similar lengths. With more chunks the first one has long captions only. Their lengths differ
    from step to step, and torch.compile would compile the blocks for each combination of lengths. Tensor-parallel ranks
    encode their rows together, so they cannot sort them together. open_clip's text towers take rows of one length.
    """
    if chunk > 0 or chunks > 2 or rows < 8 or tensor_ranks > 1 or isinstance(text, OpenClipText):
        return [rows]
    eighth = rows // 8
    return [eighth, eighth, 2 * eighth, rows - 4 * eighth]


def embeddings_on_cpu(setting: bool | str, nbytes: float, gpu_memory: float) -> bool:
    """Return whether embeddings and their gradients are kept in host memory while the towers run.

    setting: megaclip.embeddings_offload. nbytes: bytes of one rank's embeddings of both towers and of their gradients.
    gpu_memory: bytes of the whole GPU, free or not; 0 if training runs on the CPU.
    """
    if setting == "auto":
        return 0 < EMBEDDINGS_SHARE * gpu_memory < nbytes
    return bool(setting)


def place_images(setting: str, *, encoded_again: int, nbytes: float, host_memory: float, disk: float) -> ImagePlace:
    """Return where a step's images are kept. setting: megaclip.data_offload.

    encoded_again: number of image chunks that are encoded twice. nbytes: bytes of the images of all ranks of a host.
    host_memory, disk: bytes of a host that are left for them beside the other data of the run.
    """
    if setting == "reread" or (setting == "auto" and not encoded_again):
        return ImagePlace("reread" if encoded_again else "once", fits=True)
    if setting == "auto":
        setting = "cpu" if nbytes <= host_memory else "disk"
    return ImagePlace(setting, fits=nbytes <= (host_memory if setting == "cpu" else disk))


def text_chunks_for(model: ModelDescription, compute_bytes: int, cut_captions: bool | str) -> TextChunks:
    """Return the limits of a run's text chunks: the number of captions that take about as much memory as one image.

    Chunks of open_clip's text towers are not divided into pieces. They contain as little padding as the captions of an
    image chunk only if there are several text chunks. compute_bytes: bytes of an activation. cut_captions:
    megaclip.cut_captions.
    """
    if isinstance(model, OpenClipConfig):
        image, text = traced_image_tower(model).trace(compute_bytes), traced_text_tower(model).trace(compute_bytes)
        least = LEAST_CUT_CHUNKS if cuts_captions(cut_captions, model.text_cfg) else 1
        return TextChunks(max(1, int(image.backward_peak / text.backward_peak)), least)
    tower, captions = model.vision_cfg, model.text_cfg
    tokens = 1 + tower.grid_size**2 * (1 - tower.patch_dropout)
    numbers = captions.context_length * captions.width * captions.layers
    return TextChunks(max(1, round(tokens * tower.width * tower.layers / numbers)))


def fitted(config: TrainingConfig, model: ModelDescription) -> TrainingConfig:
    """Return the settings of a run with the sizes of text chunks for the model."""
    compute_bytes = 2 if config.bf16 else 4
    return replace(config, text_chunks=text_chunks_for(model, compute_bytes, config.megaclip.cut_captions))


def recomputation_pays(*, fits_without: bool, more_kept: int, image_chunks: int) -> bool:
    """Return whether compiled towers compute layer norms and activation functions again in the backward pass, if
    megaclip.selective_recompute is "auto".

    fits_without: True if the step fits without it. more_kept: number of image graphs that the step keeps with it and
    not without it. image_chunks: number of image chunks of a step.
    """
    return not fits_without or more_kept >= max(1, RECOMPUTE_SHARE * image_chunks)


def check_recomputation(setting: bool | str, *, compiles: bool) -> None:
    """Raise ConfigError if megaclip.selective_recompute is true and torch.compile does not run the towers."""
    if setting is True and not compiles:
        raise ConfigError(
            "megaclip.selective_recompute true requires torch.compile, which this run does not use; set "
            'megaclip.compile to true, or selective_recompute to "auto"'
        )


def compiles(setting: bool | str, *, on_gpu: bool, possible: bool, saved_s: float, startup_s: float) -> bool:
    """Return whether torch.compile runs the towers.

    setting: megaclip.compile. possible: False for settings with which torch.compile cannot be used. saved_s: seconds
    that compiled towers save over the run. startup_s: seconds that the compilation takes.
    """
    if setting == "auto":
        return on_gpu and possible and saved_s > startup_s
    return bool(setting)


def compiles_whole_tower(zero_stage: int, *, checkpointing: bool, coalesces: bool) -> bool:
    """Return whether the whole image tower is compiled as one graph, or each of its blocks.

    Blocks are needed if their activations are computed again one by one, if their parameters are gathered one by one
    (stage 3), and if their gradients are reduced and freed one by one (stage 2 without coalescing). Text blocks are
    always compiled one by one: captions have several lengths, and a block compiles faster than a tower.
    """
    return not checkpointing and (zero_stage < 2 or (zero_stage == 2 and coalesces))


def elements_kept_gathered(reuse_distance: int, live: int, prefetched: int, *, offloads: bool) -> int:
    """Return the number of a tower's elements that ZeRO-3 keeps gathered from one pass over the tower to the next.

    Between a forward pass and its backward pass all later parameters are used twice. So half of DeepSpeed's reuse
    distance covers a tower of that size. With offload_param none is kept, to use the least memory.

    reuse_distance, live, prefetched: stage3_max_reuse_distance, stage3_max_live_parameters and
        stage3_prefetch_bucket_size.
    """
    return 0 if offloads else max(0, min(reuse_distance // 2, live - prefetched))
