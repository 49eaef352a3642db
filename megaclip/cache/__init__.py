"""The gradient cache: gradients of a loss over a whole batch whose encoders process one chunk at a time.

- `gradient_cache`: `GradientCache` and `Encoded`, the public interface. docs/gradient_cache.md describes its use.
- `passes`: the core, which `megaclip.step` shares: encodes chunks, keeps graphs, and back-propagates surrogates.
- `engines`: one reduction of parameter gradients per step in plain PyTorch, DDP, FSDP2 and DeepSpeed.
- `inputs`: divides inputs of any structure into chunks, by samples or by tokens.
- `kept_graphs`: the number of graphs that fit into free memory.

A run imports the modules it needs. `gradient_cache` and `engines` import FSDP2, which takes half a second.
"""
