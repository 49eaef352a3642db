"""Registers the tile operations when what they are registered with is imported.

PyTorch and DeepSpeed take seconds to import, and a data worker or a tokenizer needs neither. So `import megaclip`
registers at once with whichever of them is loaded already, and leaves a note in `sys.meta_path` for the other:

    torch      -> `megaclip.ops.torch_library`   torch.ops.megaclip.*
    deepspeed  -> `megaclip.ops.op_builder`      get_accelerator().create_op_builder("ContrastiveTilesBuilder")

A registration lives in this process only: nothing of an installed PyTorch or DeepSpeed is changed.
"""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megaclip.logging import get_logger

_REGISTERED_BY = {"torch": "megaclip.ops.torch_library", "deepspeed": "megaclip.ops.op_builder"}


def register_operations() -> None:
    """Import each registering module now, or as soon as its library has been imported."""
    for library, module in _REGISTERED_BY.items():
        loaded = sys.modules.get(library)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            _register(library, module)
        elif loaded is None:
            sys.meta_path.insert(0, _ImportAfter(library, module))


def _register(library: str, module: str) -> None:
    """Import `module`; a library that has changed under it must still be usable without our operations in it."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        get_logger(__name__).warning("the tile operations are not registered with %s: %s", library, error)


class _ImportAfter(MetaPathFinder):
    """Finds nothing itself: lets the library load as it would, then imports the module, once."""

    def __init__(self, library: str, module: str) -> None:
        self._library, self._module = library, module

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._library:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_register(library: ModuleType) -> None:
                execute(library)
                _register(self._library, self._module)

            spec.loader.exec_module = execute_then_register  # type: ignore[assignment, method-assign]
        return spec
