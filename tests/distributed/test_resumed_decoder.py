"""A resumed run with --image-decoder auto decodes on the GPU on all ranks or on none."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import torch

from megaclip.data import GPU_DECODER, ImageTransform
from megaclip.engine import image_decoding, resume
from megaclip.engine.image_decoding import ImageDecoding
from megaclip.errors import ConfigError
from tests.distributed.harness import run_ranks


def decoders() -> list[str]:
    return [decoder(failing) for failing in range(3)]


def decoder(failing: int) -> str:
    """Return this rank's decoder after a checkpoint of a run on the GPU, if rank `failing` cannot use its GPU."""

    def opened(*_: Any) -> object:
        if dist.get_rank() == failing:
            raise ConfigError("--image-decoder gpu: this GPU decodes no JPEG files")
        return object()

    decoding = ImageDecoding("auto", torch.device("cpu"), ImageTransform(32, training=True))
    trainer: Any = SimpleNamespace(decoding=decoding, arguments=SimpleNamespace(image_decoder="auto"))
    with mock.patch.object(image_decoding, "open_gpu_decoder", opened):
        resume._follow_decoder(GPU_DECODER, trainer)
    return decoding.libraries


def test_a_rank_that_cannot_decode_on_its_gpu_decides_for_all() -> None:
    for first, second, without_failure in run_ranks(decoders, 2):
        assert GPU_DECODER not in (first, second) and without_failure == GPU_DECODER
