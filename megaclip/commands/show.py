"""Print a page of the documentation, or a file to start from: a ds_config, a hostfile, a job of Slurm, an example.

    megaclip show                                     # the names
    megaclip show README                              # a page of the documentation
    megaclip show slurm.sbatch > slurm.sbatch
    megaclip show zero3_offload.json > my_config.json

The files belong to the installed version.
"""

from pathlib import Path

from megaclip.commands.argument_types import CommandParser
from megaclip.errors import ConfigError, nearest

PACKAGE = Path(__file__).parents[1]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="page or file (default: list all)")
    name, known = parser.parse_args().name, files()
    if name is None:
        print_names(known)
    elif name in known:
        print(known[name].read_text(encoding="utf-8").rstrip("\n"))
    else:
        raise ConfigError(f"there is no page or file {name!r}{nearest(name, set(known))}; megaclip show lists them")


def files() -> dict[str, Path]:
    """Return every page and file by its name, pages first and without their suffix."""
    pages = {path.stem: path for path in [PACKAGE / "README.md", *sorted((PACKAGE / "docs").glob("*.md"))]}
    scripts = {path.name: path for path in sorted((PACKAGE / "launch").iterdir())}
    configs = PACKAGE / "ds_configs"
    configs_by_name = {str(path.relative_to(configs)): path for path in sorted(configs.rglob("*.json"))}
    examples = {str(path.relative_to(PACKAGE)): path for path in sorted((PACKAGE / "examples").glob("*/*.*"))}
    return pages | scripts | configs_by_name | examples


def print_names(known: dict[str, Path]) -> None:
    """Print all names, with the titles of the pages."""
    width = max(map(len, known))
    for name, path in known.items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if path.suffix == ".md" else ""
        print(f"{name:{width}}  {title}".rstrip())
