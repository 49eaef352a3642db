"""Train with PyTorch's DDP: torchrun --nproc_per_node 2 train_ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from towers import GLOBAL_BATCH, Towers, pairs

from megaclip import ClipLoss

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = DistributedDataParallel(Towers().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset = pairs()
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
clip_loss = ClipLoss()

for images, texts in loader:
    loss = clip_loss(*model(images.to(device), texts.to(device)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
