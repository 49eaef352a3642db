"""The training engine: everything between the command line and one optimizer step. This docstring is a map of it.

A run starts (`run.train`):

- `run`: the run, its training loop, its checkpoints and evaluations.
- `inputs`: reads configuration, data, tokenizer and model description, before any process group exists.
- `process_group`: joins the ranks that the launcher has started.
- `preflight`: compares the planned memory of the run with the free memory, and refuses a run that does not fit.
- `run_length`, `schedules`: the number of steps, when to save and evaluate, and the learning rate of each step.
- `build`: builds the model and the DeepSpeed engine; `optimizers`: parameter groups, optimizers, and the update.
- `run_loss`: the loss, with the sample ids, the epoch, and the optimizer and state that some losses own.
- `resume`: finds the checkpoint that --resume specifies, checks that it belongs to this run, and loads it.
  `megaclip.checkpoint.store` writes and reads the files; `megaclip.checkpoint.reshard` converts them if the number of
  ranks, the ZeRO stage or the precision differs.

A step runs (`run.Run.train_step`), on each rank:

1. `step_store` reads samples in the background. It keeps the images of a step in host memory or in a file, or reads
   them twice; `data_offload` chooses which. It keeps all tokens in memory.
2. `step_batch` passes the samples to the device in chunks.
3. `gradient_cache` runs the towers over the chunks, keeps only the embeddings, calls the loss once for the whole batch,
   and runs the towers again for their gradients. Device memory thus holds the activations of one chunk of one tower at
   a time. Embeddings are on the device or, if `data_offload` decides so, in host memory.
4. `run_loss` passes the settings `exchange` and `reduction` to the loss. `megaclip.losses.plan.make_plan` decides what
   "auto" means for them. The loss holds one tile of the similarity matrix at a time.
5. `optimizers` takes the step and refuses gradients that are not finite. `logit_scale` clamps the logit scale.
6. `metrics` reports the step; `stop` checks whether a signal has asked the run to stop.

Tools use `saved_model`, which loads an export or a checkpoint with its transform and tokenizer, and `rates`, which
measures this machine for the planner.
"""
