"""README.md and docs/ are compared with the code: files, flags, settings, import rules and memory figures.

Links, anchors and the navigation of the website are checked too.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import docs_configuration
import docs_site
import pytest
import yaml
from torch.distributed.run import get_args_parser

from megaclip.commands import COMMANDS, show
from megaclip.config.command_line import OPEN_CLIP_FLAGS, build_parser
from megaclip.engine.metrics import StepMetrics
from megaclip.losses.fastclip import FastClipLoss
from megaclip.losses.settings import VARIANTS
from tests.unit.test_import_rules import FOUNDATION, MAY_IMPORT

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *(ROOT / "docs").glob("*.md"),
]
NAMES = sorted(COMMANDS, key=len, reverse=True)  # check-hosts must be tried before check
COMMAND = re.compile(
    r"((?:launch|tools)/\w+\.(?:py|sh|sbatch)|(?<![\w/-])megaclip (?:" + "|".join(NAMES) + r"))\b((?:\\\n|[^\n`])*)"
)
FLAG = re.compile(r"(?<=\s)--[a-z][\w-]*")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (script, its flags) for every command line in `text`, continuation lines included."""
    return [(script, FLAG.findall(rest.split("#")[0])) for script, rest in COMMAND.findall(text)]


def options_of(script: str) -> str:
    """Return the text that must contain every flag of `script`."""
    if script in ("launch/train.py", "megaclip train"):
        return "\n".join(option for action in build_parser()._actions for option in action.option_strings)
    if script == "megaclip launch":  # options of torchrun, and those of a command that it starts
        torchrun = [option for action in get_args_parser()._actions for option in action.option_strings]
        return "\n".join([*torchrun, options_of("megaclip train"), options_of("megaclip check-hosts")])
    if script == "megaclip translate":  # the options of what it translates
        return "\n".join([options_of("megaclip launch"), "--out", *OPEN_CLIP_FLAGS])
    if script.startswith("megaclip "):
        module = COMMANDS[script.split()[1]].module
        return (ROOT / (module if module.endswith(".py") else f"megaclip/commands/{module}.py")).read_text()
    source = (ROOT / script).read_text()
    if "megaclip.commands.plan" in source:
        source += options_of("megaclip plan")
    # The shell scripts pass all other arguments on to train.py.
    return source if script.endswith(".py") else source + options_of("launch/train.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_use_scripts_and_flags_that_exist(page):
    for script, flags in commands(page.read_text()):
        assert script.startswith("megaclip ") or (ROOT / script).is_file(), f"{page.name} names {script}"
        known = options_of(script)
        for flag in set(flags) - {"--help"}:
            assert re.search(rf"{flag}(?![\w-])", known), f"{page.name}: {script} has no flag {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_pictures_and_anchors_exist(page):
    text = outside_of_code(page.read_text())
    assert re.findall(r"\[\S*\.md\]", text) == [], "the text of a link is the title of the page"
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def outside_of_code(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings that GitHub and MkDocs make alike: MkDocs has no "--" in an anchor."""
    headings = re.findall(r"^#+ (.*)$", outside_of_code(page.read_text()), re.MULTILINE)
    names = (re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings)
    return {name for name in names if "--" not in name}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_follow_an_empty_line(page):
    """MkDocs, unlike GitHub, makes them part of the paragraph otherwise."""
    lines = ["", *outside_of_code(page.read_text()).splitlines()]
    for before, line in pairwise(lines):
        if line.startswith(("- ", "| ", "1. ")):
            assert before == "" or before.startswith(("#", "- ", "| ", "1. ", "  ")), f"{page.name}: {line}"


def test_the_website_has_every_page_once():
    def files(entry: Any) -> Iterator[str]:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from [value] if isinstance(value, str) else files(value)

    navigation = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(navigation) == sorted({page.name for page in PAGES} | {"CHANGELOG.md"})
    assert {name for name in navigation if not (ROOT / "docs" / name).exists()} == set(docs_site.ROOT_PAGES)


@pytest.mark.long
def test_the_website_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    assert "docs" not in re.findall(r'href="([^"/]*)/', (tmp_path / "index.html").read_text())
    assert (tmp_path / "fastclip.html").is_file()


def test_links_of_the_website_hold_where_all_pages_lie_in_one_folder():
    def rewritten(folder: str, link: str) -> str:
        return docs_site.site_links(link, folder)

    assert rewritten(".", "[a](docs/losses.md#use) [b](#data)") == "[a](losses.md#use) [b](#data)"
    assert rewritten(".", "![a](docs/figures/plan_sweep.png)") == "![a](figures/plan_sweep.png)"
    assert rewritten("docs", "[`a`](../README.md#data)\n[b](losses.md)") == "[`a`](README.md#data)\n[b](losses.md)"
    assert rewritten("docs", "see [`errors.py`](../megaclip/errors.py), [c](https://a.b)") == (
        "see `errors.py`, [c](https://a.b)"
    )
    assert rewritten("docs", "[a](../missing.py)") == "[a](../missing.py)"  # --strict reports it


def section(page: str, heading: str) -> str:
    """Return the text of `page` below the line `heading`, up to the next heading of the same or a higher level."""
    level = len(heading.split()[0])
    text = (ROOT / page).read_text()
    assert f"\n{heading}\n" in text, f"{page} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", text.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_list_of_curves_has_every_figure_of_a_step():
    listed = set(re.findall(r"`train/(\w+)`", (ROOT / "docs/run_folder.md").read_text()))
    of_run = {"samples_per_s", "peak_mib", "loss_spike", "bad_samples"}
    assert listed == {field.name for field in fields(StepMetrics)} | of_run


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the markdown tables in `text`, headers and separators included."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def paths_of_tree(tree: str) -> Iterator[str]:
    """Yield the path of every file and folder that a tree names at the start of its lines, two spaces per level."""
    folders: list[tuple[int, str]] = []
    for line in tree.strip("\n").splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        indent = len(line) - len(line.lstrip())
        folders = [(outer, folder) for outer, folder in folders if outer < indent]
        parent = "".join(folder for _, folder in folders)
        yield from (parent + name for name in names)
        if names[0].endswith("/"):
            folders.append((indent, names[0]))


def test_the_tree_names_every_package_and_only_existing_paths():
    paths = list(paths_of_tree(section("docs/architecture.md", "## Code layout").split("```")[1]))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {f"megaclip/{path.parent.name}/" for path in (ROOT / "megaclip").glob("*/__init__.py")}
    assert packages - set(paths) == set(), "the tree lacks these packages"
    folders = {f"{name.split('/')[0]}/" for name in tracked_files() if "/" in name and not name.startswith(".")}
    assert folders - set(paths) == set(), "the tree lacks these folders"


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_the_import_table_equals_the_table_that_the_import_rules_enforce():
    documented: dict[str, set[str]] = {}
    for packages, allowed in table_rows(section("docs/architecture.md", "## Imports"))[2:]:
        above = set(documented)
        names = above if "every package above" in allowed else set(re.findall(r"`([\w.]+)`", allowed))
        names = names | (FOUNDATION if "the foundation" in allowed else set())
        documented |= dict.fromkeys(re.findall(r"`([\w.]+)`", packages), names)
    assert documented == MAY_IMPORT


def test_generated_tables_have_the_docstrings_types_defaults_and_flags_of_the_code():
    for path in docs_configuration.PAGES:
        assert path.read_text() == docs_configuration.page(path), "run python tools/docs_configuration.py"


def test_messages_name_pages_that_the_installed_package_shows():
    """A wheel has no folder docs/ beside the package, so messages name the command that prints the page."""
    for path in (ROOT / "megaclip").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        if path.parent.name == "commands":
            docstrings.discard(tree.body[0].value)  # the text of --help
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
        named = [name for text in texts if isinstance(text, str) for name in re.findall(r"`megaclip show (\w+)`", text)]
        assert set(named) <= show.files().keys(), path
        assert not [text for text in texts if isinstance(text, str) and re.search(r"docs/\w+\.md", text)], path


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_bytes()) <= 12_000


def test_paths_of_tree_follow_the_indentation():
    tree = "a/      folder\n  b.py, c.py   two files: d.py\n  e/\n    f.py   text\ng/  last\n"
    assert list(paths_of_tree(tree)) == ["a/", "a/b.py", "a/c.py", "a/e/", "a/e/f.py", "g/"]


def test_commands_includes_unknown_flags_and_continuation_lines():
    text = "deepspeed launch/train.py \\\n    --warmpu 5\n`megaclip demo --seed 1`"
    assert commands(text) == [("launch/train.py", ["--warmpu"]), ("megaclip demo", ["--seed"])]
    assert "--warmpu" not in options_of("launch/train.py")


def test_the_memory_table_of_fastclip_equals_what_a_loss_allocates():
    samples, table_samples, ranks = 1000, 414e6, 64
    rows = [cells for cells in table_rows(section("docs/fastclip.md", "## Memory")) if "megaclip" not in cells[0]]
    documented = {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}
    assert sorted(documented) == sorted(VARIANTS)
    for name, (columns, sample_bytes, all_ranks, each_rank, _) in documented.items():
        state = FastClipLoss(name, samples=samples).state
        allocated = state.values.untyped_storage().nbytes()
        assert (int(columns), int(sample_bytes)) == (len(state.columns), allocated / samples)
        assert all_ranks == f"{allocated / samples * table_samples / 1e9:.1f} GB"
        assert each_rank == f"{allocated / samples * table_samples / ranks / 1e6:.0f} MB"
