"""An image-image term, as in SLIP (arXiv:2112.12750): an image and its mirror image are a pair.

    megaclip train ... --set megaclip.objective=examples/objectives/mirrored.py:Mirrored

The image tower encodes the mirrored images of a chunk together with its images. `ClipLoss` contrasts them with the
images of all ranks.
"""

from megaclip import ClipLoss
from megaclip.objectives import Objective


class Mirrored(Objective):
    def __init__(self, weight: float = 0.5):
        super().__init__()
        self.weights = {"mirrored": weight}
        self.loss = ClipLoss()

    def more_images(self, images):
        return images.flip(-1)  # (m, 3, H, W)

    def chunk_features(self, chunk):
        return {} if chunk.images is None else {"mirrored": chunk.more_image_features}

    def batch_terms(self, batch):
        return {"mirrored": self.loss(batch.image_features, batch.features["mirrored"], batch.logit_scale)}
