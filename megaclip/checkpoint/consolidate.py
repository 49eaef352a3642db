"""Join the files that DeepSpeed saved at one step of a run into whole float32 weights.

With ZeRO, the float32 master weights are spread over `*_optim_states.pt` files, and DeepSpeed's `zero_to_fp32` joins
them. Without ZeRO, the model file holds the weights of the forward pass. In bfloat16 runs without ZeRO these weights
are bfloat16: DeepSpeed saves their masters without names, so the masters cannot be used.

DeepSpeed unpickles its own checkpoints without restriction. Consolidate only runs that you trust; read weights from
untrusted sources in open_clip's format (`megaclip.checkpoint.open_clip_weights`).
"""

import contextlib
import io
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from megaclip.errors import CheckpointError, first_line
from megaclip.models.open_clip_keys import StateDict


def consolidated_weights(folder: Path, tag: str) -> StateDict:
    """Return MegaCLIP's state dict of a checkpoint, float32 on the CPU.

    Args:
        folder: RUN/checkpoints.
        tag: name of the checkpoint, such as "step_00000100".

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete, or its model is tensor parallel.
    """
    step = folder / tag
    if not step.is_dir():
        raise CheckpointError(f"{step} does not exist; expected a directory saved by training")
    if any(step.glob("*mp_rank_01_model_states.pt")):
        raise CheckpointError(f"{step} is split over tensor-parallel ranks; convert it to one rank before exporting")
    try:
        weights = _joined_weights(folder, tag) if any(step.glob("*_optim_states.pt")) else {}
        # The model file has all weights without ZeRO, and at ZeRO-1 the frozen ones, which zero_to_fp32 leaves out.
        model_file = step / "mp_rank_00_model_states.pt"
        if model_file.is_file():
            module = torch.load(model_file, map_location="cpu", weights_only=False)["module"]
            weights.update({name: value for name, value in module.items() if name not in weights})
    except Exception as error:  # an incomplete checkpoint can cause any exception inside DeepSpeed's reader
        raise CheckpointError(f"{step} cannot be joined: {first_line(error)}") from None
    if not weights:
        raise CheckpointError(f"{step} is incomplete: it holds neither optimizer states nor {model_file.name}")
    return {name: value.detach().clone().float() for name, value in weights.items()}


def _joined_weights(folder: Path, tag: str) -> StateDict:
    # zero_to_fp32 prints its progress, which would mix with the output of the export command.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag))
