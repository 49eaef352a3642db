#!/usr/bin/env bash
# Fine-tune LAION's ViT-B/32 on your pairs in shards/ and val/, and export the result (docs/fine_tuning.md).
# Run it in the folder that contains shards/ and val/. It writes released/, runs/fine-tuned/ and exported/ there.
set -euo pipefail
example=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Get the weights.
[[ -d downloaded ]] || hf download laion/CLIP-ViT-B-32-laion2B-s34B-b79K --local-dir downloaded
megaclip import downloaded released

# Check the data, and evaluate the model before training.
megaclip inspect 'shards/*.tar' --model released --pictures sheet.png
megaclip evaluate released --val-data 'val/*.tar'

# Train. Further arguments of this script are passed on.
deepspeed --module megaclip train \
  --deepspeed_config "$example/fine_tune.json" \
  --model released --pretrained released \
  --train-data 'shards/*.tar' --val-data 'val/*.tar' \
  --epochs 5 --lock-image --lock-image-unlocked-groups 2 \
  --name fine-tuned "$@"

# Evaluate the last checkpoint, and export it.
megaclip evaluate runs/fine-tuned --val-data 'val/*.tar'
megaclip export runs/fine-tuned exported --verify
