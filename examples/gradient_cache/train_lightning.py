"""Train with Lightning: torchrun --nproc_per_node 2 train_lightning.py"""

import os

import lightning
import torch
from encoders import GLOBAL_BATCH, Encoders, pairs
from torch.utils.data import DataLoader, DistributedSampler

from megaclip import ClipLoss, Encoded, GradientCache


class CachedClip(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoders = Encoders()
        self.automatic_optimization = False  # the cache runs the backward passes
        self.cache = None

    def training_step(self, batch, batch_index):
        images, texts = batch
        self.cache = self.cache or GradientCache(ClipLoss(), self.trainer.strategy.model)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.cache.step(
            Encoded(lambda chunk: self.encoders(images=chunk), images, chunk=3),
            Encoded(lambda chunk: self.encoders(texts=chunk), texts, chunk=4),
            logit_scale=Encoded(self.encoders),
        )
        optimizer.step()
        if self.global_rank == 0:
            print(f"loss {loss.item():.6f}")

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
trainer.fit(CachedClip(), DataLoader(dataset, batch_size=GLOBAL_BATCH // ranks, sampler=sampler))
