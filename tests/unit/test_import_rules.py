"""Every import of the package follows the table in docs/architecture.md: what each package may import.

Imports inside functions and under TYPE_CHECKING count too. The table shows what a reader must know to understand a
package.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megaclip"

DOOR = {"zero.op_builds", "zero.parameters", "zero.settings", "zero.versions"}
"""Modules of `zero` that every package may import. They import nothing else of `zero`."""
FOUNDATION = {"devices", "environment", "errors", "files", "logging", "open_clip_package", "threads"} | DOOR
ENGINE = FOUNDATION | {"config", "ops", "comm", "data", "losses", "models", "checkpoint", "evaluation"}
ENGINE |= {"cache", "planner", "hosts", "guards", "objectives", "zero", "step"}
MAY_IMPORT = {
    "devices": set(),
    "environment": {"errors"},
    "errors": set(),
    "files": set(),
    "logging": set(),
    "open_clip_package": {"errors"},
    "threads": set(),
    **{module: {"errors", "logging"} for module in DOOR},
    "ops": FOUNDATION,
    "comm": FOUNDATION,
    "data": FOUNDATION,
    "losses": FOUNDATION | {"ops", "comm"},
    "cache": FOUNDATION | {"comm", "zero"},
    "config": FOUNDATION | {"losses"},
    "models": FOUNDATION | {"comm", "ops"},
    "checkpoint": FOUNDATION | {"models", "comm"},
    "evaluation": FOUNDATION | {"models", "data", "ops", "comm"},
    "planner": FOUNDATION | {"comm", "config", "data", "losses", "models", "ops", "step"},
    "guards": FOUNDATION | {"comm", "data"},
    "zero": FOUNDATION | {"config", "comm", "ops", "models", "checkpoint", "objectives"},
    "objectives": FOUNDATION | {"checkpoint", "data", "losses", "models"},
    "step": FOUNDATION | {"cache", "comm", "data", "models", "objectives", "zero"},
    "hosts": FOUNDATION | {"zero", "data"},
    "engine": ENGINE,
    "commands": ENGINE | {"engine"},
    "__main__": {"commands"},
}


def imported_modules(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Return (line, absolute dotted name) of everything that `source`, the text of `module`, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            name = node.args[0]
            literal = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if isinstance(literal, ast.Constant):
                yield node.lineno, str(literal.value)


def owner(names: list[str]) -> str:
    """Return the entry of the table for the parts of a dotted name without "megaclip"."""
    module = ".".join(names[:2])
    return module if module in DOOR else names[0] if names else ""


def violations(source: str, module: str) -> list[str]:
    """Return the imports in `source` that the table does not allow for `module` (a package: `package.__init__`)."""
    package = owner(module.split(".")[1:])
    found = []
    for line, name in imported_modules(source, module):
        top, *rest = name.split(".")
        target = owner(rest)
        if top in ("launch", "tools", "tests"):
            found.append(f"{module}:{line} imports {name}: nothing imports {top}")
        elif top == "megaclip" and target not in ("", "__version__", package) and target not in MAY_IMPORT[package]:
            allowed = ", ".join(sorted(MAY_IMPORT[package]))
            found.append(f"{module}:{line} imports {name}: {package} may import {allowed}")
    return found


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def test_every_package_is_in_the_table() -> None:
    assert {owner(dotted(path).split(".")[1:]) for path in modules()} <= MAY_IMPORT.keys()


def test_packages_import_only_what_the_table_allows() -> None:
    assert [line for path in modules() for line in violations(path.read_text(), dotted(path))] == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import megaclip.losses.clip", "megaclip.ops.tiles"),
        ("from megaclip import engine", "megaclip.losses.clip"),
        ("def later():\n    from megaclip.models import build_model", "megaclip.losses.clip"),
        ("if TYPE_CHECKING:\n    from megaclip.data.batch import Batch", "megaclip.models.clip"),
        ("from ..losses import ClipLoss", "megaclip.comm.ring"),
        ("from .. import engine", "megaclip.comm.__init__"),
        ("import importlib\nimportlib.import_module(f'megaclip.losses.{name}')", "megaclip.ops.tiles"),
        ("from tools import export_open_clip", "megaclip.zero.build"),
        ("from megaclip.zero.build import build", "megaclip.planner.memory"),
        ("from megaclip.zero import build", "megaclip.zero.parameters"),
    ],
)
def test_a_forbidden_import_is_found(source: str, module: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        (
            "from megaclip.ops import tiles\nfrom .plan import Plan\nimport torch, tools_of_others",
            "megaclip.losses.clip",
        ),
        ("from megaclip import __version__", "megaclip.checkpoint.store"),
        ("from megaclip.zero.parameters import is_partitioned", "megaclip.models.layers"),
    ],
)
def test_an_allowed_import_is_not(source: str, module: str) -> None:
    assert violations(source, module) == []


PUBLIC = {"deepspeed", "deepspeed.comm", "deepspeed.accelerator", "deepspeed.env_report", "deepspeed.ops.op_builder"}
"""DeepSpeed's modules that every package may import."""
DOORS = ("megaclip.zero.", "megaclip.checkpoint.deepspeed_files", "megaclip.checkpoint.saved_states")
INTERNAL = re.compile(
    r"ds_(id|shape|tensor|numel|persist|status|process_group|active_sub_modules|grads_remaining)"
    r"|class_dict|checkpoint_event_(prologue|epilogue)|checkpoint_engine|param_names|update_lp_params"
    r"|clear_backward_seen_flag|partition_numel|\w+_groups_flat|single_partition_of_fp32_groups|__compatible_ops__"
)
"""Names that DeepSpeed gives to attributes of engines, optimizers, accelerators and parameters for its own use."""


def internals(source: str, module: str) -> list[str]:
    """Return the uses of DeepSpeed's internals in `source`: modules, attributes, names of attributes as strings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed"):
            internal = node.module not in PUBLIC or any(alias.name.startswith("_") for alias in node.names)
        elif isinstance(node, ast.Import):
            internal = any(a.name.startswith("deepspeed") and a.name not in PUBLIC for a in node.names)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            private = re.match(r"_(?!_)", node.attr) and re.search(
                r"(engine|optimizer|accelerator\(?\)?|deepspeed)$", owner
            )
            internal = private or INTERNAL.fullmatch(node.attr) or re.match(r"deepspeed\.(runtime|ops)\b", owner)
        else:
            internal = isinstance(node, ast.Constant) and INTERNAL.fullmatch(str(node.value))
        if internal:
            found.append(f"{module}:{node.lineno} uses an internal of DeepSpeed: {ast.unparse(node)}")
    return found


def test_only_zero_and_two_files_of_checkpoint_use_internals_of_deepspeed():
    others = [path for path in modules() if not dotted(path).startswith(DOORS)]
    assert [line for path in others for line in internals(path.read_text(), dotted(path))] == []


@pytest.mark.parametrize(
    "source",
    [
        "from deepspeed.runtime.engine import DeepSpeedEngine",
        "import deepspeed.runtime.zero",
        "deepspeed.ops.__compatible_ops__['shm'] = False",
        "engine._global_grad_norm",
        "self._engine._get_all_ckpt_names(folder, tag)",
        "hasattr(parameter, 'ds_id')",
        "parameter.ds_shape",
        "get_accelerator()._lazy_init_class_dict()",
        "engine.optimizer.checkpoint_event_prologue()",
    ],
)
def test_a_use_of_deepspeeds_internals_is_found(source):
    assert internals(source, "megaclip.step.gradient_cache")


def test_every_test_file_has_a_name_of_its_own():
    """pytest cannot collect two test files of the same name, and fails only when it collects both folders."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


@pytest.mark.parametrize("package", ["cache", "checkpoint", "comm", "engine", "guards", "step", "zero"])
def test_the_docstring_of_a_package_names_each_of_its_modules(package):
    """Readers use this docstring as the list of the package's modules."""
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text(encoding="utf-8")))
    modules = {path.stem for path in (PACKAGE / package).glob("*.py")} - {"__init__"}
    assert not {module for module in modules if f"`{module}" not in text}
