"""Choose where a run decodes its training images (--image-decoder): in the data workers, or on the GPU."""

import torch

from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.data import CPU_DECODER, GPU_DECODER, GpuDecoder, ImageTransform, open_gpu_decoder
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
        """Seconds of waiting for samples and of the whole step, for the first steps of this process."""
        if setting == "gpu":
            self.use_gpu()

    @property
    def libraries(self) -> str:
        """Libraries that decode and resize."""
        return CPU_DECODER if self.gpu is None else GPU_DECODER

    def use_gpu(self) -> None:
        """Decode JPEG files on the GPU. Raises ConfigError, on every rank, if a rank cannot."""
        decoder = None
        with raise_on_all_ranks():
            decoder = open_gpu_decoder(self._device, self._transform.interpolation)
        self.gpu = decoder

    def step_done(self, store: StepStore, waited_s: float, step_s: float) -> bool:
        """Return True if later steps of `store` have another decoder. Called after each step.

        "auto" tries the GPU after step 1 + WAITED_STEPS if the steps wait for samples, and goes back if later steps
        are not shorter. The first step waits for the workers to start. The first steps of a decoder have samples that
        the one before has prepared.
        """
        if not self._measures:
            return False
        self._steps.append((waited_s, step_s))
        if len(self._steps) == 1 + WAITED_STEPS:
            self._measures = self.gpu is None and self._tries_gpu(store)
            return self._measures
        if len(self._steps) == 1 + 3 * WAITED_STEPS:
            self._measures = False
            return self._goes_back(store)
        return False

    def _tries_gpu(self, store: StepStore) -> bool:
        waited_s, total_s = (sum(step[part] for step in self._steps[1:]) for part in (0, 1))
        share = max(gather_objects(waited_s / total_s))
        before, steps = self.libraries, f"the first steps waited for samples for {share:.0%} of their time"
        if share <= WAITED_SHARE:
            logger.info("--image-decoder auto: %s, so %s decode all images", steps, before)
            return False
        try:
            self.use_gpu()
        except ConfigError as problem:
            logger.info("--image-decoder auto: %s, but %s", steps, problem)
            return False
        store.decode_on(self.gpu)
        logger.info("--image-decoder auto: %s; from now on %s decode, not %s", steps, self.libraries, before)
        return True

    def _goes_back(self, store: StepStore) -> bool:
        first, last = self._steps[1 : 1 + WAITED_STEPS], self._steps[-WAITED_STEPS:]
        before, now = (max(gather_objects(sum(seconds for _, seconds in steps))) for steps in (first, last))
        tried, is_slow = self.libraries, now > LARGEST_TIME * before
        if is_slow:
            self.gpu = None
            store.decode_on(None)
        logger.info(
            "--image-decoder auto: a step takes %.3f s with %s and %.3f s before; %s decode",
            now / WAITED_STEPS,
            tried,
            before / WAITED_STEPS,
            self.libraries,
        )
        return is_slow
