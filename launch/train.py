"""`megaclip train`, from a checkout: deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json ..."""

import sys

from megaclip.commands import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
