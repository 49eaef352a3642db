"""Join the files that DeepSpeed saved at one step of a run into whole float32 weights.

With ZeRO the weights are the float32 masters. Without ZeRO they are the weights of the forward pass, which are float32
too, because bfloat16 training requires ZeRO. Frozen parameters have no masters, so their working copies are converted
to float32. Moving averages of the weights are joined in the same way. A parameter that the run does not update has no
average, so its value is used.

Nothing in the files is executed (`megaclip.checkpoint.deepspeed_files`).
"""

from pathlib import Path

import torch

from megaclip.checkpoint.saved_states import EMA, FP32, WORKING, SavedStates
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import CheckpointError, first_line
from megaclip.models.open_clip_keys import StateDict


def consolidated_weights(folder: Path, tag: str, *, ema: bool = False) -> StateDict:
    """Return MegaCLIP's state dict of a checkpoint, parameters in float32, on the CPU.

    Args:
        folder: RUN/checkpoints.
        tag: name of the checkpoint, such as "step_00000100".
        ema: return the moving averages of the weights. Buffers (running statistics) are those of the last step.

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete, or has no moving averages.
    """
    step = folder / tag
    if not step.is_dir():
        raise CheckpointError(f"{step} does not exist; expected a directory saved by training")
    try:
        saved = SavedStates.open(step)
        if ema and not any(saved.has(name, EMA) for name in saved.shapes):
            raise CheckpointError(
                f"{step} has no moving averages of the weights (--ema), which a run saves if megaclip.ema_decay is "
                "set; leave out --ema"
            )
        weights = {name: _whole(saved, name, ema) for name in saved.shapes}
        return weights | {name: buffer.clone() for name, buffer in saved.buffers.items()}
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can cause any exception inside torch.load
        raise CheckpointError(f"{step} cannot be joined: {first_line(error)}; choose another checkpoint") from None


def _whole(saved: SavedStates, name: str, ema: bool) -> torch.Tensor:
    """Return a parameter in float32: its average with `ema`, else its master, else its working copy."""
    shape = saved.whole_shape(name)
    weights = torch.empty(shape)
    preferred = (EMA, FP32) if ema else (FP32,)
    kind = next((kind for kind in preferred if saved.has(name, kind)), WORKING)
    saved.read(name, kind, shape, ONE_RANK, 0, weights.view(-1))
    return weights
