"""The number of graphs that a step keeps, from the memory that earlier steps have left free.

The first two steps keep no graph, so they need as little memory as possible. They measure the bytes of the graphs. From
then on the free memory, less a margin, decides. If the fourth step takes longer per element than the second one, no
graphs are kept. All ranks keep equally many graphs, because the passes of FSDP2 and ZeRO-3 communicate.
"""

import itertools
import time
from collections.abc import Sequence

import torch

MEASURED_STEPS = 2
"""Number of first steps of a process after which the number of kept graphs may increase, here and in a run.

It is above 1 because an optimizer allocates its states at the end of the first step."""
MEASURED_MARGIN = 0.05
"""Share of a GPU's memory that stays free when more graphs are kept after the peak has been measured, for fragments of
the allocator and for memory that other programs take."""
_SPREAD = 1.1
"""Factor of the largest measured graph per element of input, for graphs of chunks that have not been measured."""
ALL = 1 << 30


def free_at_peak() -> tuple[float, float]:
    """Return the bytes of the GPU that were free at the peak of all earlier steps, and its bytes.

    Blocks that the allocator holds in reserve are not counted as free.
    """
    free, total = torch.cuda.mem_get_info()
    return free - (torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()), total


class GraphBudget:
    """keep: number of graphs, "all", or "auto", which measures on CUDA and keeps none on a CPU."""

    def __init__(self, keep: int | str) -> None:
        self._number = ALL if keep == "all" else 0 if isinstance(keep, str) else keep
        self.measures = keep == "auto" and torch.cuda.is_available()
        self._steps = 0
        self._budget = 0.0
        self.elements = 0
        """Elements of this step: the most of all ranks, because the slowest rank decides how long a step takes."""
        self._began = 0.0
        self._without_graphs = 0.0
        """Seconds per element of a step that keeps no graph."""
        self._bytes_per_element: dict[int, float] = {}
        self._allocated = 0

    def number(self, elements: Sequence[Sequence[int]]) -> int:
        """Return the number of graphs that this rank can keep in the next step.

        elements: number of elements of each chunk of each encoder, blank chunks included, in the order in which graphs
            are kept.
        """
        if not self.measures:
            return self._number
        self._steps += 1
        self.elements = max(1, sum(map(sum, elements)))  # 0 if no encoder is divided
        if self._is_timed:
            torch.cuda.synchronize()
            self._began = time.perf_counter()
        if self._steps <= MEASURED_STEPS:
            return 0
        if self._steps == MEASURED_STEPS + 1:
            free, total = free_at_peak()
            self._budget = free - MEASURED_MARGIN * total
        per_element = [self._bytes_per_element.get(encoder, 0.0) for encoder in range(len(elements))]
        sizes = (_SPREAD * size * each for each, own in zip(per_element, elements, strict=True) for size in own)
        return sum(total <= self._budget for total in itertools.accumulate(sizes))

    @property
    def _is_timed(self) -> bool:
        return self.measures and self._steps in (MEASURED_STEPS, MEASURED_STEPS + 2)

    def step_done(self) -> None:
        """Keep no graphs from now on if a step that keeps them takes longer than one that keeps none."""
        if not self._is_timed:
            return
        torch.cuda.synchronize()
        duration_s = (time.perf_counter() - self._began) / self.elements
        if self._steps == MEASURED_STEPS:
            self._without_graphs = duration_s
        elif duration_s > self._without_graphs:
            self._budget = -1.0

    def before_graph(self) -> None:
        """Start to measure a forward pass that builds a graph."""
        if self.measures:
            self._allocated = torch.cuda.memory_allocated()

    def after_graph(self, encoder: int, elements: int) -> None:
        """Record the bytes of the graph. encoder: its number."""
        if self.measures:
            measured = (torch.cuda.memory_allocated() - self._allocated) / elements
            self._bytes_per_element[encoder] = max(measured, self._bytes_per_element.get(encoder, 0.0))
