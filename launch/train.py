"""`megaclip train`, from a checkout: deepspeed launch/train.py --deepspeed_config ds_configs/zero3.json ..."""

from megaclip.commands.train import main

if __name__ == "__main__":
    main()
