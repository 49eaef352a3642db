"""The caption loss of a model with a caption decoder: CoCa (arXiv:2205.01917)."""

from torch import Tensor

from megaclip.objectives.base import Chunk, Objective


class Caption(Objective):
    """Mean cross entropy of the captions' tokens, each predicted from the image and the tokens before it.

    The mean is over the tokens of the whole batch that are no padding, as in open_clip's `CoCaLoss`. The decoder is a
    part of the model, because open_clip's weights have it.
    """

    tokens = ("image", "text")

    def __init__(self, caption_weight: float = 2.0, contrastive_weight: float = 1.0) -> None:
        super().__init__()
        self.weights = {"contrastive": contrastive_weight, "caption": caption_weight}

    def changes_graphs(self) -> bool:
        """Return False: the decoder is part of the model, and planned."""
        return False

    def counts(self, tokens: Tensor, fields: dict[str, Tensor]) -> dict[str, int]:
        return {"caption": self.model.parts()["decoder"].label_count(tokens)}

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        decoder = self.model.parts()["decoder"]
        return {"caption": decoder(chunk.image_tokens, chunk.text_tokens, chunk.tokens, chunk.counts["caption"])}
