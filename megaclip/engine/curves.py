"""Write scalars and pictures to TensorBoard and to DeepSpeed's monitors. A run continues if they cannot be written."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from megaclip.errors import first_line
from megaclip.logging import get_logger

logger = get_logger(__name__)


class Curves:
    """Writer of the curves of a run, on the rank that reports.

    If a file cannot be written, for example because the disk is full, the error is logged once. The run then continues
    without TensorBoard or without DeepSpeed's monitors. A resumed run writes both again.
    """

    def __init__(self, folder: Path, start_step: int, monitor: Any) -> None:
        """
        Args:
            folder: folder of TensorBoard's files.
            start_step: number of steps that are already done. TensorBoard hides what an earlier process wrote after
                this step.
            monitor: DeepSpeed's MonitorMaster, or None.
        """
        self._writer: SummaryWriter | None = None
        self._monitor = monitor if monitor is not None and monitor.enabled else None
        self._folder = folder
        _hide_traceback_of_writer()
        try:
            self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)
        except OSError as error:
            self._continue_without_tensorboard(error)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars by name."""
        self._try(lambda writer: [writer.add_scalar(name, value, step) for name, value in scalars.items()])
        if self._monitor is None:
            return
        try:
            self._monitor.write_events([(name, value, step) for name, value in scalars.items()])
        except OSError as error:
            self._monitor = None
            logger.warning("the monitors of ds_config.json cannot write (%s); the run continues without them", error)

    def write_pictures(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Write pictures, (3, H, W) uint8, by name."""
        self._try(lambda writer: [writer.add_image(name, picture, step) for name, picture in pictures.items()])

    def flush(self) -> None:
        """Write buffered values to the file."""
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        """Write buffered values and close the file."""
        self._try(lambda writer: writer.close())
        self._writer = None

    def _try(self, action: Any) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except OSError as error:
            self._continue_without_tensorboard(error)

    def _continue_without_tensorboard(self, error: OSError) -> None:
        self._writer = None
        logger.warning(
            "TensorBoard's files in %s cannot be written (%s); the run continues without curves; to get them after a "
            "resume, free space or fix permissions first",
            self._folder,
            first_line(error),
        )


def _hide_traceback_of_writer() -> None:
    """Keep TensorBoard's thread from printing the traceback of an error that `Curves` reports."""
    before = threading.excepthook

    def hook(arguments: Any) -> None:
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            before(arguments)

    if getattr(before, "__module__", None) != __name__:
        threading.excepthook = hook
