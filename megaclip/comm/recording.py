"""Record the kernels of a function as CUDA graphs, and replay them without the function's work on the host.

The kernels of a small batch take less time than Python takes to launch them one by one. A CUDA graph launches them all
at once. Collectives are not part of a graph, because NCCL cannot end a process group while a graph holds one of its
collectives. So a recording is a sequence of graphs with the collectives between them (`outside_of_recording`), on the
same tensors each time.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_recording: ContextVar["Recording[Any] | None"] = ContextVar("recording", default=None)


def outside_of_recording(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Run `call(...)`, a collective that writes its result into one of its arguments.

    During recording the call does not run. Each replay runs it between two graphs.
    """
    recording = _recording.get()
    if recording is None:
        call(*arguments, **named)
    else:
        recording.insert(functools.partial(call, *arguments, **named))


class Recording(Generic[Result]):
    """The recorded kernels and collectives of `function`. Recording calls the function once, without effect on the GPU.

    The function must have run before, so that its kernels are compiled, and must not wait for the GPU. It may read
    tensors from outside. Every replay reads their memory again, so copy new values into them.
    """

    results: Result
    """The result of `function`. Replays write into the same memory."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._memory = torch.cuda.graph_pool_handle()  # of all graphs: they run one after the other
        self._graph = torch.cuda.CUDAGraph()
        stream, caller = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(caller)
        token = _recording.set(self)
        try:
            with torch.cuda.stream(stream), _without_warnings_of_empty_graphs():
                self._begin()
                try:
                    self.results = function()
                finally:
                    self._end()
        finally:
            _recording.reset(token)
        caller.wait_stream(stream)

    def insert(self, call: Callable[[], Any]) -> None:
        """End the current graph, add a call, and begin the next graph."""
        self._end()
        self._steps.append(call)
        self._begin()

    def replay(self) -> None:
        """Replay everything on the current stream."""
        for step in self._steps:
            step()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin memory, may make calls that are forbidden during recording.
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._steps.append(self._graph.replay)


@contextlib.contextmanager
def _without_warnings_of_empty_graphs() -> Iterator[None]:
    """Ignore PyTorch's warning of a graph without kernels, as between two collectives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        yield
