"""Train with DeepSpeed, ZeRO-2: deepspeed --num_gpus 2 train_deepspeed.py, or torchrun --nproc_per_node 2"""

import deepspeed
import torch
import torch.distributed as dist
from encoders import GLOBAL_BATCH, Encoders, pairs
from torch.utils.data import DataLoader, DistributedSampler

from megaclip import ClipLoss, Encoded, GradientCache

deepspeed.init_distributed()
local_batch = GLOBAL_BATCH // dist.get_world_size()
model = Encoders()
config = {
    "train_micro_batch_size_per_gpu": local_batch,
    "gradient_accumulation_steps": 1,  # the chunks are not DeepSpeed's accumulation steps
    "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": torch.cuda.is_available()},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
dataset = pairs()
sampler = DistributedSampler(dataset, shuffle=False)
cache = GradientCache(ClipLoss(), engine)
dtype = next(engine.module.parameters()).dtype

for images, texts in DataLoader(dataset, batch_size=local_batch, sampler=sampler):
    images, texts = (part.to(engine.device, dtype) for part in (images, texts))
    loss = cache.step(
        Encoded(lambda chunk: engine(images=chunk), images, chunk=3),
        Encoded(lambda chunk: engine(texts=chunk), texts, chunk=4),
        logit_scale=Encoded(engine),
    )
    engine.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
