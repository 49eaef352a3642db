"""Compile the DeepSpeed op that CPU runs use, before the first run.

The compiled op is stored in TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions). It takes minutes.
"""

import sys
import time

from megaclip.commands.argument_types import CommandParser


def main() -> int:
    CommandParser(__doc__).parse_args()
    from deepspeed.accelerator import get_accelerator  # torch is imported after the flags are read

    from megaclip.zero.op_builds import prepare_ops, require_build_folder

    started = time.monotonic()
    require_build_folder(["cpu_adam"])
    prepare_ops()
    try:
        get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
    except Exception as error:  # a failed compilation has no specific exception type
        print(f"error: cannot compile cpu_adam; install g++, ninja and the Python headers: {error}", file=sys.stderr)
        return 1
    print(f"DeepSpeed's op for updates on CPUs is ready ({time.monotonic() - started:.0f} s)")
    return 0
