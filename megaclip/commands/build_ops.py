"""Compile the DeepSpeed ops that CPU runs use, so that the first run does not have to.

The compiled ops are stored in TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions). A build that was killed leaves
a lock file, and every later build waits for it without end. This command deletes such files first, so do not start it
twice at the same time.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from megaclip.errors import MegaclipError

CPU_OPS = ("CPUAdamBuilder", "FusedAdamBuilder")


def remove_stale_locks() -> None:
    """Delete the lock files of builds that were killed."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("**/lock"):
        lock.unlink()


def build(name: str) -> None:
    """Compile and load one op. Raises MegaclipError if that fails."""
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:  # a failed compilation has no exception type of its own
        raise MegaclipError(
            f"cannot compile {name}; install g++, ninja and the Python headers; the compilation failed with: {error}"
        ) from error


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    remove_stale_locks()
    started = time.monotonic()
    try:
        for name in tqdm(CPU_OPS, desc="compiling DeepSpeed's CPU ops", unit="op"):
            build(name)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"DeepSpeed's CPU ops are ready ({time.monotonic() - started:.0f} s)")
    return 0
