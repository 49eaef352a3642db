"""Evaluate the model of a run, on all ranks together."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import deepspeed.comm as dist

from megaclip.engine.metrics import Metrics
from megaclip.engine.trainer import Trainer
from megaclip.evaluation import ModelEncoder, evaluate_datasets, example_pictures


def evaluate(trainer: Trainer, metrics: Metrics, watched: Callable[[Iterable[Any]], Iterable[Any]]) -> dict[str, float]:
    """Evaluate on the data that the command line specifies. Report the scores, and return them by name.

    With --eval-ema the moving average of the weights is evaluated.

    watched: returns an iterable over the same batches that reports each of them to the watchdog.
    """
    inputs, arguments, engine = trainer.inputs, trainer.arguments, trainer.engine
    encode = ModelEncoder(
        engine,
        inputs.evaluation_transform.normalise,
        device=engine.device,
        image_dtype=engine.get_data_types()[0],
        cut_captions=None if inputs.config.megaclip.cut_captions is False else engine.module.cut_captions,
    )
    engine.eval()
    try:
        with trainer.average.in_model() if arguments.eval_ema else nullcontext():
            result, left_out = evaluate_datasets(
                encode,
                pairs=inputs.validation,
                labelled=inputs.labelled,
                transform=inputs.evaluation_transform,
                tokenizer=inputs.tokenizer,
                batch_size=arguments.eval_batch_size,
                num_workers=arguments.workers,
                group_captions=arguments.group_captions,
                progress=lambda batches, name: watched(metrics.progress(batches, name)),
            )
    finally:
        engine.train()
    pictures = {}
    if dist.get_rank() == 0 and result.examples is not None and inputs.validation is not None:
        pictures = example_pictures(result.examples, inputs.validation)
    metrics.record_evaluation(trainer.step, result.metrics, pictures, left_out, of_average=arguments.eval_ema)
    return result.metrics
