"""Store a step's samples: a thread fills the store from the loader, and both passes of the gradient cache read it.

Pixels are kept in slots of one image chunk each (`megaclip.engine.image_slots`). With a slot for every chunk of the
rank's share, the second pass reads the chunks of the first one again, and each slot that it releases is filled for the
next step. With fewer slots no images are kept, and the loader reads them a second time for the second pass. Tokens are
small, and all of them are kept.

If a rank's data fail in the middle of a step, it continues with blank chunks, because the other ranks wait for it in
collectives; `agree` then ends the step on all ranks, before parameters are updated.

Shapes: n image chunks of m rows each, b = n m rows of this rank, L tokens.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.config import BatchPlan, TrainArguments
from megaclip.data import TrainLoader
from megaclip.engine.gradient_cache import trained_towers
from megaclip.engine.image_slots import WINDOW, ImageSlots
from megaclip.engine.inputs import Inputs
from megaclip.engine.step_batch import DeviceFeed, Tower
from megaclip.planner.rules import ImagePlace, image_passes

_POLL_S = 1.0
"""Seconds between two checks for dead worker processes while a step waits for data."""
_JOIN_S = 2.0
"""Seconds that closing waits for the thread. A thread that is longer in the loader ends when the loader returns."""


@contextmanager
def open_step_store(
    arguments: TrainArguments,
    inputs: Inputs,
    batch_plan: BatchPlan,
    engine: DeepSpeedEngine,
    *,
    place: ImagePlace,
    folder: Path,
    samples_consumed: int,
) -> Iterator["StepStore"]:
    """Open the run's training data from `samples_consumed` on, step by step; every rank opens it.

    Args:
        place: where the run's plan keeps a step's images (`megaclip.engine.preflight`).
        folder: the folder of a file of images, unless the command line names another one.

    Raises:
        ConfigError: on every rank, if the images' memory or file cannot be reserved.
        DataError: on every rank, if the batch is larger than the data.
    """
    size = inputs.train_transform.size
    slot = (batch_plan.micro_batch, 3, size, size)
    trained = trained_towers(engine.module)
    passes = image_passes((batch_plan.accumulation, batch_plan.text_chunks), [tower in trained for tower in Tower])
    reads_per_step = 1 if place.keeps else passes
    loader = TrainLoader(
        inputs.train,
        inputs.train_transform,
        inputs.tokenizer,
        micro_batch_size=batch_plan.micro_batch,
        micro_batches_per_step=batch_plan.accumulation,
        reads_per_step=reads_per_step,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        seed=arguments.seed,
        num_workers=arguments.workers,
        samples_consumed=samples_consumed,
        shard_order=arguments.shard_order,
        max_bad_fraction=arguments.max_bad_fraction,
    )
    count = batch_plan.accumulation if place.keeps else min(WINDOW, batch_plan.accumulation * reads_per_step)
    file_folder = Path(arguments.data_offload_dir or folder) if place.name == "disk" else None
    slots = ImageSlots((count, *slot), engine.device, file_folder)
    feed = DeviceFeed(engine.device, engine.get_data_types()[0], inputs.train_transform.normalise)
    length = inputs.model_config.text_cfg.context_length
    with (
        closing(slots),
        StepStore(
            loader, batch_plan, feed, slots.tensor, context_length=length, reads_per_step=reads_per_step
        ) as store,
    ):
        yield store


class StepStore:
    """A `StepBatch` of the current step; `next_step` proceeds to the next one. Context manager: it owns a thread."""

    def __init__(
        self,
        loader: TrainLoader,
        batch_plan: BatchPlan,
        feed: DeviceFeed,
        slots: Tensor,
        *,
        context_length: int,
        reads_per_step: int,
    ) -> None:
        """
        Args:
            loader: yields Batches of m rows, those of each step `reads_per_step` times.
            slots: (S, m, 3, H, W) uint8 in host memory. S = n slots keep a step's pixels; fewer slots do not.
            reads_per_step: how often the loader reads a step: 2 if the image tower runs twice and the slots do not keep
                the pixels, else 1.
        """
        self._loader, self._batch_plan, self._feed, self._slots = loader, batch_plan, feed, slots
        self._reads_per_step = reads_per_step
        self._first_sample = loader.samples_consumed
        # For this step and the next one. Chunks of a third step cannot arrive before this step's slots are free.
        self._tokens = torch.empty(2, batch_plan.local_batch, context_length, dtype=torch.int32)
        self._step = 0
        self._filled = 0
        """Number of chunks read since the start of the run."""
        self._released = 0
        """Number of chunks whose slots are free again."""
        self._failure: Exception | None = None
        """Error that ended the background thread."""
        self.waited_s = 0.0
        """Seconds that the towers have waited for chunks since the start of the run."""
        self._missed = False
        """Whether this step used blank chunks because data failed."""
        self.bad_counts: dict[str, int] = {}
        """Number of bad samples by kind that this rank replaced in the completed steps."""
        self._bad_counts_read: list[dict[str, int]] = [{}, {}]
        """The loader's counts after its last chunk of an even step and of an odd step."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="step-store", daemon=True)
        self._thread.start()

    def __enter__(self) -> "StepStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the background thread and the loader's workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        self._loader.close()

    def next_step(self) -> None:
        """Proceed to the next step, after both passes over this one."""
        self.bad_counts = self._bad_counts_read[self._step % 2]
        self._step += 1

    def ids(self) -> Tensor:
        """Return the sample ids of this step, (b,) int64, in the order of the rows."""
        return self._loader.ids_of_step(self._batch_plan.global_batch * self._step + self._first_sample)

    def rows(self) -> int:
        return self._batch_plan.local_batch

    def chunk_count(self, tower: Tower) -> int:
        return self._batch_plan.accumulation if tower is Tower.IMAGE else self._batch_plan.text_chunks

    def chunks(self, tower: Tower, *, again: bool) -> Iterator[Tensor]:
        return self._feed.inputs(tower, self._pixels(again) if tower is Tower.IMAGE else self._texts())

    def blank(self, tower: Tower) -> Tensor:
        like = self._slots[0, :1] if tower is Tower.IMAGE else self._tokens[0, :1]
        (row,) = self._feed.inputs(tower, [torch.zeros_like(like)])
        return row

    def agree(self) -> None:
        missed, self._missed = self._missed, False
        with raise_on_all_ranks():
            if missed and self._failure is not None:
                raise self._failure

    def _pixels(self, again: bool) -> Iterator[Tensor]:
        """Yield this step's pixels; a slot is free when the next one is requested, unless it is needed again."""
        keeps = again and self._reads_per_step == 1
        second_reading = not again and self._reads_per_step == 2
        first = self._first_chunk + second_reading * self._batch_plan.accumulation
        for number in range(first, first + self._batch_plan.accumulation):
            here = self._wait_for(number)
            yield self._slots[number % len(self._slots)] if here else torch.zeros_like(self._slots[0])
            if not keeps:
                self._release(number)

    def _texts(self) -> Iterator[Tensor]:
        tokens = self._tokens[self._step % 2]
        for start in range(0, self._batch_plan.local_batch, self._batch_plan.text_micro_batch):
            end = start + self._batch_plan.text_micro_batch
            here = self._wait_for(self._first_chunk + (end - 1) // self._batch_plan.micro_batch)
            yield tokens[start:end] if here else torch.zeros_like(tokens[start:end])

    @property
    def _first_chunk(self) -> int:
        """Number of this step's first chunk, counted from the start of the run."""
        return self._step * self._chunks_per_step

    @property
    def _chunks_per_step(self) -> int:
        return self._batch_plan.accumulation * self._reads_per_step

    def _wait_for(self, number: int) -> bool:
        """Wait for chunk `number`; return whether it has arrived (it has not if the data failed)."""
        began = time.perf_counter()
        with self._changed:
            while self._filled <= number and self._failure is None:
                self._changed.wait(_POLL_S)
                try:
                    self._loader.check_workers()
                except Exception as error:  # `agree` raises it on every rank
                    self._failure = error
            here = self._filled > number
            self._missed |= not here
            self.waited_s += time.perf_counter() - began
            return here

    def _release(self, number: int) -> None:
        with self._changed:
            self._released = number + 1
            self._changed.notify_all()

    def _fill(self) -> None:
        """Read chunk after chunk into the slots as they become free; runs in the background thread."""
        try:
            for number in itertools.count():
                batch = next(self._loader)
                with self._changed:
                    while not self._closing and number - self._released >= len(self._slots):
                        self._changed.wait()
                    if self._closing:
                        return
                self._slots[number % len(self._slots)].copy_(batch.images)
                step, chunk = divmod(number, self._chunks_per_step)
                if chunk < self._batch_plan.accumulation:
                    start = chunk * self._batch_plan.micro_batch
                    self._tokens[step % 2, start : start + self._batch_plan.micro_batch].copy_(batch.tokens)
                    self._bad_counts_read[step % 2] = self._loader.bad_counts
                with self._changed:
                    self._filled = number + 1
                    self._changed.notify_all()
        except BaseException as error:  # also a tokenizer's Rust panic; `agree` raises it on every rank
            with self._changed:
                self._failure = error if isinstance(error, Exception) else RuntimeError(f"the loader ended: {error!r}")
                self._changed.notify_all()
