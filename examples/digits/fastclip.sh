#!/usr/bin/env bash
# Train FastCLIP v3 on the digit scenes of data.sh, with two ranks on the CPU (docs/fastclip.md).
# For your own data: use more steps, and the file of ds_configs/ for a dataset of the size of yours.
set -euo pipefail
[[ -d data/scenes ]] || bash "$(dirname "${BASH_SOURCE[0]}")/data.sh"

DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --module megaclip train \
  --deepspeed_config fastclip_v3 --model demo-tiny \
  --train-data 'data/scenes/train/*.tar' --tokenizer data/scenes/tokenizer.model \
  --val-data 'data/scenes/held_out/*.tar' --zeroshot-data data/scenes/zero_shot \
  --train-steps 6 --warmup 2 --workers 0 --name fastclip "$@"
