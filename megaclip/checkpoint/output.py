"""The directory to which an export or an import writes: created, or refused where it would mix with other files."""

from pathlib import Path

from megaclip.checkpoint.durable import make_folders
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.errors import CheckpointError


def prepare_output(out_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Create `out_dir` for an export.

    Args:
        out_dir: directory to write.
        source: directory or file that is exported or imported: RUN/checkpoints, an open_clip directory or a file.
        overwrite: `out_dir` may hold files. Its manifest is deleted, because it does not describe the new files.

    Raises:
        CheckpointError: `out_dir` is a file, holds files, belongs to `source` or holds a run, or cannot be created.
    """
    target, origin = out_dir.resolve(), source.resolve()
    if target == origin or origin in target.parents or (target / "checkpoints").is_dir():
        raise CheckpointError(f"{out_dir} belongs to {source}, or holds a run; choose another directory")
    try:
        if out_dir.is_dir() and any(out_dir.iterdir()) and not overwrite:
            raise CheckpointError(f"{out_dir} is not empty; choose another directory, or add --overwrite")
        make_folders(out_dir)
        (out_dir / MANIFEST).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {out_dir}: {error}; choose another directory") from None
