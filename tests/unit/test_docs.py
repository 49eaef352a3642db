"""The README and the docs name only files and flags that exist."""

import re
import subprocess
from pathlib import Path

import pytest

from megaclip.config.command_line import build_parser
from megaclip.config.open_clip_flags import OPEN_CLIP_FLAGS
from megaclip.losses.estimators import SampleIndex
from megaclip.losses.fastclip import FastClipLoss
from megaclip.losses.fastclip_variants import VARIANTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"((?:launch|tools)/\w+\.(?:py|sh|sbatch))((?:\\\n|[^\n`])*)")
FLAG = re.compile(r"(?<=\s)--[a-z][\w-]*")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(script, the flags given to it) for every command line in `text`, continued lines included."""
    return [(script, FLAG.findall(rest.split("#")[0])) for script, rest in COMMAND.findall(text)]


def options_of(script: str) -> str:
    """The text in which a flag of `script` must stand."""
    if script == "launch/train.py":
        return "\n".join(option for action in build_parser()._actions for option in action.option_strings)
    source = (ROOT / script).read_text()
    # A shell launcher passes what it does not know on to train.py.
    return source if script.endswith(".py") else source + options_of("launch/train.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_use_scripts_and_flags_that_exist(page):
    for script, flags in commands(page.read_text()):
        assert (ROOT / script).is_file(), f"{page.name} names {script}"
        known = options_of(script)
        for flag in set(flags) - {"--help"}:
            assert re.search(rf"{flag}(?![\w-])", known), f"{page.name} gives {script} the flag {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_said_to_be_in_a_linked_file_are_defined_there(page):
    for name, target in re.findall(r"`(\w+)`\s+(?:of|in)\s+\[[^\]]*\]\(([^)]+\.py)\)", page.read_text()):
        source = (page.parent / target).read_text()
        assert re.search(rf"^(class |def )?{name}\b", source, re.MULTILINE), f"{page.name} says {name} is in {target}"


def test_the_tree_in_the_readme_names_every_room_and_only_files_that_exist():
    tree = (ROOT / "README.md").read_text().split("## The house")[1].split("```")[1]
    rooms = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    assert sorted(rooms) == sorted(path.parent.name for path in (ROOT / "megaclip").glob("*/__init__.py"))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"\b\w+\.py\b", tree):
        assert f"/{name}\n" in tracked, f"the tree names {name}"


def test_the_table_for_those_who_come_from_open_clip_names_their_flags_and_ours():
    rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", (ROOT / "docs" / "from_open_clip.md").read_text(), re.MULTILINE)
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    named = re.compile(r"--[a-z][a-z0-9-]*")
    assert len(rows) > 10
    for theirs, instead in rows:
        assert set(named.findall(theirs)) <= OPEN_CLIP_FLAGS.keys() | {"--train-data", "--resume"}, theirs
        assert set(named.findall(instead)) <= ours, instead


def test_the_checker_finds_a_wrong_flag_and_a_continued_line():
    text = "deepspeed launch/train.py \\\n    --warmpu 5\n`python tools/demo.py --seed 1`"
    assert commands(text) == [("launch/train.py", ["--warmpu"]), ("tools/demo.py", ["--seed"])]
    assert "--warmpu" not in options_of("launch/train.py")


def test_the_memory_table_of_fastclip_is_what_a_loss_allocates():
    samples, of_table, ranks = 1000, 414e6, 64
    table = (ROOT / "docs" / "fastclip.md").read_text().split("## Memory")[1].split("## ")[0]
    rows = [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("| `") and "megaclip" not in line
    ]
    told = {name: cells for names, *cells in rows for name in re.findall(r"\w+", names)}
    assert sorted(told) == sorted(VARIANTS)
    for name, (columns, sample_bytes, together, each, _) in told.items():
        state = FastClipLoss(name, samples=samples).state
        allocated = state.values.untyped_storage().nbytes()
        assert (int(columns), int(sample_bytes)) == (len(state.columns), allocated / samples)
        assert together == f"{allocated / samples * of_table / 1e9:.1f} GB"
        assert each == f"{allocated / samples * of_table / ranks / 1e6:.0f} MB"
    assert max(SampleIndex(samples, rank, ranks).rows for rank in range(ranks)) == -(-samples // ranks)
