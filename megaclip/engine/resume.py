"""Resume a run: find the checkpoint that `--resume` names, check that it belongs to this run, and load it."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist

from megaclip.checkpoint import search, store
from megaclip.checkpoint.adapters import BASE, LORA
from megaclip.checkpoint.manifest import find_damage_on_all_ranks, summary
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.comm.groups import group_rank
from megaclip.config import TrainArguments
from megaclip.data import GPU_DECODER, check_manifest
from megaclip.data.order import ORDER_VERSION
from megaclip.engine.inputs import Inputs
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength, default_warmup
from megaclip.engine.trainer import Trainer
from megaclip.errors import CheckpointError, ConfigError, MegaclipError, first_line
from megaclip.logging import format_count, get_logger
from megaclip.models import OpenClipConfig
from megaclip.models.descriptions import TOWERS_KEY
from megaclip.zero.parameter_groups import grouping
from megaclip.zero.reshard import load_checkpoint

logger = get_logger(__name__)

_PARTITIONING = ("world_size", "tensor_parallel_size", "zero_stage", "precision")
"""Keys of `describe_run` that may differ in a resumed run, because its checkpoint is converted."""
_BASE_FLAGS = {
    "whole": "pretrained",
    "image": "pretrained_image",
    "text": "pretrained_text",
    "kept_positions": "keep_text_positions",
}
"""Arguments of `pretrained_weights` and their flags."""


def describe_run(
    inputs: Inputs, arguments: TrainArguments, length: RunLength, base_sha256: str | None
) -> dict[str, Any]:
    """Return the properties of a run that every checkpoint stores, in JSON types.

    A resumed run must have the same properties, except those in `_PARTITIONING`, `BASE` and, in some cases,
    `total_steps`.

    base_sha256: checksum of the weights to which adapters were added, or None.
    """
    model = inputs.saved_config
    towers = {TOWERS_KEY: "open_clip"} if isinstance(model, OpenClipConfig) else {}  # of other parameters' names
    lora, base = inputs.config.megaclip.lora, {name: getattr(arguments, flag) for name, flag in _BASE_FLAGS.items()}
    return {
        "world_size": dist.get_world_size(),
        "tensor_parallel_size": inputs.config.megaclip.tensor_parallel_size,
        "zero_stage": inputs.config.zero_stage,
        "precision": "bf16" if inputs.config.bf16 else "float32",
        "locked": {
            "image": arguments.lock_image_unlocked_groups if arguments.lock_image else None,
            "text": arguments.lock_text_unlocked_layers if arguments.lock_text else None,
        },
        "objective": [name for name, _ in inputs.objective.named_parameters()] if inputs.objective else [],
        LORA: None if lora is None else lora.model_dump() | {"base_sha256": base_sha256},
        BASE: {name: str(Path(one).resolve()) if isinstance(one, str) else one for name, one in base.items()},
        "seed": arguments.seed,
        "shard_order": arguments.shard_order,
        "order_version": ORDER_VERSION,
        "global_batch": length.global_batch,
        "total_steps": length.total_steps,
        "optimizer": inputs.config.optimizer.type,
        "parameter_groups": grouping(inputs.config.megaclip),
        "model": model.to_open_clip() | towers,
        "tokenizer": inputs.tokenizer.identity,
        "preprocess": inputs.preprocess_cfg,
        "data": inputs.train.manifest(),
    }


def resume(trainer: Trainer, identity: dict[str, Any], checkpoints: Path) -> tuple[Path | None, str]:
    """Check every file of the checkpoint that --resume names, and load it into `trainer`, on every rank.

    Return the folder of the checkpoint, None if there is none to resume, and the identifier that the run's checkpoints
    record: that of the checkpoint, or a new one.

    identity: `describe_run` of this run. checkpoints: the folder of its checkpoints, where --resume auto searches.

    Raises:
        CheckpointError, DataError: the checkpoint is missing, damaged or of another run (raised on every rank).
    """
    arguments, loss = trainer.arguments, trainer.loss
    found = _find_checkpoint(arguments.resume, checkpoints)
    if found is None:
        return None, uuid.uuid4().hex
    folder, tag = found
    path, state = folder / tag, dict[str, Any]()
    with raise_on_all_ranks():
        try:
            state = store.read_state(folder, tag)
            _check_same_run(state, identity)
            _check_length(state, identity, arguments, loss)
        except MegaclipError:
            raise
        except OSError as error:  # on a host that does not see the whole checkpoint
            raise CheckpointError(
                f"cannot read {search.STATE} of {str(path)!r}: {first_line(error)}; copy the whole checkpoint to every "
                "host, or choose another one"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(path)!r} has a {search.STATE} that MegaCLIP did not write ({first_line(error)}); choose another "
                "checkpoint"
            ) from None
        run = _run_after(folder, tag, checkpoints, arguments.resume)
    _follow_decoder(state["image_decoder"], trainer)
    shape = " at ZeRO-{zero_stage} in {precision}, tensor-parallel size {tensor_parallel_size}"
    was, now = (format_count(one["world_size"], "rank") + shape.format(**one) for one in (state, identity))
    if was != now:
        logger.info("converting a checkpoint of %s to %s", was, now)
    load_checkpoint(trainer.engine, path)
    with raise_on_all_ranks():
        loss_states = store.read_loss_states(folder, tag)
        if loss.own is not None:
            loss.own.load_checkpoint_state(loss_states)
        elif next(iter(loss_states), None) is not None:
            raise CheckpointError(
                "the checkpoint holds per-sample state of a global contrastive loss; set megaclip.loss to that loss"
            )
    trainer.resumed(state["step"], state.get("log_scale_max", 0.0))
    logger.info("resumed from %s at step %d", path, state["step"])
    return path, run


def require_own_folder(folder: Path, wanted: str | None) -> None:
    """Raise ConfigError if the run's `folder` holds checkpoints that --resume does not continue.

    wanted: value of --resume.
    """
    checkpoints = folder / "checkpoints"
    if wanted == "auto" or not search.holds_checkpoints(checkpoints):
        return
    if wanted is None or search.locate(Path(wanted))[0].resolve() != checkpoints.resolve():
        raise ConfigError(
            f"{str(folder)!r} holds a run already; use --resume auto to resume it, or choose another --name"
        )


def _find_checkpoint(wanted: str | None, checkpoints: Path) -> tuple[Path, str] | None:
    """Return folder and name of the whole checkpoint that --resume names, or None to start at step 0."""
    if wanted is None:
        return None
    folder = checkpoints
    tags: list[str] = []
    with raise_on_all_ranks():
        if wanted == "auto":
            tags = search.candidates(checkpoints)
        else:
            folder, tag = search.locate(Path(wanted))
            tags = [tag]
    found = sorted({" ".join(names) or "nothing" for names in gather_objects(tags)})  # their paths may differ
    if len(found) > 1:
        raise CheckpointError(
            f"ranks found different checkpoints ({', '.join(found)}); set --logs to a folder that all hosts share"
        )
    if wanted != "auto":
        search.require_whole(folder, tags[0])
        return folder, tags[0]
    return _newest_whole(folder, tags)


def _newest_whole(folder: Path, tags: list[str]) -> tuple[Path, str] | None:
    """Return (`folder`, the first of `tags` that is whole), or None if there are no tags."""
    first_problem = ""
    for tag in tags:
        problems = find_damage_on_all_ranks(folder / tag)
        if not problems:
            return folder, tag
        first_problem = first_problem or f"{tag}: {summary(problems)}"
        if group_rank() == 0:
            logger.warning("checkpoint %s is damaged, trying the previous one: %s", folder / tag, summary(problems))
    if not tags:
        return None
    raise CheckpointError(
        f"{str(folder)!r} holds no whole checkpoint of this run up to the latest ({first_problem}); restore it from a "
        f"copy, give --resume the folder of another one ({search.how_to_list(folder)}), or choose "
        "another --name to start from the beginning"
    )


def _run_after(folder: Path, tag: str, checkpoints: Path, wanted: str | None) -> str:
    """Return the identifier of a run that resumes from checkpoint `tag`.

    The run keeps the checkpoint's identifier if it stays in its folder and the checkpoint is the latest, or the latest
    that is not damaged. Otherwise the identifier is new, and the run does not delete the checkpoints that exist.
    """
    same_folder, latest = folder.resolve() == checkpoints.resolve(), search.latest_tag(folder)
    own = search.run_of(folder, tag)
    if same_folder and own is not None:
        is_damaged = wanted == "auto" and (latest is None or search.run_of(folder, latest) == own)
        if latest == tag or is_damaged:
            return own
    if same_folder and group_rank() == 0:
        logger.warning("the checkpoints after %s are kept until you delete them", folder / tag)
    return uuid.uuid4().hex


def _check_same_run(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise unless the checkpoint with this `state` was written by the run with this `identity`."""
    if missing := sorted({*identity, "image_decoder"} - state.keys()):
        raise CheckpointError(
            f"the checkpoint does not record {', '.join(missing)}, because an earlier version of MegaCLIP wrote it; "
            "export it with `megaclip export` and start from the export with --pretrained"
        )
    for name in ("step", "total_steps"):
        if type(state.get(name)) is not int or state[name] < 0:
            raise CheckpointError(f"the checkpoint's {name} is {state.get(name)!r}; choose another checkpoint")
    check_manifest(state["data"], identity["data"])
    for key, now in json.loads(json.dumps(identity)).items():
        if key in ("data", "total_steps", BASE, *_PARTITIONING) or (was := state[key]) == now:
            continue
        if key == "global_batch":
            raise CheckpointError(
                f"the checkpoint was written with a contrastive batch of {was} and this run's is {now}; set "
                f"train_batch_size to {was}, and train_micro_batch_size_per_gpu or gradient_accumulation_steps to fit "
                f"{format_count(identity['world_size'], 'rank')}"
            )
        name, was, now = next(differences(was, now, key), (key, was, now))
        if name == f"{LORA}.base_sha256" and was and now:
            raise CheckpointError(
                f"the checkpoint's adapters were trained on weights with SHA-256 {was}, and those of --pretrained have "
                f"{now}; give the weights that the run started from"
            )
        raise CheckpointError(
            f"the checkpoint was written with {name} {was!r}, and this run has {now!r}; resume with the run's own "
            "settings, or start a new run from its weights with --pretrained"
        )


def _follow_decoder(was: str, trainer: Trainer) -> None:
    """Decode on the GPU if the checkpoint's run did and --image-decoder allows it; warn of another decoder."""
    if trainer.arguments.image_decoder == "auto" and was == GPU_DECODER:
        with contextlib.suppress(ConfigError):  # the warning names the decoder
            trainer.decoding.use_gpu()
    if was != (now := trainer.decoding.libraries) and group_rank() == 0:
        logger.warning(
            "the images before the checkpoint were decoded and resized by %s, and now by %s: their pixels differ "
            "slightly, so the losses are not equal to the bit to those of a run without a stop",
            was,
            now,
        )


def _check_length(state: dict[str, Any], identity: dict[str, Any], arguments: TrainArguments, loss: RunLoss) -> None:
    """Raise if the total number of steps has changed and the steps after the checkpoint depend on it."""
    was, now = state["total_steps"], identity["total_steps"]
    if was == now:
        return
    if arguments.lr_scheduler != "const":
        setting = f"--lr-scheduler {arguments.lr_scheduler}"
    elif arguments.warmup is None and state["step"] < max(default_warmup(was), default_warmup(now)):
        setting = "the default of --warmup"
    elif loss.length_dependent_setting:
        setting = loss.length_dependent_setting
    else:
        return
    raise CheckpointError(
        f"the checkpoint is of a run of {was} steps in all and this run has {now}, but {setting} depends on that "
        f"number; use --train-steps {was} instead of --epochs, or, for more steps on a new schedule, export the "
        "checkpoint with `megaclip export` and start from the export with --pretrained"
    )


def differences(was: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name and both values of all that differs, at any depth of dictionaries. Missing values are None."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differences(was.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif was != now:
        yield name, was, now
