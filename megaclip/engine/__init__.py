"""The training engine: everything between the command line and one optimizer step.

Words used in this package:

- chunk: the samples that a tower processes at a time, `train_micro_batch_size_per_gpu` images or
  `text_micro_batch_size` captions. DeepSpeed calls it a micro-batch. A rank's share of the batch has one image chunk
  per accumulation step.
- embeddings: the outputs of the towers, (b, D). `megaclip.losses` calls them features.
- host: a computer that runs one or more ranks.

A run starts (`run.train`):

- `run`: the run and its training loop, which decides when to save, evaluate and stop.
- `inputs`, `tokenizer_choice`: read configuration, data, tokenizer and model description, before any process group
  exists.
- `process_group`: joins the ranks that the launcher has started, except those that the batch cannot use.
  `equal_inputs` then compares their inputs.
- `preflight`: compares the planned memory of the run with the free memory, and refuses a run that does not fit. It also
  decides where images and embeddings are kept, and how many graphs. `compile_trial` measures whether torch.compile
  makes the towers faster, for `megaclip.compile` "measure".
- `run_folder`: creates the run's folder, locks it for this run, and writes its settings and its summary.
- `schedule`: the number of steps, when to save and evaluate, and the learning rate of each step.
- `trainer`: builds the engine (`megaclip.zero.build`), opens the training data, evaluates, and takes optimizer steps:
  `megaclip.step` computes the gradients, and `megaclip.zero.optimizers` takes the update.
- `image_decoding`: the decoder of the training images, and how --image-decoder auto chooses it.
- `feature_cache`: encodes the training images with a locked image tower once, for --feature-cache.
- `run_loss`: the loss, with the sample ids, the epoch, and the optimizer and state that some losses own.
- `resume`: finds the checkpoint that --resume specifies, checks that it belongs to this run, and loads it.

Between steps `checkpoints` saves and records the checkpoint with the best scores. `metrics` reports all in the log, to
TensorBoard and to DeepSpeed's monitors. `megaclip.guards` watches the run.

Tools use `saved_model`, which loads an export or a checkpoint with its transform and tokenizer. A run writes its model
card by it too. Exports write the tokenizer of transformers by `transformers_tokenizer`.
"""
