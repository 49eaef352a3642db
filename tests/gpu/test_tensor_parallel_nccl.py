"""Tensor parallelism over NCCL in bfloat16: replicas of several GPUs follow one GPU, and stay equal for 200 steps.

tests/distributed/test_tensor_parallel.py tests the arithmetic in float32 on gloo. These tests cover NCCL's ordering,
streams and bfloat16 layers.
"""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from megaclip.comm.collectives import gather_integers
from megaclip.comm.groups import group_rank, group_size
from megaclip.config import load_training_config, parse_arguments
from megaclip.data import ImageTransform
from megaclip.losses import ClipLoss
from megaclip.models import load_model_config
from megaclip.models.layers import split_dim
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from megaclip.zero.build import build_engine
from megaclip.zero.logit_scale import LogitScale
from megaclip.zero.optimizers import set_learning_rate, update
from tests.distributed.harness import run_ranks
from tests.distributed.memory_batch import MemoryBatch

pytestmark = pytest.mark.gpu

BATCH, CHUNKS = 64, 2


def train(size: int, stage: int, steps: int, model: str = "ViT-B-32") -> tuple[list[float], list[float], bool]:
    """Train on random pixels and tokens. Return losses, norms, and whether whole parameters are equal on all ranks."""
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": CHUNKS,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.98], "eps": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "megaclip": {"tensor_parallel_size": size, "coalesce_gradient_reduction": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(config))
        training = load_training_config(path)
    arguments = parse_arguments(["--deepspeed_config", "x", "--model", "x", "--train-data", "x"])
    model_config = load_model_config(model)
    engine = build_engine(training, arguments, model_config)
    side, text = model_config.vision_cfg.image_size, model_config.text_cfg
    scale, rank, ranks = LogitScale(engine, 100.0), group_rank(), group_size()
    feed = DeviceFeed(engine.device, torch.bfloat16, ImageTransform(side).normalise)
    losses, norms = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step % 10)  # ten batches that repeat, so that the loss can fall
        pixels = torch.randint(256, (BATCH, 3, side, side), generator=generator, dtype=torch.uint8)
        tokens = torch.randint(1, text.vocab_size, (BATCH, text.context_length), generator=generator)
        batch = MemoryBatch(pixels[rank::ranks].chunk(CHUNKS), tokens[rank::ranks], feed, text_chunks=CHUNKS)
        random_state = RandomState(0, step, rank // size)
        loss = accumulate_gradients(engine, ClipLoss(), batch, lambda: [scale.read()], random_state, coalesce=True)
        losses.append(loss.item())
        set_learning_rate(engine, 1e-4 * min(1.0, (step + 1) / 10))
        norms.append(update(engine))
        scale.clamp_()
    whole = [p.detach().flatten() for name, p in engine.module.named_parameters() if split_dim(name) is None]
    bits = torch.cat(whole).view(torch.int16).long()
    digest = [int(bits.sum()), int((bits * torch.arange(len(bits), device=bits.device)).sum())]
    equal = len(set(map(tuple, gather_integers(digest)))) == 1
    return losses, norms, equal


def gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"requires {count} CUDA devices, this machine has {torch.cuda.device_count()}")


@functools.cache
def of_one_gpu(stage: int) -> tuple[list[float], list[float]]:
    ((losses, norms, _),) = run_ranks(train, 1, 1, stage, 20, backend="nccl")
    return losses, norms


CASES = [(2, 2, 1), (2, 2, 2), (4, 2, 1), (4, 4, 1)]


@pytest.mark.parametrize(("ranks", "size", "stage"), CASES, ids=["{}_gpus_T{}_zero{}".format(*case) for case in CASES])
def test_replicas_of_several_gpus_follow_one_gpu(ranks: int, size: int, stage: int) -> None:
    gpus(ranks)
    expected, norms = of_one_gpu(stage)
    for losses, own_norms, equal in run_ranks(train, ranks, size, stage, 20, backend="nccl"):
        assert equal
        assert losses[0] == pytest.approx(expected[0], rel=2e-3)  # bfloat16 activations, summed in another order
        assert own_norms[0] == pytest.approx(norms[0], rel=2e-2)
        assert losses == pytest.approx(expected, rel=3e-2)


def test_replicas_stay_equal_bit_for_bit() -> None:
    """Parameters that every rank of a replica holds whole have the same bits after 200 steps."""
    gpus(2)
    results = run_ranks(train, 2, 2, 1, 200, backend="nccl")
    assert all(equal for _, _, equal in results)
    losses = results[0][0]
    assert losses[-1] < losses[0]
