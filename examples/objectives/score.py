"""A module with parameters and an extra field: a linear layer predicts a stored score of each image.

    megaclip train ... --set megaclip.objective=examples/objectives/score.py:Score \
        --set 'megaclip.objective_settings={"key": "json.score"}'

Every sample has a number: in tar shards in its .json member ("json.score"), in tables in a column ("score").
"""

from torch import nn

from megaclip.objectives import Field, Objective


class Score(Objective):
    paired = True  # required for an objective with parameters

    def __init__(self, key: str = "json.score", weight: float = 1.0):
        super().__init__()
        self.fields = {"score": Field(key)}
        self.weights = {"score": weight}

    def build(self, model):
        self.head = nn.Linear(model.config.embed_dim, 1)

    def chunk_terms(self, chunk):
        predicted = self.head(chunk.image_features).squeeze(1).float()  # (m,)
        return {"score": (predicted - chunk.fields["score"]).square().sum()}
