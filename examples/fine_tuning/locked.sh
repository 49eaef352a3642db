#!/usr/bin/env bash
# Train with a locked image tower that encodes the pairs in shards/ once (docs/fine_tuning.md).
# Run it after fine_tune.sh, in the same folder: it reads shards/, val/ and released/. It writes features/ and runs/.
set -euo pipefail
example=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# train NAME FLAGS...: all runs read the image features of the first one. Further arguments of this script are passed on.
further=("$@")
train() {
  deepspeed --module megaclip train \
    --deepspeed_config "$example/fine_tune.json" --model released \
    --train-data 'shards/*.tar' --val-data 'val/*.tar' --epochs 5 \
    --lock-image --no-augmentation --feature-cache features \
    --name "$@" "${further[@]}"
}

# LiT: a new text tower. Its learning rate is that of a training from random weights.
train lit --pretrained-image released --set optimizer.params.lr=5e-4

# A new projection of the text tower only.
train projection --pretrained released --lock-text --lock-text-unlocked-layers 1 --set optimizer.params.lr=1e-3
