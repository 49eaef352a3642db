"""The running mean and deviation of a model's batch norms, which change in its forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megaclip.models import DualEncoder


def running_statistics(model: DualEncoder) -> list[Tensor]:
    """Return the running statistics of both towers."""
    return [*model.statistics(model.visual), *model.statistics(model.text)]


@contextmanager
def restored(statistics: list[Tensor], *, only_on_failure: bool = False) -> Iterator[None]:
    """Restore running statistics to their values before the body of the `with` statement.

    only_on_failure: do so only if the body raises.
    """
    before = [values.clone() for values in statistics]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_failure:
            for values, kept in zip(statistics, before, strict=True):
                values.data.copy_(kept)  # through .data, because kept graphs refer to them but never read them
