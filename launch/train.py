"""Train a CLIP model on every rank that the deepspeed launcher starts:

deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json --model ViT-B-32 --train-data 'shards/*.tar'
"""

import atexit
import logging
import os
import sys

from megaclip.engine.run import main

if __name__ == "__main__":
    exit_code = main(sys.argv[1:], other_ranks_delay_s=60.0)
    atexit._run_exitfuncs()  # os._exit skips them, and monitors such as wandb need them
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that is still running when Python exits sometimes aborts a finished run.
    os._exit(exit_code)
