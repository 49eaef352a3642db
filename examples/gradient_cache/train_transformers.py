"""Train with Hugging Face's Trainer: torchrun --nproc_per_node 2 train_transformers.py"""

import torch
from encoders import GLOBAL_BATCH, Encoders, pairs
from transformers import Trainer, TrainingArguments

from megaclip import ClipLoss, Encoded, GradientCache


class CachedTrainer(Trainer):
    """A Trainer whose steps compute gradients in chunks."""

    cache = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        self.cache = self.cache or GradientCache(ClipLoss(), model, scaler=self.accelerator.scaler)
        with self.compute_loss_context_manager():  # autocast
            loss = self.cache.step(
                Encoded(lambda chunk: model(images=chunk), inputs["images"], chunk=3),
                Encoded(lambda chunk: model(texts=chunk), inputs["texts"], chunk=4),
                logit_scale=Encoded(model),
            )
        if self.is_deepspeed_enabled:
            model.step()  # the optimizer of Trainer does nothing then
        if self.is_world_process_zero():
            print(f"loss {loss.item():.6f}")
        return loss

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
CachedTrainer(Encoders(), arguments, train_dataset=pairs(), data_collator=collate).train()
