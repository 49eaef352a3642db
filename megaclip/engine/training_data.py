"""Open a run's training data, step by step, where the run's plan keeps the images of a step."""

import functools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.comm.groups import resolve
from megaclip.config import TrainArguments
from megaclip.data import TrainLoader, normalised_pixels
from megaclip.engine.inputs import Inputs
from megaclip.models.compilation import compiled_function
from megaclip.planner import MemoryPlan
from megaclip.step.batch import DeviceFeed
from megaclip.step.caption_chunks import division_of_captions
from megaclip.step.image_slots import WINDOW, ImageSlots
from megaclip.step.sample_store import StepStore


@contextmanager
def open_training_data(
    arguments: TrainArguments,
    inputs: Inputs,
    plan: MemoryPlan,
    engine: DeepSpeedEngine,
    *,
    folder: Path,
    samples_consumed: int,
) -> Iterator[StepStore]:
    """Open the run's training data, starting after `samples_consumed` samples. Every rank opens it.

    folder: the folder of a file of images, unless the command line names another one.

    Raises:
        ConfigError: on every rank, if the images' memory or file cannot be reserved.
        DataError: on every rank, if the batch is larger than the data, or a rank cannot start its data workers.
    """
    batch, place, transform = plan.workload.batch, plan.image_place, inputs.train_transform
    read_once = batch.accumulation - plan.workload.encoded_again[0]
    with raise_on_all_ranks():
        loader = TrainLoader(
            inputs.train,
            transform,
            inputs.tokenizer,
            micro_batch_size=batch.micro_batch,
            micro_batches_per_step=batch.accumulation,
            reread_from=batch.accumulation if place.keeps else read_once,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            seed=arguments.seed,
            num_workers=arguments.workers,
            samples_consumed=samples_consumed,
            shard_order=arguments.shard_order,
            max_bad_fraction=arguments.max_bad_fraction,
        )
    slots = ImageSlots(
        (
            batch.accumulation if place.keeps else min(WINDOW, loader.readings_per_step),
            batch.micro_batch,
            3,
            transform.size,
            transform.size,
        ),
        engine.device,
        Path(arguments.data_offload_dir or folder) if place.name == "disk" else None,
    )
    normalise = transform.normalise
    if plan.compiles:
        normalise = functools.partial(normalise, compute=compiled_function(normalised_pixels))
    text = inputs.model_config.text_cfg
    with (
        closing(slots),
        StepStore(
            loader,
            DeviceFeed(engine.device, engine.get_data_types()[0], normalise),
            slots.tensor,
            text_chunks=batch.text_chunks,
            context_length=text.context_length,
            divide_captions=division_of_captions(
                inputs.config.megaclip.cut_captions, text, tensor_ranks=engine.module.tensor.size, ranks=resolve()
            ),
        ) as store,
    ):
        yield store
