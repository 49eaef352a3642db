"""What became of open_clip's training flags that launch/train.py does not take: one sentence for each.

`megaclip.config.command_line` has the flags of the same name and meaning; docs/from_open_clip.md documents the usual
ones.
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
    "--precision": "bf16.enabled",
    "--grad-clip-norm": "gradient_clipping",
    "--grad-checkpointing": "activation_checkpointing (an empty object turns it on)",
    "--local-loss": "megaclip.exchange and megaclip.reduction, all of them exact",
    "--gather-with-grad": "megaclip.exchange and megaclip.reduction, all of them exact",
    "--loss-dist-impl": "megaclip.exchange, every one exact",
    "--siglip": "megaclip.loss",
    "--torchcompile": "megaclip.compile_blocks",
    "--report-to": "wandb.enabled or comet.enabled (TensorBoard is always written)",
    "--wandb-project-name": "wandb.project",
}

_MODEL_JSON = "write it into a copy of the model's JSON and give its path to --model"
_LAUNCHER = "leave it out: the deepspeed launcher says it (see docs/multi_node.md)"
_SYNC = "it is not built: copy the run's folder, --logs and --name, with a tool of your own"

_ELSEWHERE = {
    "--train-num-samples": "leave it out: the samples are counted",
    "--val-num-samples": "leave it out: the samples are counted",
    "--train-data-upsampling-factors": "write --train-data A B --train-data-weights 1 2 (shares, not factors)",
    "--dataset-resampled": "leave it out: every sample comes once per epoch; --train-data-weights makes a mixture",
    "--csv-separator": "leave it out: tabs where the header line holds one, else commas",
    "--csv-img-key": "write --image-key",
    "--csv-caption-key": "write --caption-key",
    "--imagenet-val": "write --zeroshot-data, a folder with a folder per class and the names in its classnames.txt",
    "--imagenet-v2": "write --zeroshot-data, or evaluate it after the run with tools/evaluate.py",
    "--zeroshot-frequency": "write --val-frequency, which is for --zeroshot-data too",
    "--cache-dir": "set the environment variable HF_HOME; only hub data sets (hf:NAME) are downloaded",
    "--log-local": "leave it out: the first rank logs, and the others what is wrong with them",
    "--use-bn-sync": "leave it out: these models have no batch norm",
    "--skip-scheduler": "write --lr-scheduler const --warmup 0",
    "--save-most-recent": "leave it out: --resume auto finds the latest of the --keep-last checkpoints",
    "--delete-previous-checkpoint": "write --keep-last 1",
    "--pretrained-image": "it is not built: --pretrained starts both towers from open_clip's weights",
    "--lock-image-freeze-bn-stats": "leave it out: these models have no batch norm",
    "--lock-text-freeze-layer-norm": "leave it out: --lock-text freezes the layer norms with the rest",
    "--aug-cfg": "write --aug-scale; there is no other augmentation",
    "--force-context-length": _MODEL_JSON,
    "--force-image-size": _MODEL_JSON,
    "--force-quick-gelu": "choose a --model whose name ends in -quickgelu, or write quick_gelu into the model's JSON",
    "--force-custom-text": "leave it out: custom_text in the model's JSON only changes the names of exported weights",
    "--torchscript": "leave it out: export the run with tools/export_open_clip.py and script it there",
    "--trace": "leave it out: export the run with tools/export_open_clip.py and trace it there",
    "--device": "set the environment variable DS_ACCELERATOR, such as cpu",
    "--dist-url": _LAUNCHER,
    "--dist-backend": "leave it out: NCCL on GPUs, gloo on CPUs",
    "--horovod": _LAUNCHER,
    "--ddp-static-graph": "leave it out: DeepSpeed reduces the gradients",
    "--no-set-device-rank": "leave it out, and let every process see all GPUs of its host",
    "--wandb-notes": "it is not built; wandb.group of ds_config.json and --name tell runs apart",
    "--debug": "write --debug-traceback for the traceback of a user error",
    "--copy-codebase": "leave it out: settings.json in the run's folder holds the settings, a commit your code",
    "--coca-caption-loss-weight": "CoCa is not built",
    "--coca-contrastive-loss-weight": "CoCa is not built",
    "--remote-sync": _SYNC,
    "--remote-sync-frequency": _SYNC,
    "--remote-sync-protocol": _SYNC,
    "--distill-model": "distillation is not built",
    "--distill-pretrained": "distillation is not built",
    "--use-bnb-linear": "it is not built: the linear layers are PyTorch's",
}

OPEN_CLIP_FLAGS = {flag: f"is set in ds_config.json: {key}" for flag, key in _IN_DS_CONFIG.items()} | {
    flag: f"is open_clip's: {advice}" for flag, advice in _ELSEWHERE.items()
}
"""Flag -> the rest of the sentence that begins with it."""
