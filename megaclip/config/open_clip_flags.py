"""open_clip's training flags that launch/train.py does not accept, each with its replacement.

`megaclip.config.command_line` has the flags that are the same in both. docs/from_open_clip.md documents the usual ones.
"""

_IN_DS_CONFIG = {
    "--batch-size": "train_micro_batch_size_per_gpu",
    "--accum-freq": "gradient_accumulation_steps",
    "--lr": "optimizer.params.lr",
    "--wd": "optimizer.params.weight_decay",
    "--beta1": "optimizer.params.betas",
    "--beta2": "optimizer.params.betas",
    "--eps": "optimizer.params.eps",
    "--momentum": "optimizer.params.momentum",
    "--opt": "optimizer.type",
    "--image-layer-decay": "megaclip.image_layer_decay",
    "--visual-layer-decay": "megaclip.image_layer_decay",
    "--text-layer-decay": "megaclip.text_layer_decay",
    "--precision": "bf16.enabled",
    "--grad-clip-norm": "gradient_clipping",
    "--grad-checkpointing": "activation_checkpointing (an empty object turns it on)",
    "--local-loss": "megaclip.exchange and megaclip.reduction (all their values are exact)",
    "--gather-with-grad": "megaclip.exchange and megaclip.reduction (all their values are exact)",
    "--loss-dist-impl": "megaclip.exchange (all its values are exact)",
    "--siglip": "megaclip.loss",
    "--torchcompile": "megaclip.compile",
    "--report-to": "wandb.enabled or comet.enabled (TensorBoard is always written)",
    "--wandb-project-name": "wandb.project",
}

_MODEL_JSON = "write it into a copy of the model's JSON and use the copy's path as --model"
_LAUNCHER = "leave it out: the deepspeed launcher sets it (`megaclip show multi_node`)"
_REMOTE_SYNC = "it has no replacement: copy the run's folder (--logs, --name) with another tool"

_ELSEWHERE = {
    "--train-num-samples": "leave it out: the samples are counted",
    "--val-num-samples": "leave it out: the samples are counted",
    "--train-data-upsampling-factors": "use --train-data A B --train-data-weights 1 2 (shares, not factors)",
    "--dataset-resampled": "leave it out: an epoch contains every sample once; --train-data-weights makes a mixture",
    "--csv-separator": "leave it out: a tab, semicolon or comma is found in the header line",
    "--csv-img-key": "use --image-key",
    "--csv-caption-key": "use --caption-key",
    "--imagenet-val": "use --zeroshot-data with a folder that has one folder per class and classnames.txt",
    "--imagenet-v2": "use --zeroshot-data, or evaluate it after the run with `megaclip evaluate`",
    "--zeroshot-frequency": "use --val-frequency, which also applies to --zeroshot-data",
    "--cache-dir": "set the environment variable HF_HOME; only hub datasets (hf:NAME) are downloaded",
    "--log-local": "leave it out: the first rank logs everything, the other ranks log warnings and errors",
    "--use-bn-sync": "it has no replacement: a batch norm uses the samples of one chunk on one rank "
    "(`megaclip show models`)",
    "--skip-scheduler": "use --lr-scheduler const --warmup 0",
    "--save-most-recent": "leave it out: --resume auto finds the latest of the --keep-last checkpoints",
    "--delete-previous-checkpoint": "use --keep-last 1",
    "--lock-image-freeze-bn-stats": "it has no replacement: a locked tower updates them too (`megaclip show models`)",
    "--lock-text-freeze-layer-norm": "leave it out: --lock-text freezes the layer norms too",
    "--aug-cfg": "use --aug-scale; there is no other augmentation",
    "--force-context-length": _MODEL_JSON,
    "--force-image-size": _MODEL_JSON,
    "--force-quick-gelu": "use a --model whose name ends in -quickgelu, or set quick_gelu in the model's JSON",
    "--force-custom-text": "leave it out: custom_text in the model's JSON only changes the names of exported weights",
    "--torchscript": "leave it out: export the run with `megaclip export` and script it in open_clip",
    "--trace": "leave it out: export the run with `megaclip export` and trace it in open_clip",
    "--device": "set the environment variable DS_ACCELERATOR, for example to cpu",
    "--dist-url": _LAUNCHER,
    "--dist-backend": "leave it out: the backend is NCCL on GPUs and gloo on CPUs",
    "--horovod": _LAUNCHER,
    "--ddp-static-graph": "leave it out: DeepSpeed reduces the gradients",
    "--no-set-device-rank": "leave it out, and make all GPUs of a host visible to every process",
    "--wandb-notes": "it has no replacement: use wandb.group in ds_config.json and --name to distinguish runs",
    "--debug": "use --debug-traceback, which prints the traceback of configuration and data errors",
    "--copy-codebase": "leave it out: settings.json in the run's folder records the settings; record the code with git",
    "--coca-caption-loss-weight": "CoCa is not supported",
    "--coca-contrastive-loss-weight": "CoCa is not supported",
    "--remote-sync": _REMOTE_SYNC,
    "--remote-sync-frequency": _REMOTE_SYNC,
    "--remote-sync-protocol": _REMOTE_SYNC,
    "--distill-model": "distillation is not supported",
    "--distill-pretrained": "distillation is not supported",
    "--use-bnb-linear": "it is not supported: the linear layers are PyTorch's",
}

OPEN_CLIP_FLAGS = {flag: f"is set in ds_config.json: {key}" for flag, key in _IN_DS_CONFIG.items()} | {
    flag: f"is not a flag here; {replacement}" for flag, replacement in _ELSEWHERE.items()
}
"""Flag -> the rest of the error message, which begins with the flag."""
