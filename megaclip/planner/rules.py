"""Rules that a run and its plan share: how often towers run, and where embeddings and images are kept.

Each rule is one function of plain numbers. The run calls it with its own figures and the planner with planned ones, so
that a run cannot do something else than its plan. `megaclip.losses.plan.choose_way` is the rule of the exchange.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megaclip.planner.constants import EMBEDDINGS_SHARE


class ImagePlace(NamedTuple):
    """Where a step's images are kept between the two passes over them."""

    name: str
    """"cpu" (host memory), "disk", "reread" (nowhere: they are read twice) or "once" (one pass is all that reads
    them)."""
    fits: bool
    """Whether the place has enough free bytes."""

    @property
    def keeps(self) -> bool:
        """Whether the images stay in this place until the next step."""
        return self.name in ("cpu", "disk")


def keeps_graph(chunks: Sequence[int], trained: Sequence[bool]) -> bool:
    """Return whether one forward pass of each tower is enough: each needs a graph for one chunk at most, and keeps it.

    chunks: number of chunks of each tower in a step. trained: whether the tower has trainable parameters.
    """
    needing_graph = sum(count for count, is_trained in zip(chunks, trained, strict=True) if is_trained)
    return all(count == 1 for count in chunks) or needing_graph == 1


def image_passes(chunks: Sequence[int], trained: Sequence[bool]) -> int:
    """Return how often the image tower, the first of both sequences, reads a step's images: 1 or 2."""
    return 1 if keeps_graph(chunks, trained) or not trained[0] else 2


def embeddings_on_cpu(setting: bool | str, nbytes: float, gpu_memory: float) -> bool:
    """Return whether embeddings and their gradients are kept in host memory while the towers run.

    setting: megaclip.embeddings_offload. nbytes: bytes of one rank's embeddings of both towers and of their gradients.
    gpu_memory: bytes of the whole GPU, free or not; 0 if training runs on the CPU.
    """
    if setting == "auto":
        return 0 < EMBEDDINGS_SHARE * gpu_memory < nbytes
    return bool(setting)


def place_images(setting: str, *, passes: int, nbytes: float, host_memory: float, disk: float) -> ImagePlace:
    """Return where a step's images are kept. setting: megaclip.data_offload. passes: `image_passes`.

    nbytes: bytes of the images of all ranks of a host. host_memory, disk: bytes that a host can use for them, without
    what else the run needs there.
    """
    if setting == "reread" or (setting == "auto" and passes == 1):
        return ImagePlace("once" if passes == 1 else "reread", fits=True)
    if setting == "auto":
        setting = "cpu" if nbytes <= host_memory else "disk"
    return ImagePlace(setting, fits=nbytes <= (host_memory if setting == "cpu" else disk))
