"""Import the installed open_clip, and torchvision, which open_clip requires. No other module imports them.

PyPI's torchvision is built for CUDA. With the CPU build of torch its import fails when it registers shapes for
operators that do not exist there ("operator torchvision::nms does not exist"; torchvision 0.28, torch 2.13). Neither
MegaCLIP nor open_clip's CLIP models use those operators, so their registration is skipped during the import.
"""

from types import ModuleType
from typing import Any
from unittest import mock

import torch

from megaclip.errors import CheckpointError


def import_open_clip() -> ModuleType:
    """Return the `open_clip` package.

    Raises:
        CheckpointError: open_clip or torchvision is not installed. The message gives the command that installs them.
    """
    try:
        import_torchvision()
        import open_clip
    except ImportError as error:
        raise CheckpointError(
            f"open_clip cannot be imported ({error}); install it with  pip install 'megaclip[open-clip]'"
        ) from None
    return open_clip


def import_torchvision() -> None:
    """Import torchvision, which open_clip and timm need, with any build of torch. Raises ImportError."""
    if torch.version.cuda is None:
        with mock.patch("torch.library.register_fake", _register_nothing):
            import torchvision  # noqa: F401


def _register_nothing(*_args: Any, **_kwargs: Any) -> Any:
    return lambda function: function
