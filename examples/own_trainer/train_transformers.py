"""Train with Hugging Face's Trainer: torchrun --nproc_per_node 2 train_transformers.py"""

import torch
from towers import GLOBAL_BATCH, Towers, pairs
from transformers import Trainer, TrainingArguments

from megaclip import ClipLoss


class ClipTrainer(Trainer):
    """A Trainer for models that return image features, text features and the logit scale."""

    clip_loss = ClipLoss()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = self.clip_loss(*outputs)
        if self.is_world_process_zero():
            print(f"loss {loss.item():.6f}")
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *arguments):
        return torch.utils.data.SequentialSampler(self.train_dataset)  # without this line: shuffled


def collate(samples):
    images, texts = zip(*samples, strict=True)
    return {"images": torch.stack(images), "texts": torch.stack(texts)}


arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=GLOBAL_BATCH,
    num_train_epochs=1,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    weight_decay=0.01,
    max_grad_norm=0,
    remove_unused_columns=False,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),  # else ranks on CPUs do not know each other
)
arguments.per_device_train_batch_size //= arguments.world_size
ClipTrainer(Towers(), arguments, train_dataset=pairs(), data_collator=collate).train()
