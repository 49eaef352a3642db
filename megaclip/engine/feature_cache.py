"""Encode the training images with a locked image tower once, before the first step (--feature-cache).

A cache is a folder in --feature-cache, whose name is a checksum of all that decides the features: the image tower, the
transform, the data. So another tower or other data have another cache. `cache.json` is written last, when the files of
all ranks are on disk. A folder without it, of a run that was killed, is written again.
"""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import PIL
import torch
from deepspeed import DeepSpeedEngine

from megaclip.comm.collectives import gather_objects, raise_on_all_ranks, sum_counts
from megaclip.config import TrainArguments
from megaclip.data import PADDING_ID, EvaluationBatch, EvaluationLoader
from megaclip.data.feature_cache import CachedFeatures
from megaclip.engine.inputs import Inputs
from megaclip.errors import ConfigError, os_errors_as
from megaclip.evaluation.encoder import in_step
from megaclip.files import sync_folder, write_atomically
from megaclip.logging import format_bytes, get_logger

logger = get_logger(__name__)

_FORMAT = 1
_COMPLETE = "cache.json"
_NOT_SHARED = "--feature-cache {}: this host does not see the other hosts' files; use a folder that all hosts share"


def cached_features(engine: DeepSpeedEngine, inputs: Inputs, arguments: TrainArguments) -> CachedFeatures:
    """Return the features of all training images, after encoding them if the cache does not have them.

    Every rank calls it.

    Raises:
        ConfigError: on every rank, if the folder is not shared by all hosts, cannot be written or has no space, or if
            another run is writing the same cache.
        DataError: on every rank, if too many images are bad.
    """
    dtype = engine.get_data_types()[0]
    width = inputs.model_config.embed_dim * dtype.itemsize
    model = inputs.model_config
    identity = {
        "format": _FORMAT,
        "model": repr([model.embed_dim, model.quick_gelu, model.vision_cfg]),
        "tower": _checksum(engine.module.visual),
        "dtype": str(dtype),
        "device": engine.device.type,
        "transform": dataclasses.asdict(inputs.train_transform),
        "decoder": f"Pillow {PIL.__version__}",
        "keys": [arguments.image_key, arguments.caption_key, arguments.image_root],
        "data": inputs.train.manifest(),
        "changed": inputs.train.image_times() if dist.get_rank() == 0 else "",
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(gather_objects(str(Path(arguments.feature_cache or ".") / name))[0])
    new = CachedFeatures(folder, len(inputs.train), dist.get_world_size(), width)
    found = gather_objects(_complete(folder, new))[0]
    if found is None:
        _write(engine, inputs, arguments, new, identity)
        found = new
    with raise_on_all_ranks():
        if not found.is_whole():
            raise ConfigError(_NOT_SHARED.format(folder.parent))
    logger.info("features of %s images are read from %s", f"{found.samples:,}", folder)
    return found


def _complete(folder: Path, new: CachedFeatures) -> CachedFeatures | None:
    """Return the cache in a folder, or None if it is not complete."""
    try:
        ranks = int(json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = dataclasses.replace(new, ranks=ranks)
    return found if found.is_whole() else None


def _write(
    engine: DeepSpeedEngine,
    inputs: Inputs,
    arguments: TrainArguments,
    cache: CachedFeatures,
    identity: dict[str, Any],
) -> None:
    """Encode all images, each rank every W-th, and write them."""
    rank, folder, began = dist.get_rank(), cache.folder, time.monotonic()
    lock, token = None, gather_objects(uuid.uuid4().hex)[0]
    with _disk_errors(folder):
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("a+")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _complete(folder, cache) is not None:  # meanwhile
                raise BlockingIOError
            write_atomically(folder / "writer", token)
            (folder / _COMPLETE).unlink(missing_ok=True)
            for old in folder.glob("rank*.bin"):
                old.unlink()
            if (free := shutil.disk_usage(folder).free) < cache.size:
                raise ConfigError(
                    f"--feature-cache {str(folder.parent)!r} has {format_bytes(free)} free, and the features need "
                    f"{format_bytes(cache.size)}; free space there, or use another folder"
                )
    with _disk_errors(folder):
        seen = (folder / "writer").read_text() if (folder / "writer").exists() else ""
        if seen != token:
            raise ConfigError(_NOT_SHARED.format(folder.parent))
        # Without a buffer, because closing a file writes its buffer, and the other ranks would not know of an error.
        file = cache.path(rank).open("wb", buffering=0)
    text = "--feature-cache: encoding %s images once, %d bytes each, %s in %s"
    logger.info(text, f"{cache.samples:,}", cache.width + 1, format_bytes(cache.size), folder)
    loader = EvaluationLoader(
        inputs.train,
        inputs.train_transform,
        inputs.tokenizer,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        rank=rank,
        world_size=cache.ranks,
        num_workers=arguments.workers,
        max_bad_fraction=arguments.max_bad_fraction,
    )
    left = cache.rows(rank)
    engine.eval()
    try:
        with torch.no_grad(), file:
            for batch in in_step(loader):
                assert isinstance(batch, EvaluationBatch)
                images = batch.images.to(engine.device)
                features = engine(inputs.train_transform.normalise(images, engine.get_data_types()[0]), None)[0]
                usable = (batch.ids != PADDING_ID).to(torch.uint8)[:, None]
                rows = torch.cat([features.cpu().contiguous().view(torch.uint8), usable], dim=1)[:left]
                left -= len(rows)
                with _disk_errors(folder):
                    content = rows.numpy().tobytes()
                    if file.write(content) != len(content):  # the disk has no space for the rest
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with _disk_errors(folder):
                os.fsync(file.fileno())
                sync_folder(folder)
    finally:
        engine.train()
    with _disk_errors(folder):  # all ranks wait for the file
        if lock is not None:
            write_atomically(folder / _COMPLETE, json.dumps({"ranks": cache.ranks} | identity, indent=1))
            lock.close()
    bad = sum_counts(loader.bad_counts)
    kinds = ", ".join(f"{count} {kind}" for kind, count in bad.items()) or "none"
    logger.info("--feature-cache: encoded in %.0f s; bad samples: %s", time.monotonic() - began, kinds)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise an OSError of any rank as one ConfigError on every rank."""
    problem = f"--feature-cache {str(folder.parent)!r} cannot be written"
    with raise_on_all_ranks(), os_errors_as(ConfigError, problem, "free space there, or use another folder"):
        try:
            yield
        except BlockingIOError:
            raise ConfigError(f"another run is writing {str(folder)!r}; start this run again after it") from None


def _checksum(tower: torch.nn.Module) -> str:
    """Return a checksum of all weights of a tower, which may be partitioned by ZeRO-3. Every rank calls it."""
    digest = hashlib.sha256()
    for name, weight in [*tower.named_parameters(), *tower.named_buffers()]:
        with deepspeed.zero.GatheredParameters(weight):
            content = weight.detach().cpu().contiguous()
            digest.update(f"{name} {content.dtype} {tuple(content.shape)}".encode())
            digest.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
