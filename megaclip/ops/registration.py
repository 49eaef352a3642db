"""Register the tile operations with PyTorch and DeepSpeed as soon as each of them is imported.

PyTorch and DeepSpeed take seconds to import, and a data worker or a tokenizer needs neither. So `import megaclip`
registers at once with the libraries that are already loaded. For the others it adds an import hook to `sys.meta_path`:

    torch      -> `megaclip.ops.torch_library`   torch.ops.megaclip.*
    deepspeed  -> `megaclip.ops.op_builder`      get_accelerator().create_op_builder("ContrastiveTilesBuilder")

A registration is valid in this process only. The installed PyTorch and DeepSpeed are not changed.
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
    """Import each registering module now if its library is loaded, else immediately after its library is imported."""
    for library, module in _REGISTERED_BY.items():
        loaded = sys.modules.get(library)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            _register(library, module)
        elif loaded is None:
            sys.meta_path.insert(0, _ImportAfter(library, module))


def _register(library: str, module: str) -> None:
    """Import `module`. With an incompatible version of the library, warn only, so that the library stays usable."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        get_logger(__name__).warning("the tile operations could not be registered with %s: %s", library, error)


class _ImportAfter(MetaPathFinder):
    """Import hook that lets the library load normally and then imports the module, once."""

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
