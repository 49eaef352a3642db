"""Find and construct the objective that `megaclip.objective` names.

`FILE.py:CLASS` executes the user's file, as a training script would be. Only ds_config.json and --set name a file:
neither a checkpoint nor a model directory can.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaclip.data.fields import Field
from megaclip.errors import ConfigError, config_error, first_line
from megaclip.objectives.base import Objective
from megaclip.objectives.distillation import Distillation

OBJECTIVES: dict[str, type[Objective]] = {"distillation": Distillation}
"""Value of `megaclip.objective` -> class. Other values are FILE.py:CLASS."""


def load_objective(name: str | None, settings: Mapping[str, Any]) -> Objective | None:
    """Return the objective that `megaclip.objective` names; None without one.

    settings: `megaclip.objective_settings`, the arguments of its constructor.

    Raises:
        ConfigError: the file or class does not exist or fails, or the constructor refuses the settings.
    """
    if name is None:
        if settings:
            raise ConfigError(
                "megaclip.objective_settings has no effect without megaclip.objective; set it, or leave "
                "out the settings"
            )
        return None
    kind = OBJECTIVES[name] if name in OBJECTIVES else _own_class(name)
    try:
        objective = kind(**settings)
        if "_parameters" not in vars(objective):
            raise ValueError("its __init__ does not call super().__init__()")
        if not isinstance(objective.fields, Mapping) or not all(
            isinstance(f, Field) for f in objective.fields.values()
        ):
            raise ValueError(f"fields is {objective.fields!r}; write {{NAME: Field(KEY, shape=...)}}")
        weights = objective.weights
        if not isinstance(weights, Mapping) or not all(isinstance(w, int | float) for w in weights.values()):
            raise ValueError(f"weights is {weights!r}; write {{NAME: FACTOR}} with numbers")
        return objective
    except ValidationError as error:
        raise config_error(error, lambda field: f"megaclip.objective_settings.{field}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"megaclip.objective {name}: {first_line(error)}; change the class or megaclip.objective_settings"
        ) from error


def objective_identity(name: str | None) -> str:
    """Return the name of an objective, with a checksum of the user's file, for comparisons between ranks."""
    path = Path((name or "").rpartition(":")[0])
    if name is None or name in OBJECTIVES:
        return str(name)
    return f"{path.name}:{name.rpartition(':')[2]} with {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _own_class(name: str) -> type[Objective]:
    """Return the class that FILE.py:CLASS names, after executing the file."""
    file, separator, class_name = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        known = ", ".join(sorted(OBJECTIVES))
        raise ConfigError(f"megaclip.objective {name!r} is not known; use {known}, or FILE.py:CLASS of your own")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"megaclip.objective {name!r}: {file!r} is not a file; relative paths start at the working directory"
        )
    sys.path.append(str(path.parent.resolve()))  # as for a script: the file may import others beside it
    # Workers and pickled objects find the class by its module's name.
    module_name = f"megaclip_objective_{path.stem}"
    specification = importlib.util.spec_from_file_location(module_name, path)
    assert specification is not None and specification.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"megaclip.objective {name!r}: {file}{place} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise ConfigError(
            f"megaclip.objective {name!r}: {file} has no class {class_name} that is derived from "
            "megaclip.objectives.Objective"
        )
    return kind
