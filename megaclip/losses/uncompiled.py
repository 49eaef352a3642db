"""Call a function outside of compiled graphs. Importing this module takes seconds, because it imports the compiler."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return `function(...)`, run as plain Python. In a compiled function it is one graph break."""
    return function(*arguments, **named)
