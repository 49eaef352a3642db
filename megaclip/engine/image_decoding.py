"""Choose where a run decodes its training images (--image-decoder): in the data workers, on the GPU, or on both."""

from statistics import fmean

import torch

from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.data import GpuDecoder, ImageTransform, image_decoder, open_gpu_decoder
from megaclip.engine.metrics import WAITED_SHARE, WAITED_STEPS
from megaclip.errors import ConfigError
from megaclip.logging import get_logger
from megaclip.step.sample_store import StepStore

logger = get_logger(__name__)

LARGEST_TIME = 0.95
"""Time of a step with the GPU divided by that without it, above which "auto" goes back to the data workers."""


class ImageDecoding:
    """The decoder of a run's training images. All ranks call each method together.

    setting: value of --image-decoder.
    """

    def __init__(self, setting: str, device: torch.device, transform: ImageTransform) -> None:
        """Raises ConfigError, on every rank, if the setting is "gpu" and a rank cannot decode on its GPU."""
        self._device, self._transform = device, transform
        self._measures = setting == "auto" and transform.training
        self.gpu: GpuDecoder | None = None
        """Decoder of the JPEG files that workers leave to the GPU; None if they decode all."""
        self._steps: list[tuple[float, float]] = []
        """Seconds of waiting for samples and of the whole step, for each step since the last change."""
        self._times: dict[int, float] = {}
        """Seconds of a step by the number of samples in eight that the GPU decoded."""
        if setting == "gpu":
            with raise_on_all_ranks():
                self.use_gpu()

    @property
    def libraries(self) -> str:
        """Libraries that decode and resize."""
        return image_decoder(self.gpu.eighths if self.gpu else 0)

    def use_gpu(self, eighths: int = 8) -> None:
        """Decode the JPEG files of `eighths` samples in eight on the GPU. Raises ConfigError if it cannot."""
        self.gpu = open_gpu_decoder(self._device, self._transform.interpolation, eighths)

    def step_done(self, batch: StepStore, waited_s: float, step_s: float) -> bool:
        """Return True if later steps of `batch` have another decoder. Called after each step.

        If the steps after the first one, which waits for the workers to start, wait for samples, "auto" tries the GPU,
        and then the share of the samples with which workers and GPU should take equally long. The fastest of the three
        stays. The first steps after a change have samples that were prepared before it.
        """
        if not self._measures:
            return False
        self._steps.append((waited_s, step_s))
        if len(self._steps) < (2 * WAITED_STEPS if self._times else 1 + WAITED_STEPS):
            return False
        ranks = gather_objects([fmean(values) for values in zip(*self._steps[-WAITED_STEPS:], strict=True)])
        waited_s, step_s = map(max, zip(*ranks, strict=True))
        self._steps.clear()
        before, now = self.libraries, self.gpu.eighths if self.gpu else 0
        self._times[now] = step_s
        logger.info("--image-decoder auto: %s: %.3f s a step, %.3f s of it for samples", before, step_s, waited_s)
        if len(self._times) == 1:
            self._waited_s = waited_s
            chosen = 8 if not now and waited_s > WAITED_SHARE * step_s else now
            self._measures = chosen != now
        elif len(self._times) == 2:
            # Workers take share * (their excess over the step), and the GPU the rest of its step, equally long.
            chosen = min(7, max(1, round(8 * self._waited_s / (self._waited_s + step_s))))
        else:
            chosen = min(self._times, key=self._times.__getitem__)
            chosen = chosen if self._times[chosen] <= LARGEST_TIME * self._times[0] else 0
            self._measures = False
        try:
            with raise_on_all_ranks():
                if chosen:
                    self.use_gpu(chosen)
                else:
                    self.gpu = None
        except ConfigError as problem:
            self.gpu, self._measures = None, False
            logger.info("--image-decoder auto: %s", problem)
        batch.decode_on(self.gpu)
        logger.info("--image-decoder auto: from now on %s decode", self.libraries)
        return self.libraries != before
