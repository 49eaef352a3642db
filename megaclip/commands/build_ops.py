"""Compile the DeepSpeed ops that CPU runs use, before the first run.

The compiled ops are stored in TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions). A killed build leaves a lock
file there. This command first deletes the locks that no process of this host has open.
"""

import argparse
import sys
import time

from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from megaclip.errors import MegaclipError
from megaclip.zero.op_builds import delete_abandoned_locks

CPU_OPS = ("CPUAdamBuilder", "FusedAdamBuilder")


def build(name: str) -> None:
    """Compile and load one op. Raises MegaclipError if that fails."""
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:  # a failed compilation has no specific exception type
        raise MegaclipError(
            f"cannot compile {name}; install g++, ninja and the Python headers; the compilation failed with: {error}"
        ) from error


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    delete_abandoned_locks(patience_s=5)
    started = time.monotonic()
    try:
        for name in tqdm(CPU_OPS, desc="compiling DeepSpeed's CPU ops", unit="op"):
            build(name)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"DeepSpeed's CPU ops are ready ({time.monotonic() - started:.0f} s)")
    return 0
