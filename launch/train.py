"""Train a CLIP model on every rank that the deepspeed launcher starts:

deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json --model ViT-B-32 --train-data 'shards/*.tar'
"""

import atexit
import logging
import os
import sys
from pathlib import Path

LAUNCHER = os.getppid()  # now, because the launcher may end while the next line imports, which takes seconds

from megaclip.engine.run import main  # noqa: E402

if __name__ == "__main__":
    exit_code = main(sys.argv[1:], other_ranks_delay_s=60.0, launcher=LAUNCHER)
    if exit_code == 0 and (completed := os.environ.get("MEGACLIP_COMPLETED_FILE")):
        Path(completed).write_text("0\n")  # launch/multi_node.sh does not trust an exit code of 0 without it
    atexit._run_exitfuncs()  # os._exit skips them, and monitors such as wandb need them
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that is still running when Python exits sometimes aborts a finished run.
    os._exit(exit_code)
