"""A frozen model that computes a teacher's features during training.

It is no part of the student: it has no optimizer states and is not saved. Every rank holds it whole.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_weights import pretrained_weights
from megaclip.errors import ConfigError
from megaclip.models.build import build_model
from megaclip.models.text import is_cut_exact
from megaclip.models.weights import copy_weights

if TYPE_CHECKING:
    from megaclip.data import ImageTransform


class TeacherModel:
    """A model from a directory with a model card. It receives the student's images and tokens.

    Images are normalised and, if the models have images of different sizes, resized for the teacher.
    """

    def __init__(self, directory: Path, transform: "ImageTransform", pad_id: int) -> None:
        """transform: image preprocessing of the student. pad_id: padding of the tokens. Raises ConfigError,
        CheckpointError."""
        if not directory.is_dir():
            raise ConfigError(f"megaclip.objective_settings.teachers: {str(directory)!r} is not a directory of a model")
        self.card, self._pad_id = read_model_card(directory), pad_id
        own, teacher = (
            (transform.mean, transform.std),
            (self.card.pixel_settings["mean"], self.card.pixel_settings["std"]),
        )
        self._pixels = [torch.tensor(values).view(3, 1, 1) for values in (*own, *teacher)]
        self.embed_dim = self.card.config.embed_dim

    def load(self) -> None:
        """Load the weights."""
        self._model = build_model(self.card.config).eval().requires_grad_(False)
        require_whole(self.card.directory)
        copy_weights(self._model, pretrained_weights(self._model, self.card.directory))
        self.logit_scale = self._model.logit_scale.exp().item()

    @torch.no_grad()
    def encode(self, tower: str, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return features (m, E) of unit length, computed in `dtype`.

        inputs: the student's images (m, 3, H, W) or tokens (m, L).
        """
        self._model.to(inputs.device, dtype)
        if tower == "image":
            features = self._model(self._normalised(inputs))[0]
        else:
            text = self.card.config.text_cfg
            missing = 0 if is_cut_exact(text) else text.context_length - inputs.shape[1]
            features = self._model(None, F.pad(inputs, (0, missing), value=self._pad_id))[1]
        return features

    def _normalised(self, images: Tensor) -> Tensor:
        """Return the student's images with the teacher's mean, deviation and size."""
        mean, std, own_mean, own_std = (values.to(images.device, images.dtype) for values in self._pixels)
        size = self.card.config.vision_cfg.image_size
        if size != images.shape[-1]:
            images = F.interpolate(images.float(), (size, size), mode="bicubic", antialias=True).to(images.dtype)
        return (images * std + mean - own_mean) / own_std
