"""The directory to which an export or an import writes. It is refused where it would mix with other files."""

from pathlib import Path

from megaclip.errors import CheckpointError


def check_output(out_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Check that `out_dir` may be written.

    Args:
        out_dir: directory to write.
        source: directory or file that is exported or imported: RUN/checkpoints, an open_clip directory or a file.
        overwrite: `out_dir` may hold files.

    Raises:
        CheckpointError: `out_dir` is a file, holds files, belongs to `source`, holds a run, or cannot be read.
    """
    target, origin = out_dir.resolve(), source.resolve()
    if target == origin or origin in target.parents or (target / "checkpoints").is_dir():
        raise CheckpointError(f"{out_dir} belongs to {source}, or holds a run; choose another directory")
    try:
        if out_dir.exists() and any(out_dir.iterdir()) and not overwrite:
            raise CheckpointError(f"{out_dir} is not empty; choose another directory, or add --overwrite")
    except OSError as error:
        raise CheckpointError(f"cannot write to {out_dir}: {error}; choose another directory") from None
