"""An image-image term, as in SLIP (arXiv:2112.12750): an image and its mirror image are a pair.

    megaclip train ... --set megaclip.objective=examples/objectives/mirrored.py:Mirrored

The chunk's images are encoded a second time, mirrored. `ClipLoss` contrasts them with the images of all ranks.
"""

import torch.nn.functional as F

from megaclip import ClipLoss
from megaclip.objectives import Objective


class Mirrored(Objective):
    def __init__(self, weight: float = 0.5):
        super().__init__()
        self.weights = {"mirrored": weight}
        self.loss = ClipLoss()

    def chunk_features(self, chunk):
        if chunk.images is None:  # a chunk of captions
            return {}
        mirrored = self.model.visual(chunk.images.flip(-1))  # (m, D)
        return {"mirrored": F.normalize(mirrored.float(), dim=-1).to(mirrored.dtype)}

    def batch_terms(self, batch):
        return {"mirrored": self.loss(batch.image_features, batch.features["mirrored"], batch.logit_scale)}
