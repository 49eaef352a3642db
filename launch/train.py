"""Train a CLIP model. Start it with the deepspeed launcher:

deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json --model ViT-B-32 --train-data 'shards/*.tar'
"""

import atexit
import logging
import os
import sys

from megaclip.engine.run import main

if __name__ == "__main__":
    exit_code = main(sys.argv[1:], patience_s=60.0)
    atexit._run_exitfuncs()  # monitors such as wandb finish there
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that outlives the interpreter aborts a finished run now and then.
    os._exit(exit_code)
