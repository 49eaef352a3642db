"""Train with Lightning: torchrun --nproc_per_node 2 train_lightning.py"""

import os

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler
from towers import GLOBAL_BATCH, Towers, pairs

from megaclip import ClipLoss


class LightningClip(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.towers = Towers()
        self.clip_loss = ClipLoss()

    def training_step(self, batch, batch_index):
        loss = self.clip_loss(*self.towers(*batch))
        if self.global_rank == 0:
            print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
dataset = pairs()
sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
trainer = lightning.Trainer(
    max_epochs=1,
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    strategy="ddp" if ranks > 1 else "auto",
    use_distributed_sampler=False,  # Lightning's own would shuffle
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LightningClip(), DataLoader(dataset, batch_size=GLOBAL_BATCH // ranks, sampler=sampler))
