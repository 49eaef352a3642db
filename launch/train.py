"""Train a CLIP model. Start it with the deepspeed launcher:

    deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json --model ViT-B-32 --train-data 'shards/*.tar'
"""

import sys

from megaclip.engine.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
