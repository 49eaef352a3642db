"""Checkpoints: atomic save, exact resume on any number of ranks, open_clip's and transformers' formats.

Checkpoints of a run:

- `store`: saves them. `background` saves while training continues.
- `search`: finds the checkpoints of a run, and checks that they are whole.
- `saved_states`: finds parameters by name in the files of all ranks, and joins whole weights for exports and
  evaluations. `megaclip.zero.reshard` loads a checkpoint from it, with any number of ranks, ZeRO stage and precision.
- `deepspeed_files`: saves through DeepSpeed's engine, and reads its files without executing anything from them.

Formats of open_clip and transformers:

- `open_clip_weights`: weights of a model, which `weight_files` reads. `megaclip.models.weights` fits them to a model.
- `model_directory`: imports, and exports with their README.md.
- `adapters`: adapters of `megaclip.lora`, merged with the weights of --pretrained. `peft_folder` writes them alone, for
  transformers' models.
- `model_card`: model description, image preprocessing and tokenizer, beside the weights.
- `verify`: compares an export with the models that open_clip and transformers load from it.

Files in general:

- `durable`: writes files that survive a power cut. `manifest` records their sizes and checksums.
- `output`: checks the output paths of commands.
"""
