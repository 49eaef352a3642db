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
    name = parser.parse_args().name
    print(names() if name is None else file(name).read_text(encoding="utf-8").rstrip("\n"))


def files() -> dict[str, Path]:
    """Return every page and file by its name, pages first and without their suffix."""
    pages = {path.stem: path for path in [PACKAGE / "README.md", *sorted((PACKAGE / "docs").glob("*.md"))]}
    scripts = {path.name: path for path in sorted((PACKAGE / "launch").iterdir())}
    configs = PACKAGE / "ds_configs"
    configs_by_name = {str(path.relative_to(configs)): path for path in sorted(configs.rglob("*.json"))}
    examples = {str(path.relative_to(PACKAGE)): path for path in sorted((PACKAGE / "examples").glob("*/*.*"))}
    return pages | scripts | configs_by_name | examples


def file(name: str) -> Path:
    """Return the path of a page or file. Raises ConfigError for an unknown name."""
    known = files()
    if name not in known:
        raise ConfigError(f"there is no page or file {name!r}{nearest(name, set(known))}; megaclip show lists them")
    return known[name]


def names() -> str:
    """Return the list of all names, with the titles of the pages."""
    known = files()
    width = max(map(len, known))
    lines = []
    for name, path in known.items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if path.suffix == ".md" else ""
        lines.append(f"{name:{width}}  {title}".rstrip())
    return "\n".join(lines)
