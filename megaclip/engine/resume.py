"""Going on with a run: which checkpoint `--resume` means, whether it belongs to this run, and loading it."""

import json
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.checkpoint.reshard import load_resharded
from megaclip.comm.collectives import gather_objects, raise_together
from megaclip.config import BatchPlan, TrainArguments
from megaclip.data import check_manifest
from megaclip.engine.inputs import Inputs
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedules import default_warmup
from megaclip.errors import CheckpointError, MegaclipError
from megaclip.logging import get_logger

logger = get_logger(__name__)

_DIVISION = ("world_size", "zero_stage", "precision", "zero_layout")


def describe_run(inputs: Inputs, arguments: TrainArguments, batch_plan: BatchPlan, total_steps: int) -> dict[str, Any]:
    """What must be the same in a run and its continuation, but for how the state is divided among ranks (`_DIVISION`).

    JSON-able: every checkpoint's state holds it.
    """
    zero = inputs.config.deepspeed.get("zero_optimization", {})
    return {
        "world_size": dist.get_world_size(),
        "zero_stage": inputs.config.zero_stage,
        "precision": "bf16" if inputs.config.bf16 else "float32",
        "zero_layout": {key: zero.get(key) for key in ("parameter_alignment", "sub_group_size")},
        "locked": {
            "image": arguments.lock_image_unlocked_groups if arguments.lock_image else None,
            "text": arguments.lock_text_unlocked_layers if arguments.lock_text else None,
        },
        "seed": arguments.seed,
        "shard_order": arguments.shard_order,
        "global_batch": batch_plan.global_batch,
        "total_steps": total_steps,
        "optimizer": inputs.config.deepspeed["optimizer"]["type"],
        "model": inputs.model_config.to_open_clip(),
        "tokenizer": inputs.tokenizer.identity,
        "preprocess": inputs.preprocess_cfg,
        "data": inputs.train.manifest(),
    }


def _follows_length(arguments: TrainArguments, loss: RunLoss, done: int, *lengths: int) -> str | None:
    """The setting by which the steps after `done` are not the same in runs of these lengths (steps in all), if any."""
    if arguments.lr_scheduler != "const":
        return f"--lr-scheduler {arguments.lr_scheduler}"
    if arguments.warmup is None and done < max(map(default_warmup, lengths)):
        return "--warmup, by default a tenth of the steps,"
    return loss.follows_length


def resume(
    engine: DeepSpeedEngine,
    loss: RunLoss,
    identity: dict[str, Any],
    *,
    arguments: TrainArguments,
    checkpoints: Path,
) -> tuple[int, int]:
    """Load the checkpoint that --resume means, if there is one, on every rank.

    Args:
        engine: parameters and optimizer state go there.
        loss: its own state goes there.
        identity: `describe_run` of this run.
        arguments: --resume is "auto", a path, or None.
        checkpoints: this run's checkpoints folder, where "auto" looks.

    Returns:
        optimizer steps already taken and samples already consumed; zeros when there is nothing to go on with.

    Raises:
        CheckpointError, DataError: on every rank: no such checkpoint, damaged, or of another run.
    """
    wanted = arguments.resume
    error: Exception | None = None
    found: tuple[Path, str] | None = None
    state: dict[str, Any] = {}
    try:
        if wanted == "auto":
            tag = store.find_latest(checkpoints)
            found = (checkpoints, tag) if tag else None
        elif wanted is not None:
            found = store.locate(Path(wanted))
        if found is not None:
            state = store.read_state(*found)
            _check_continues(state, identity)
            _check_length(state, identity, arguments, loss)
    except MegaclipError as problem:
        error = problem
    raise_together(error)
    _check_all_found(found)
    if found is None:
        return 0, 0
    if _divided_alike(state, identity):
        store.load(engine, *found)
    else:
        was, now = ("{world_size} ranks at ZeRO-{zero_stage} in {precision}".format(**run) for run in (state, identity))
        logger.info("dividing a checkpoint of %s among %s", was, now)
        load_resharded(engine, found[0] / found[1])
    try:
        loss.load(store.read_loss_states(*found))
    except MegaclipError as problem:
        error = problem
    raise_together(error)
    logger.info("resumed from %s at step %d", found[0] / found[1], state["step"])
    return int(state["step"]), int(state["samples_consumed"])


def _divided_alike(state: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether the ranks' parts of parameters and optimizer states are those of the checkpoint."""
    return state["zero_stage"] == identity["zero_stage"] == 0 or all(state[key] == identity[key] for key in _DIVISION)


def _check_all_found(found: tuple[Path, str] | None) -> None:
    """Raise on every rank unless all of them mean the same step; where a folder is mounted may differ."""
    tags = [tag or "nothing" for tag in gather_objects(found and found[1])]
    if len(set(tags)) > 1:
        raise CheckpointError(
            f"ranks found different checkpoints ({', '.join(sorted(set(tags)))}): --logs must be one folder that all "
            "hosts share"
        )


def _check_continues(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise unless the checkpoint that holds `state` was written by the run that `identity` describes."""
    if missing := sorted(identity.keys() - state.keys()):
        raise CheckpointError(
            f"the checkpoint does not say its {', '.join(missing)}: an earlier version wrote it; export it with "
            "tools/export_open_clip.py and start from it with --pretrained"
        )
    check_manifest(state["data"], identity["data"])
    for key, now in json.loads(json.dumps(identity)).items():
        if key in ("data", "total_steps", *_DIVISION) or (was := state[key]) == now:
            continue
        if key == "global_batch":
            raise CheckpointError(
                f"the checkpoint was written with a contrastive batch of {was} and this run's is {now}: set "
                f"train_batch_size to {was}, and train_micro_batch_size_per_gpu or gradient_accumulation_steps to fit "
                f"{identity['world_size']} ranks"
            )
        raise CheckpointError(f"the checkpoint was written with {_first_difference(key, was, now)}")


def _check_length(state: dict[str, Any], identity: dict[str, Any], arguments: TrainArguments, loss: RunLoss) -> None:
    """Raise if this run is longer or shorter than the one that wrote `state`, and it matters."""
    was, now = state["total_steps"], identity["total_steps"]
    if was != now and (setting := _follows_length(arguments, loss, state["step"], was, now)):
        raise CheckpointError(
            f"the checkpoint is of a run of {was} steps in all and this one has {now}, but {setting} follows that: "
            f"give --train-steps {was} instead of --epochs; or, for more steps on a new schedule, export the "
            "checkpoint with tools/export_open_clip.py and start from it with --pretrained"
        )


def _first_difference(name: str, was: Any, now: Any) -> str:
    """Words for the first value in which `was` and `now` differ, however deep in dictionaries."""
    if isinstance(was, dict) and isinstance(now, dict):
        key = next(key for key in sorted({*was, *now}) if was.get(key) != now.get(key))
        return _first_difference(f"{name}.{key}", was.get(key), now.get(key))
    return f"{name} {was!r}, this run has {now!r}"
