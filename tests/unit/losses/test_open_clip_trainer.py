"""The one-line change of docs/losses.md: open_clip's real training loop computes the same updates with our losses."""

import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaclip.losses import ClipLoss, SigLipLoss
from megaclip.open_clip_package import import_open_clip
from tests.tolerances import TRAINER, assert_close

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"
MODEL: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 8, "layers": 1, "width": 32, "head_width": 16, "patch_size": 4},
    "text_cfg": {"context_length": 6, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1},
    "output_dict": True,
}


class Batches(list):
    """List with the attributes that open_clip's trainer reads from a data loader."""

    num_batches = property(len)
    num_samples = property(lambda self: sum(len(images) for images, _ in self))
    batch_size = property(lambda self: len(self[0][0]))


def trained(loss: torch.nn.Module, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters after open_clip's own `train_one_epoch` with this loss."""
    from open_clip_train.train import train_one_epoch

    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    batches = Batches(
        (torch.randn(6, 3, 8, 8, generator=generator), torch.randint(1, 32, (6, 6), generator=generator))
        for _ in range(2)
    )
    data = {"train": SimpleNamespace(dataloader=batches, set_epoch=lambda epoch: None)}
    arguments = SimpleNamespace(
        device="cpu",
        precision="fp32",
        distill=False,
        accum_freq=1,
        skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None,
        rank=0,
        local_rank=0,
        world_size=1,
        log_every_n_steps=1,
        batch_size=6,
        wandb=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_one_epoch(model, data, loss, 0, optimizer, None, None, None, arguments)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_open_clips_trainer_computes_the_same_updates_with_our_loss(kind: str) -> None:
    package = import_open_clip()
    torch.manual_seed(0)
    theirs, ours, bias = {
        "clip": (package.loss.ClipLoss(), ClipLoss(), None),
        "siglip": (package.loss.SigLipLoss(), SigLipLoss(), -2.0),
    }[kind]
    model = package.CLIP(**MODEL, init_logit_bias=bias)
    expected, got = trained(theirs, model), trained(ours, model)
    start = dict(model.named_parameters())
    for name, value in expected.items():
        size = max((value - start[name]).abs().max().item(), 1e-3 * value.abs().max().item())
        assert_close(got[name], value, TRAINER, name, size=size)
    assert (expected["logit_scale"] - start["logit_scale"]).abs() > 1e-5


def test_the_line_that_docs_replace_is_in_open_clips_trainer() -> None:
    trainer = importlib.util.find_spec("open_clip_train.main")
    assert trainer is not None and trainer.origin is not None
    lines = [line.strip() for line in PAGE.read_text().splitlines() if "# was:" in line]
    assert [line.split("#")[0].strip() for line in lines] == ["loss = ClipLoss()"]
    assert lines[0].split("# was:")[1].strip() in Path(trainer.origin).read_text()
