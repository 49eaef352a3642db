"""Check that checkpoints or an export are whole: every file has the size and the checksum of its manifest.

    megaclip check runs/NAME            # all checkpoints of a run, and its model card
    megaclip check runs/NAME/checkpoints/step_00000100
    megaclip check exported

prints one line per folder, with its step, the time at which it was saved, its size, and the damaged files. The exit
code is 1 if a complete checkpoint or an export is damaged, or if there is no whole one. A checkpoint whose save was
interrupted is incomplete. It is listed, and is not an error if the run has a whole one. Files are read in blocks, and
nothing in them is executed.
"""

import sys
from pathlib import Path

from megaclip.commands.argument_types import CommandParser
from megaclip.errors import CheckpointError


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run, its checkpoints, one checkpoint or an export")
    folder = parser.parse_args(argv).folder
    try:
        rows = check(folder)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'folder':<16} {'saved at (UTC)':<20} {'MiB':>10}  state")
    for name, saved_at, mib, state, *problems in rows:
        print(f"{name:<16} {saved_at:<20} {mib:>10}  {state}")
        for problem in problems:
            print(f"{'':<16} {problem}")
    states = {row[3] for row in rows}
    return int("damaged" in states or "whole" not in states)


def check(folder: Path) -> list[tuple[str, ...]]:
    """Return the row of each checkpoint in `folder`, or of `folder` itself: name, time of the save (UTC), size in MiB,
    "whole", "damaged" or "incomplete", and the problems. Raises CheckpointError if there is nothing to check."""
    from megaclip.checkpoint import search  # torch is imported after the flags are read
    from megaclip.checkpoint.manifest import MANIFEST

    if (folder / MANIFEST).is_file():
        return [check_one(folder)]
    for checkpoints in (folder, folder / "checkpoints"):
        if not checkpoints.is_dir() or not (tags := search.all_tags(checkpoints)):
            continue
        rows = [check_one(checkpoints / tag) for tag in tags]
        latest = search.read_latest(checkpoints)
        if latest not in tags:
            problem = f"latest names {latest!r}, which does not exist" if latest is not None else "latest is missing"
            rows.append((search.LATEST, "", "", "damaged", problem))
        card = checkpoints / search.MODEL_CARD
        return [*rows, check_one(card)] if (card / MANIFEST).is_file() else rows
    raise CheckpointError(
        f"{str(folder)!r} holds no checkpoint and no {MANIFEST}; expected a run, its checkpoints, a step_N folder or "
        "an export"
    )


def check_one(folder: Path) -> tuple[str, ...]:
    """Return the row of one folder, after every file that its manifest lists has been read."""
    from megaclip.checkpoint import manifest

    if not (folder / manifest.MANIFEST).exists():
        return folder.name, "", "", "incomplete"
    problems = manifest.find_damage(folder)
    try:
        content = manifest.read(folder)
    except CheckpointError:
        return folder.name, "", "", "damaged", *problems
    mib = sum(record.size for record in content.files.values()) / 2**20
    return folder.name, content.saved_at[:19], f"{mib:.1f}", "damaged" if problems else "whole", *problems
