"""The evaluations of a run, on all ranks together."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import deepspeed.comm as dist

from megaclip.config import TrainArguments
from megaclip.engine.inputs import Inputs
from megaclip.engine.metrics import Metrics
from megaclip.engine.trainer import Trainer
from megaclip.evaluation import (
    ModelEncoder,
    evaluate_datasets,
    example_pictures,
)


class Evaluations:
    """Evaluate the model, or with --eval-ema its moving average, on the data that the command line specifies."""

    def __init__(
        self,
        arguments: TrainArguments,
        inputs: Inputs,
        trainer: Trainer,
        watched: Callable[[Iterable[Any]], Iterable[Any]],
    ) -> None:
        """watched: returns an iterable over the same batches that reports each of them to the watchdog."""
        self._arguments = arguments
        self._inputs = inputs
        self._trainer = trainer
        self._watched = watched
        self.scores: dict[str, float] = {}
        """Scores of the last evaluation, by name."""

    @property
    def has_data(self) -> bool:
        """True if the command line specifies evaluation data."""
        return self._inputs.validation is not None or self._inputs.labelled is not None

    def run(self, metrics: Metrics) -> None:
        """Evaluate, set `scores`, and report them with example pictures to `metrics`."""
        inputs, trainer, arguments = self._inputs, self._trainer, self._arguments
        engine = trainer.engine
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
                    progress=lambda batches, name: self._watched(metrics.progress(batches, name)),
                )
        finally:
            engine.train()
        self.scores = result.metrics
        pictures = {}
        if dist.get_rank() == 0 and result.examples is not None and inputs.validation is not None:
            pictures = example_pictures(result.examples, inputs.validation)
        metrics.record_evaluation(trainer.step, self.scores, pictures, left_out, of_average=arguments.eval_ema)
