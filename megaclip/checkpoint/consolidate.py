"""The float32 weights of one step of a run, whole, from the pieces DeepSpeed saved.

With ZeRO the float32 masters are spread over `*_optim_states.pt` files and DeepSpeed's `zero_to_fp32` joins them.
Without ZeRO the model file holds the weights that the forward pass uses (in bfloat16 runs: those, not their masters,
which DeepSpeed saves without names). DeepSpeed unpickles its own checkpoints without restriction, so consolidate only
runs you trust: weights from strangers belong in open_clip's format (`megaclip.checkpoint.open_clip`).
"""

import contextlib
import io
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from megaclip.errors import CheckpointError, first_line
from megaclip.models.open_clip_keys import StateDict


def consolidated_weights(folder: Path, tag: str) -> StateDict:
    """MegaCLIP's state dict, float32 on the CPU, of the checkpoint `tag` in RUN/checkpoints.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete, or its model is tensor parallel.
    """
    step = folder / tag
    if not step.is_dir():
        raise CheckpointError(f"{step} does not exist: expected a directory saved by training.")
    if any(step.glob("*mp_rank_01_model_states.pt")):
        raise CheckpointError(f"{step} is split over tensor-parallel ranks: convert it to one rank before exporting.")
    try:
        weights = _joined_weights(folder, tag) if any(step.glob("*_optim_states.pt")) else {}
        # Without ZeRO the model file has everything; at ZeRO-1 zero_to_fp32 leaves frozen parameters out, it has those.
        model_file = step / "mp_rank_00_model_states.pt"
        if model_file.is_file():
            module = torch.load(model_file, map_location="cpu", weights_only=False)["module"]
            weights.update({name: value for name, value in module.items() if name not in weights})
    except Exception as error:  # an incomplete checkpoint can fail anywhere inside DeepSpeed's reader
        raise CheckpointError(f"{step} cannot be joined: {first_line(error)}.") from None
    if not weights:
        raise CheckpointError(f"{step} is incomplete: neither optimizer states nor {model_file.name} are in it.")
    return {name: value.detach().clone().float() for name, value in weights.items()}


def _joined_weights(folder: Path, tag: str) -> StateDict:
    # zero_to_fp32 prints its progress.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag))
