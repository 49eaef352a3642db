"""The training engine: everything between the command line and one optimizer step.

Words used in this package:

- chunk: the samples that a tower processes at a time, `train_micro_batch_size_per_gpu` images or
  `text_micro_batch_size` captions. DeepSpeed calls it a micro-batch. A rank's share of the batch has one image chunk
  per accumulation step.
- embeddings: the outputs of the towers, (b, D). `megaclip.losses` calls them features.
- host: a computer that runs one or more ranks.

A run starts (`run.train`):

- `run`: the run, its training loop, its checkpoints and evaluations.
- `inputs`, `tokenizer_choice`: read configuration, data, tokenizer and model description, before any process group
  exists.
- `process_group`: joins the ranks that the launcher has started. `equal_inputs` then compares their inputs.
- `preflight`: compares the planned memory of the run with the free memory (`this_machine`), and refuses a run that
  does not fit. It also decides where images and embeddings are kept, and how many graphs.
- `run_folder`, `run_lock`: create the run's folder and lock it for this run.
- `run_length`, `schedules`: the number of steps, when to save and evaluate, and the learning rate of each step.
- `build`: builds the model and the DeepSpeed engine, from `parameter_groups`, `optimizers`, `deepspeed_update`
  (DeepSpeed's update with grouped kernels), `zero3_linear` (linear layers at ZeRO-3) and `compilation` (torch.compile).
- `run_loss`: the loss, with the sample ids, the epoch, and the optimizer and state that some losses own.
- `resume`: finds the checkpoint that --resume specifies, checks that it belongs to this run, and loads it.
  `megaclip.checkpoint.store` writes and reads the files; `megaclip.checkpoint.reshard` converts them if the number of
  ranks, the ZeRO stage or the precision differs. `changed_settings` logs the settings that differ from those before.

A step runs (`run.Run.train_step`), on each rank:

1. `step_store` reads samples in the background. `data_offload` selects whether the images of a step are kept in host
   memory, kept in a file (`image_slots`) or read twice. All tokens are kept in host memory. `caption_chunks` sorts the
   captions by length and cuts each chunk of them at its longest caption.
2. `step_batch` passes the samples to the device in chunks.
3. `gradient_cache` runs the towers over the chunks. It keeps all embeddings, and the graphs of as many chunks as
   `keep_graphs` allows. It calls the loss once for the whole batch and back-propagates the kept graphs. Then it runs
   the towers again over the other chunks, one chunk of one tower at a time. `embeddings_offload` selects whether
   embeddings are kept on the device or in host memory. `gradient_sums` sums the gradients of the chunks, and
   `running_statistics` restores those of batch norms. At ZeRO-3 `gathered_tower` keeps a tower's parameters
   gathered for all its chunks.
4. `run_loss` passes the settings `exchange` and `reduction` to the loss. If one of them is "auto",
   `megaclip.losses.plan.make_plan` measures the link speed and the compute speed, from which `choose_way` selects the
   setting. The loss holds one tile of logits at a time.
5. `optimizers` takes the step and refuses gradients that are not finite; `loss_watch` counts such steps and reports
   loss spikes. `logit_scale` clamps the logit scale. `weight_average` adds the weights to their moving average.
6. `metrics` reports the step, in the log and through `curves`. `stop` checks whether a signal has asked the run to
   stop.

Between steps `saving` writes checkpoints, and `best_checkpoint` records the one with the best scores. Two threads watch
the run: `watchdog` ends it if it hangs, with the `stacks` of all threads, and `launcher` if its launcher is gone.

Tools use `saved_model`, which loads an export or a checkpoint with its transform and tokenizer, and
`machine_rates`, which measures this machine for the planner. A run writes its model card by `saved_model` too.
"""
