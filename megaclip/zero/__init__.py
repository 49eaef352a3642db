"""DeepSpeed's engine and everything that touches its internals.

- `build`: builds the model and the engine, from `parameter_groups` and `optimizers`.
- `update`: DeepSpeed's update with grouped kernels. `linear`: linear layers at ZeRO-3. `gathered_tower`: keeps a
  tower's parameters gathered at ZeRO-3.
- `logit_scale`: exact access to the float32 masters of `logit_scale` and `logit_bias`.
- `masters`: where each rank keeps its part of the float32 masters. `weight_average`: their moving average. `reshard`:
  loads a checkpoint, also of another number of ranks or ZeRO stage.
- `backward`: the backward passes of a step, and the sums of its chunks' gradients. `parameters`: the attributes of
  partitioned parameters. `settings`: DeepSpeed's models of ds_config.json.
- `op_builds`: registers MegaCLIP's op, and watches those that DeepSpeed compiles at first use.
- `versions`: refuses the versions of DeepSpeed that this package does not know. The import of the package calls it.
"""

from megaclip.zero.versions import require_deepspeed

require_deepspeed()
