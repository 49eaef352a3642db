"""Train with Accelerate: accelerate launch --num_processes 2 train_accelerate.py, or torchrun --nproc_per_node 2"""

import torch
from accelerate import Accelerator
from encoders import GLOBAL_BATCH, Encoders, pairs
from torch.utils.data import DataLoader

from megaclip import ClipLoss, Encoded, GradientCache

accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else ranks on CPUs do not know each other
model = Encoders()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(pairs(), batch_size=GLOBAL_BATCH // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
cache = GradientCache(ClipLoss(), model, scaler=accelerator.scaler)  # the scaler of fp16, or None

for images, texts in loader:
    optimizer.zero_grad()
    loss = cache.step(  # in place of accelerator.backward
        Encoded(lambda chunk: model(images=chunk), images, chunk=3),
        Encoded(lambda chunk: model(texts=chunk), texts, chunk=4),
        logit_scale=Encoded(model),
    )
    optimizer.step()
    if accelerator.is_main_process:
        print(f"loss {loss.item():.6f}")
accelerator.end_training()
