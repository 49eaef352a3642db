"""Train a CLIP model on every rank that the deepspeed launcher starts:

deepspeed --module megaclip train --deepspeed_config zero3 --model ViT-B-32 --train-data 'shards/*.tar'
"""

import atexit
import logging
import os
import sys

from megaclip.config.command_line import build_parser


def main() -> None:
    """Run this rank's part of the training, and end the process with its exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        build_parser().parse_args(["--help"])  # exits
    from megaclip.engine import run  # here, because it imports PyTorch and DeepSpeed, which the help does not need

    exit_code = run.main(sys.argv[1:], other_ranks_delay_s=60.0)
    atexit._run_exitfuncs()  # os._exit skips exit handlers, and monitors such as wandb need them
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that is still running when Python exits sometimes aborts a finished run.
    os._exit(exit_code)
