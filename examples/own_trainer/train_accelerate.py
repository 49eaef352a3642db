"""Train with Accelerate: accelerate launch --num_processes 2 train_accelerate.py, or torchrun as for DDP."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from towers import GLOBAL_BATCH, Towers, pairs

from megaclip import ClipLoss

accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else ranks on CPUs do not know each other
model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(pairs(), batch_size=GLOBAL_BATCH // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
clip_loss = ClipLoss()

for images, texts in loader:
    loss = clip_loss(*model(images, texts))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if accelerator.is_main_process:
        print(f"loss {loss.item():.6f}")
accelerator.end_training()
