"""Store a step's samples: a thread fills the store from the loader, and both passes of the gradient cache read it.

Pixels are in slots of one image chunk each (`ImageSlots`). The loader's workers write into these slots, and the device
copies from them. A few slots are for the chunks that the workers have begun (`data.loader.slots_ahead`). `data_offload`
decides the place and the number of the others:

- "cpu" or "disk": every chunk of the rank's share has a slot, in host memory or in a file. The second pass reads the
  slots again and frees each of them for the next step.
- "reread": there are few slots, which only buffer chunks. The loader reads images again for the second pass.

The first chunks of a step, whose graphs are kept, are read once, and their slots are freed in the first pass. If all
graphs are kept, there are only few slots too. All tokens are kept in host memory, because they are small. When all of a
step's tokens have arrived, they are divided into chunks (`megaclip.step.caption_chunks`).

If a rank's data fail in the middle of a step, the rank continues with blank chunks, because the other ranks wait for it
in collectives. `agree` then ends the step on all ranks, before parameters are updated.

Shapes: n image chunks of m rows each, b = n m rows of this rank, L tokens.
"""

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.data import GpuDecoder, TrainLoader
from megaclip.data.workers import shared_pixels
from megaclip.errors import ConfigError, DataError, MegaclipError, first_line, os_errors_as
from megaclip.logging import format_bytes, get_logger
from megaclip.models.packing import Pieces
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.caption_chunks import CaptionChunks, DivideCaptions

logger = get_logger(__name__)

_JOIN_S = 2.0
"""Seconds that `close` waits for the thread. A thread that is still in the loader then ends when the loader returns."""


class ImageSlots:
    """S slots in memory or in a file until `close`: `tensor`, (S, ...) uint8. All ranks construct it together.

    They are shared with processes that are forked later, which may write into them.
    """

    def __init__(self, shape: tuple[int, ...], folder: Path | None) -> None:
        """Reserve the slots. Raises ConfigError, on every rank, if any rank cannot reserve them.

        Args:
            shape: shape of `tensor`.
            folder: the folder of the file. None: the slots are in memory.
        """
        self._folder, self._is_pinned = folder, False
        with self._errors(torch.Size(shape).numel()):
            self.tensor = shared_pixels(shape) if folder is None else self._in_file(shape, folder)

    def lock_pages(self, device: torch.device) -> None:
        """Lock the pages of slots in memory if `device`, to which they will be copied, is a GPU.

        All ranks call it together, after the workers have been forked: CUDA may hide locked pages from forked
        processes. Raises ConfigError, on every rank, if any rank cannot lock them.
        """
        if self._folder is not None or device.type != "cuda":
            return
        with self._errors(self.tensor.numel()):
            # Registered, not allocated as pinned: torch's allocator would round the size up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0))
            if code != 0:
                raise RuntimeError(f"CUDA error {code} while locking pages")
            self._is_pinned = True

    @contextmanager
    def _errors(self, size: int) -> Iterator[None]:
        problem = f"data offload: cannot reserve {format_bytes(size)} in {self._folder or 'host memory'}"
        advice = "free space there, specify another folder with --data-offload-dir, or change megaclip.data_offload"
        with raise_on_all_ranks(), os_errors_as(ConfigError, problem, advice, also=RuntimeError):
            yield

    def _in_file(self, shape: tuple[int, ...], folder: Path) -> Tensor:
        with tempfile.TemporaryFile(dir=folder) as file:  # unlinked, so the system deletes it with the process
            # A full disk fails here, not by a signal during a step.
            os.posix_fallocate(file.fileno(), 0, torch.Size(shape).numel())
            return shared_pixels(shape, file.fileno())

    def close(self) -> None:
        """Free the memory or the file; the tensor must not be used afterwards."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor


class StepStore:
    """This rank's samples of the current step, in equal chunks; each tower has its own number of chunks.

    `next_step` proceeds to the next step. Context manager: it owns a thread.
    """

    def __init__(
        self,
        loader: TrainLoader,
        feed: DeviceFeed,
        *,
        text_chunks: int,
        context_length: int,
        divide_captions: DivideCaptions | None,
    ) -> None:
        """
        Args:
            loader: yields n Batches of m rows per step. It then yields the chunks again that are read twice and are not
                kept in its slots. If it holds n chunks, its slots keep all pixels of a step; fewer only buffer them.
            text_chunks: number of text chunks per step.
            divide_captions: divides a step's captions into chunks. None: each chunk of images is encoded together with
                its captions, in as many text chunks.
        """
        self._loader, self._feed, self._slots = loader, feed, loader.slots
        self._image_chunks, self._text_chunks = loader.micro_batches_per_step, text_chunks
        self._chunks_read_again = loader.readings_per_step - loader.micro_batches_per_step
        self._divide_captions = divide_captions
        self._first_sample = loader.samples_consumed
        # Two entries: for this step and the next. Chunks of a third step cannot arrive before this step's slots are
        # free.
        self._tokens = torch.empty(2, self.rows(), context_length, dtype=torch.int32)
        self._pair_ids = torch.zeros(2, self.rows(), dtype=torch.int64)
        # Tensors of their own: autograd refuses a graph that has kept a view of a tensor of which any part has changed.
        self._fields = [
            {name: torch.zeros(self.rows(), *field.shape, dtype=field.dtype) for name, field in loader.fields.items()}
            for _ in range(2)
        ]
        self._step = 0
        self._captions: CaptionChunks | None = None
        """This step's chunks of captions. None: no chunk of them has been read yet."""
        self._next_captions: CaptionChunks | None = None
        """Those of the next step, after `look_ahead`."""
        self._begun: dict[Tower, Callable[[], Tensor]] = {}
        """Functions that return the only input of a tower in the next step. `look_ahead` has begun its copy."""
        self._ready: dict[Tower, Tensor] = {}
        """The only input of a tower in this step, until the tower takes it."""
        self._filled = 0
        """Number of chunks read since the start of the run."""
        self._released = 0
        """Number of chunks whose slots are free again."""
        self._released_later: int | None = None
        """Number of the last chunk that a step has read and no longer needs. Its slot is freed by `agree`: the thread
        would otherwise read the next chunk, with Python's lock, while the GPU waits for the step's first kernels."""
        self._failure: MegaclipError | None = None
        """Error that ended the background thread."""
        self.waited_s = 0.0
        """Seconds that the towers have waited for chunks since the start of the run."""
        self._missed = False
        """True if this step used blank chunks because data failed."""
        self.bad_counts: dict[str, int] = {}
        """Number of bad samples, by kind, that this rank has replaced in completed steps."""
        self._bad_counts_read: list[dict[str, int]] = [{}, {}]
        """Counts of the loader after the last chunk of an even step and of an odd step."""
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

    def decode_on(self, gpu_decoder: GpuDecoder | None) -> None:
        """Let a GPU decode, or None, from the next step on that no worker has begun."""
        self._loader.decode_on(gpu_decoder)

    def next_step(self) -> None:
        """Proceed to the next step, after both passes over this one. A skipped step makes only the first pass.

        Inputs that `look_ahead` has begun to copy are prepared, while the GPU computes the update.
        """
        self.bad_counts = self._bad_counts_read[self._step % 2]
        self._step += 1
        self._captions, self._next_captions = self._next_captions, None
        self._ready = {tower: finish() for tower, finish in self._begun.items()}
        self._begun = {}
        self._release(self._first_chunk - 1)

    def ids(self) -> Tensor:
        """Return the sample ids of this step, (b,) int64, in the order of the rows."""
        return self._loader.ids_of_step(self._loader.samples_per_step * self._step + self._first_sample)

    def pair_ids(self) -> Tensor:
        """Return the ids by which equal pairs are recognised, (b,) int64 on the host, after `captions`."""
        return self._pair_ids[self._step % 2]

    def rows(self) -> int:
        """Return b."""
        return self._image_chunks * self._slots.shape[1]

    def chunk_count(self, tower: Tower) -> int:
        """Return the number of chunks per pass over this tower."""
        return self._image_chunks if tower is Tower.IMAGE else self._text_chunks

    def chunks(self, tower: Tower, *, read_once: int, again: bool) -> Iterator[Tensor]:
        """Yield the tower's inputs on its device, in `order`: normalised pixels, or tokens (_, L) int64.

        Chunks of captions may differ in L. Sorted captions are available when all images of the step have been read,
        so the image tower must run before the text tower if it has several chunks.

        read_once: number of first chunks that this step reads only once. Each may be freed after its use.
        again: yield only the other chunks, for the second time. False: yield all chunks.
        """
        ready = self._ready.pop(tower, None)  # all chunks are read before any is read again
        if tower is Tower.TEXT:
            return self._feed.inputs(tower, self._texts(read_once, again)) if ready is None else iter([ready])
        pixels = self._pixels(read_once, again)
        return self._feed.inputs(tower, pixels) if ready is None else (ready for _ in pixels)

    def pieces(self, chunk: int) -> Pieces | None:
        """Return the pieces of a chunk of captions, which are cut at their own lengths; None if it is one piece.

        They are known after the chunk has been read once.
        """
        return None if self._divide_captions is None else self.captions().pieces_of(chunk)

    def order(self, tower: Tower) -> Tensor | None:
        """Return the row of the batch at each position in the tower's chunks, (b,) int64. None: the order of the batch.

        It is known after the tower's chunks have been read once.
        """
        return None if tower is Tower.IMAGE or self._divide_captions is None else self.captions().order

    def captions(self) -> CaptionChunks:
        """Return this step's chunks of captions; the first call waits until all captions of the step have been read.

        All ranks make the first call together.
        """
        if self._captions is None:
            self._captions = self._divided(self._step)
            if self._step == 0 and not self._missed and self._captions.mean_tokens is not None:
                logger.info("%s", self._captions.summary())
        return self._captions

    def look_ahead(self) -> None:
        """Divide the next step's captions and copy its samples if it has one chunk, so that the GPU need not wait then.

        All ranks call it together after the passes over this step, while the GPU computes the last of them.
        """
        if self._image_chunks > 1:  # their images may be read only after the next step has begun
            return
        self._next_captions = self._divided(self._step + 1)
        number = (self._step + 1) * self._loader.readings_per_step
        if self._filled > number:  # not if the data failed
            self._begun[Tower.IMAGE] = self._feed.begin(Tower.IMAGE, self._slots[number % len(self._slots)])
            if self._text_chunks == 1:
                self._begun[Tower.TEXT] = self._feed.begin(Tower.TEXT, next(iter(self._next_captions)))

    def _divided(self, step: int) -> CaptionChunks:
        tokens = self._tokens[step % 2]
        here = self._wait_for(step * self._loader.readings_per_step + self._image_chunks - 1)
        divide = self._divide_captions or CaptionChunks.whole
        return divide(tokens if here else torch.zeros_like(tokens), self._text_chunks)

    def fields(self) -> dict[str, Tensor]:
        """Return the extra fields of the samples, (b, ...) each, on the host in the order of the batch.

        The rows of a chunk are known after it has been read once.
        """
        return self._fields[self._step % 2]

    def tokens(self) -> Tensor:
        """Return the token ids (b, L) int32, as `fields`."""
        return self._tokens[self._step % 2]

    def blank(self, tower: Tower) -> Tensor:
        """Return one blank row of the same shape, for a backward pass in which both towers must take part."""
        like = self._slots[0, :1] if tower is Tower.IMAGE else self._tokens[0, :1]
        (row,) = self._feed.inputs(tower, [torch.zeros_like(like)])
        return row

    def agree(self) -> None:
        """Raise on every rank if any rank's data have failed since the last call; all ranks call it."""
        if self._released_later is not None:
            self._release(self._released_later)
        missed, self._missed = self._missed, False
        with raise_on_all_ranks():
            if missed and self._failure is not None:
                raise self._failure

    def _pixels(self, read_once: int, again: bool) -> Iterator[Tensor]:
        """Yield this step's pixels. A slot is freed when the next chunk is requested, unless it is needed again."""
        start = self._first_chunk + (self._chunks_read_again if again else 0)
        first = read_once if again else 0
        self._release(start + first - 1)  # chunks that are read again and no longer needed
        for chunk in range(first, self._image_chunks):
            here = self._wait_for(start + chunk)
            slot = self._slots[(start + chunk) % len(self._slots)]
            yield slot if here else torch.zeros_like(slot)
            if not (again or self._chunks_read_again or chunk < read_once):
                continue
            if again or chunk < self._image_chunks - 1:
                self._release(start + chunk)
            else:
                self._released_later = start + chunk

    def _texts(self, read_once: int, again: bool) -> Iterator[Tensor]:
        first = read_once if again else 0
        if self._divide_captions is not None:
            yield from itertools.islice(self.captions(), first, None)
            return
        for chunk in range(first, self._image_chunks):
            here = self._wait_for(self._first_chunk + chunk)  # the captions of the other chunks may arrive later
            tokens = self.tokens().chunk(self._image_chunks)[chunk]
            yield tokens if here else torch.zeros_like(tokens)

    @property
    def _first_chunk(self) -> int:
        """Number of this step's first chunk, counted from the start of the run."""
        return self._step * self._loader.readings_per_step

    def _wait_for(self, number: int) -> bool:
        """Wait for chunk `number`; return whether it has arrived. False: the data failed."""
        began = time.perf_counter()
        with self._changed:
            while self._filled <= number and self._failure is None:
                self._changed.wait()
            here = self._filled > number
            self._missed |= not here
            self.waited_s += time.perf_counter() - began
            return here

    def _release(self, number: int) -> None:
        self._released_later = None
        with self._changed:
            self._released = number + 1
            self._changed.notify_all()

    def _fill(self) -> None:
        """Take chunk after chunk from the loader as its slots become free; runs in the background thread."""
        try:
            for number in itertools.count():
                with self._changed:
                    while not self._closing and number - self._released >= self._loader.held:
                        self._changed.wait()
                    if self._closing:
                        return
                batch = self._loader.read()
                step, chunk = divmod(number, self._loader.readings_per_step)
                if chunk < self._image_chunks:
                    start = chunk * len(batch.tokens)
                    rows = slice(start, start + len(batch.tokens))
                    self._tokens[step % 2, rows].copy_(batch.tokens)
                    self._pair_ids[step % 2, rows].copy_(batch.pair_ids)
                    for name, values in batch.fields.items():
                        self._fields[step % 2][name][rows].copy_(values)
                    self._bad_counts_read[step % 2] = self._loader.bad_counts
                with self._changed:
                    self._filled = number + 1
                    self._changed.notify_all()
        except BaseException as error:  # also a tokenizer's Rust panic; `agree` raises it on every rank
            with self._changed:
                self._failure = _data_error(error)
                self._changed.notify_all()


def _data_error(error: BaseException) -> MegaclipError:
    """Return `error` if it is written for users, else a DataError, after logging its traceback.

    A run saves a checkpoint before a DataError ends it.
    """
    if isinstance(error, MegaclipError):
        return error
    logger.error("the training data cannot be read", exc_info=error)
    reason = f"{type(error).__name__}: {first_line(error)}"
    return DataError(f"the training data cannot be read: {reason}; see the traceback in the output of this rank")
