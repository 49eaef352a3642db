#!/usr/bin/env bash
# Draw the captioned digit scenes of the demo and train a tokenizer on their captions. It writes data/scenes/ in the
# current folder, in half a minute. Requires `pip install scikit-learn`.
set -euo pipefail

megaclip demo-data data/scenes --train 2048 --held-out 200
megaclip tokenizer 'data/scenes/train/*.tar' --out data/scenes/tokenizer.model --vocab-size 192
