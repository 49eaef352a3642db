"""A term of the whole batch: every image should be more similar to its text than `margin`.

megaclip train ... --set megaclip.objective=examples/objectives/margin.py:Margin
"""

from megaclip.objectives import Objective


class Margin(Objective):
    def __init__(self, margin: float = 0.3, weight: float = 1.0):
        super().__init__()
        self.margin = margin
        self.weights = {"margin": weight}

    def batch_terms(self, batch):
        similarities = (batch.image_features * batch.text_features).float().sum(dim=1)  # (b,), of this rank
        return {"margin": (self.margin - similarities).clamp(min=0).mean()}
