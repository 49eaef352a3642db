"""Train with sentence-transformers (tested with 6.2): torchrun --nproc_per_node 2 train_sentence_transformers.py MODEL

MODEL: a name from the Hugging Face Hub or a folder. `CachedClipLoss` replaces CachedMultipleNegativesRankingLoss, in
both directions, with the texts of all ranks as negatives.
"""

import sys

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.nn.functional import normalize

from megaclip import ClipLoss, Encoded, GradientCache


class CachedClipLoss(torch.nn.Module):
    """A loss of sentence-transformers: pairs of texts, or pairs with columns of hard negatives, encoded in chunks.

    scale: factor of the similarities. mini_batch_size: number of texts in a chunk. The call leaves the gradients in the
    model's parameters, and the backward pass of the returned loss does nothing. So gradient_accumulation_steps must be
    1, fp16 is refused, and DeepSpeed cannot be used.
    """

    def __init__(self, model, scale=20.0, mini_batch_size=32):
        super().__init__()
        self.model, self.scale, self.mini_batch_size, self.cache = model, scale, mini_batch_size, None
        self.clip = ClipLoss()

    def loss(self, anchors, positives, *negatives):
        return self.clip(anchors, positives, self.scale, negatives=torch.cat(negatives) if negatives else None)

    def encode(self, features):
        return normalize(self.model(features)["sentence_embedding"], dim=-1)

    def forward(self, sentence_features, labels=None):
        tensors = [
            {name: value for name, value in each.items() if torch.is_tensor(value)} for each in sentence_features
        ]
        texts = [Encoded(self.encode, features, chunk=self.mini_batch_size) for features in tensors]
        if not torch.is_grad_enabled():  # an evaluation
            return self.loss(*(self.encode(each.inputs) for each in texts))
        self.cache = self.cache or GradientCache(self.loss, self.model)
        return self.cache.step(*texts).requires_grad_()

    def get_config_dict(self):
        return {"scale": self.scale, "mini_batch_size": self.mini_batch_size}


class PrintedLoss(SentenceTransformerTrainer):
    """Print the loss of every step."""

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        if self.is_world_process_zero():
            print(f"loss {loss.item():.6f}")
        return loss


if __name__ == "__main__":
    model = SentenceTransformer(sys.argv[1])
    questions = [f"What is the number after {number}?" for number in range(64)]
    answers = [f"It is {number + 1}." for number in range(64)]
    arguments = SentenceTransformerTrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=32,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    dataset = Dataset.from_dict({"anchor": questions, "positive": answers})
    PrintedLoss(model, arguments, train_dataset=dataset, loss=CachedClipLoss(model, mini_batch_size=8)).train()
