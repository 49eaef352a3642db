"""Checkpoints: atomic save, exact resume on any number of ranks, import from and export to open_clip's format.

Checkpoints of a run:

- `store`: saves and loads them. `background` saves while training continues, from the copies that `host_copy` makes.
- `search`: finds the checkpoints of a run, and checks that they are whole.
- `saved_states`: finds parameters by name in the files of all ranks, and joins whole weights for exports and
  evaluations. `megaclip.zero.reshard` loads a checkpoint from it with another number of ranks,
  ZeRO stage or precision.
- `deepspeed_files`: saves and loads through DeepSpeed's engine, without executing anything from its files.

open_clip's format:

- `open_clip_weights`: weights of a model, which `weight_files` reads. `megaclip.models.weights` fits them to a model.
- `open_clip_directory`: imports and exports.
- `model_card`: model description, image preprocessing and tokenizer, beside the weights.
- `verify`: compares an export with the model that open_clip loads from it.

Files in general:

- `durable`: writes files that survive a power cut. `manifest` records their sizes and checksums.
- `output`: checks the output paths of commands.
"""
