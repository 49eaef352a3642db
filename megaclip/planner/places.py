"""Decide where a run keeps a step's images and embeddings between its passes over them."""

from typing import NamedTuple

from megaclip.planner.constants import EMBEDDINGS_SHARE


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

    @property
    def text(self) -> str:
        """The place in words, for logs."""
        return {
            "cpu": "images are kept in host memory",
            "disk": "images are kept on disk",
            "reread": "images of chunks that are encoded twice are read twice",
            "once": "images are read once",
        }[self.name]


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
