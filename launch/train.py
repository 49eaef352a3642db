"""Train a CLIP model. Start it with the deepspeed launcher:

deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json --model ViT-B-32 --train-data 'shards/*.tar'
"""

import logging
import os
import sys
import time

from megaclip.engine.run import main

PATIENCE_S = 10.0

if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code != 0 and os.environ.get("LOCAL_RANK", "0") != "0":
        # A launcher kills every rank when one ends: the first must have said why. Its own end cuts this short.
        time.sleep(PATIENCE_S)
    # Not sys.exit: a communication thread that outlives the interpreter aborts a finished run now and then.
    os._exit(exit_code)
