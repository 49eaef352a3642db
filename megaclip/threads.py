"""Run work in daemon threads, whose results another thread waits for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a new thread, for which the end of the process does not wait; return a future of its result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised again where the result is read
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
