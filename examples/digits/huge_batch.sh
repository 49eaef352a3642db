#!/usr/bin/env bash
# Train a batch of 256 in chunks of 16 images and 64 captions, with the images of a step on the disk (chunks.json), with
# two ranks on the CPU (docs/huge_batches.md).
set -euo pipefail
example=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -d data/scenes ]] || bash "$example/data.sh"

DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --module megaclip train \
  --deepspeed_config "$example/chunks.json" --model demo-tiny \
  --train-data 'data/scenes/train/*.tar' --tokenizer data/scenes/tokenizer.model \
  --train-steps 3 --warmup 1 --workers 1 --log-every-n-steps 1 \
  --data-offload-dir /tmp --name chunks "$@"
