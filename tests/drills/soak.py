"""A long run with data workers, evaluations and background saves. The resources of a rank must not grow."""

import ctypes
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaclip.engine.metrics import Metrics
from tests.drills.jobs import WORLD_SIZE, start

EVERY = 10
"""Steps between two measurements."""
LIMITS = {
    "memory MiB": (4.0, 0.01),
    "shared memory MiB": (0.5, 0.01),
    "file descriptors": (0.0, 0),
    "threads": (0.0, 0),
}
"""Quantity -> allowed growth: a number, and a share of the first value."""


def soak(folder: Path, command: Callable[..., list[str]], steps: int) -> tuple[list[str], int]:
    """Train for `steps` steps. Return the lines of a table, and the number of quantities that have grown.

    The values are medians over the second and the last quarter of the steps.
    """
    evaluation = {"eval_every_steps": 100, "eval_batch_size": 16}
    options = {"train_steps": steps, "save_every_steps": 25, "async_save": "", "log_every_n_steps": 100}
    held_out = {"val_data": str(Path(command(logs=folder)[5]).parents[1] / "held_out" / "*.tar")}
    measured = folder / "measured"
    measured.mkdir(parents=True)
    job = start(
        command(logs=folder / "runs", **options, **evaluation, **held_out),
        folder / "job",
        lambda rank: measure_in(measured / str(rank)),
        limit_s=3600,
    )
    ended = job.wait()
    assert ended and job.exit_code == 0, job.output[-3000:]
    lines, grown = (
        ["| rank | quantity | second quarter | last quarter | grows |", "| ---: | --- | ---: | ---: | --- |"],
        0,
    )
    grows_as: list[str] = []
    for rank in range(WORLD_SIZE):
        rows = [list(map(float, line.split())) for line in (measured / str(rank)).read_text().splitlines()]
        for index, name in enumerate(LIMITS):
            values = [row[index] for row in rows]
            first, last, grows = growth(values, *LIMITS[name])
            grown += grows
            if grows:
                series = [
                    statistics.median(values[k * len(values) // 8 : (k + 1) * len(values) // 8]) for k in range(8)
                ]
                grows_as.append(f"rank {rank}, {name}, medians of eighths: {' '.join(f'{x:.1f}' for x in series)}")
            lines.append(f"| {rank} | {name} | {first:.1f} | {last:.1f} | {'yes' if grows else 'no'} |")
    return [*lines, *grows_as], grown


def growth(values: list[float], allowed: float, share: float) -> tuple[float, float, bool]:
    """Return the medians of the second and last quarter, and whether the last median exceeds its limit."""
    quarter = len(values) // 4
    first, last = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    return first, last, last - first > max(allowed, share * first)


def measure_in(path: Path) -> None:
    """Make this rank write its resource usage to a file after every tenth step."""
    record = Metrics.record_step

    def recording(metrics: Metrics, step: int, *arguments: Any) -> None:
        record(metrics, step, *arguments)
        if step % EVERY == 0:
            with path.open("a") as stream:
                stream.write(" ".join(map(str, held())) + "\n")

    Metrics.record_step = recording  # type: ignore[method-assign]


def held() -> tuple[float, float, int, int]:
    """Return this process's memory and shared memory in MiB, and its numbers of file descriptors and threads.

    Freed memory that the allocator keeps is released first, because its amount is random and depends on the
    evaluations' pictures.
    """
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")}
    return kib["RssAnon"] / 1024, kib["RssShmem"] / 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"])
