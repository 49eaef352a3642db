"""Manifests: a file in a checkpoint or an export that records size and checksum of every other file.

`write` first makes all files survive a power cut and writes the manifest last. So a folder with a manifest was complete
at that time. `find_damage` reads the files again and names those that are missing or have changed. On N ranks each file
is read by one rank (`find_damage_on_all_ranks`).
"""

import contextlib
import datetime
import json
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megaclip.checkpoint.durable import FileRecord, checksum, read_text, sync_files
from megaclip.comm.collectives import gather_objects
from megaclip.comm.groups import group_rank, group_size
from megaclip.errors import CheckpointError, first_line
from megaclip.files import sync_folder, write_atomically
from megaclip.logging import format_count

MANIFEST = "megaclip_manifest.json"
"""Name of the manifest in its folder."""
_PACKAGES = ("megaclip", "torch", "deepspeed")


class Manifest(BaseModel):
    """Content of a manifest."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: Literal[1] = 1
    saved_at: str
    """Time in UTC, in ISO 8601 with microseconds, so that the order of texts is the order of times."""
    run: str = ""
    """Identifier of the run that wrote the checkpoint. A run deletes only its own checkpoints."""
    versions: dict[str, str]
    """Installed versions by package."""
    files: dict[str, FileRecord]
    """Path relative to the folder, with slashes -> size and checksum."""


def write(folder: Path, files: Mapping[str, FileRecord] | None = None, *, run: str = "") -> None:
    """Write the manifest of `folder`, whose other files must not change any more.

    files: records of files that are already on the disk. None: make all files survive a power cut, and read them.
    run: identifier of the run that wrote the folder.
    """
    if files is None:
        files = {name: record for name, record in sync_files(folder).items() if name != MANIFEST}
    content = Manifest(
        saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
        run=run,
        versions={name: _version(name) for name in _PACKAGES},
        files=dict(sorted(files.items())),
    )
    with contextlib.suppress(CheckpointError):  # writing the same files again leaves the manifest as it is
        before = read(folder)
        if content == before.model_copy(update={"saved_at": content.saved_at}):
            content = before
    values = content.model_dump()
    write_atomically(folder / MANIFEST, json.dumps({**values, "crc32": _crc32_of(values)}, indent=1))
    sync_folder(folder.parent)


def read(folder: Path) -> Manifest:
    """Return the manifest of `folder`. Raises CheckpointError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict) or content.pop("crc32", None) != _crc32_of(content):
            raise CheckpointError(f"{MANIFEST} has changed: its checksum differs from its content")
        return Manifest.model_validate(content)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except ValidationError as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest of format 1: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {first_line(error)}") from None


def find_damage(folder: Path, *, only: str | None = None, part: int = 0, parts: int = 1) -> list[str]:
    """Check the files of `folder` against its manifest; return one text per damaged file.

    only: name of the file to check, which the manifest may lack. None: all files, or share `part` of `parts` shares.
    """
    try:
        files = read(folder).files
    except CheckpointError as error:
        return [str(error)]
    if only is not None:
        return [problem for name in files.keys() & {only} if (problem := _problem(folder, name, files[name]))]
    unlisted = sorted(path.name for path in folder.glob("*.pt") if path.name not in files)
    problems = [f"{name} is not listed in {MANIFEST}" for name in unlisted] if part == 0 else []
    for name in sorted(files, key=lambda name: (-files[name].size, name))[part::parts]:
        if problem := _problem(folder, name, files[name]):
            problems.append(problem)
    return problems


def find_damage_on_all_ranks(folder: Path, *, only: str | None = None) -> list[str]:
    """Check the files of `folder`, each on one rank, or the file `only` on every rank; return the damage on all ranks.

    All ranks must call it.
    """
    own = find_damage(folder, only=only, part=group_rank(), parts=group_size())
    return list(dict.fromkeys(problem for problems in gather_objects(own) for problem in problems))


def require_whole(path: Path) -> None:
    """Raise CheckpointError unless every file of an export or a model card's folder is as its manifest records it.

    A folder without a manifest is accepted: open_clip writes none. All ranks must call it.

    path: the folder, or one of its files, of which the others may be damaged. An index of parts stands for the folder.
    """
    folder = path.parent if path.is_file() else path
    only = path.name if path.is_file() and path.suffix != ".json" else None
    present = any(gather_objects((folder / MANIFEST).exists()))
    if present and (problems := find_damage_on_all_ranks(folder, only=only)):
        raise CheckpointError(
            f"{str(path)!r} is damaged: {summary(problems)}; write or copy it again. If the files were changed on "
            f"purpose, delete its {MANIFEST}"
        )


def summary(problems: list[str]) -> str:
    """Return the first three problems, and the number of the others."""
    more = f"; and {format_count(len(problems) - 3, 'more file')}" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _problem(folder: Path, name: str, expected: FileRecord) -> str | None:
    """Return the damage of one file. The name comes from a file, so it must not lead out of the folder."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return f"{name!r} in {MANIFEST} leads out of the folder"
    path = folder / pure
    try:
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected.size:
            return f"{name} has {size} bytes instead of {expected.size}"
        if (found := checksum(path)) != expected:
            return f"{name} has changed: its CRC-32 is {found.crc32} instead of {expected.crc32}"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {first_line(error)}"
    return None


def _crc32_of(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
