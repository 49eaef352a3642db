"""The objective "distillation": a student learns the similarities, or the features, of one or several teachers.

Terms:

- distillation: KL divergence between the similarity rows of teacher and student over the whole batch, in both
  directions (`megaclip.losses.distillation`); the mean over the teachers.
- features: distance between the student's and the teacher's features of each sample, a term of chunks.

A teacher's features are stored with the samples, as in MobileCLIP's reinforced datasets (arXiv:2311.17049), or a frozen
model computes them without gradients: once per step, and with `feature_weight` again when a chunk is encoded again.

Shapes: m samples of a chunk, b samples of this rank in a step, D and E embedding of student and teacher.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from megaclip.checkpoint.manifest import require_whole
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_weights import pretrained_weights
from megaclip.data.fields import CROP
from megaclip.data.fields import Field as SampleField
from megaclip.errors import ConfigError
from megaclip.losses.distillation import DistillationLoss
from megaclip.models.build import build_model
from megaclip.models.text import is_cut_exact
from megaclip.models.weights import copy_weights
from megaclip.objectives.base import Chunk, Objective, WholeBatch

if TYPE_CHECKING:
    from megaclip.checkpoint.model_card import ModelCard
    from megaclip.data import ImageTransform, Tokenizer
    from megaclip.models import DualEncoder

TOWERS = ("image", "text")


class Teacher(BaseModel):
    """One teacher: its stored features, or a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    """Stored features of the image: a column, or a member of a tar shard ("npy", "npz.image_emb")."""

    text: str | None = None
    """Stored features of the caption."""

    dims: tuple[int, ...] = ()
    """Size of the stored features. Several sizes: features of several teachers, one behind the other."""

    logit_scale: float | None = Field(default=None, gt=0)
    """Factor of the teacher's similarities, 1 / temperature. Default for a model: that of its weights."""

    views: bool = False
    """The stored image features have a row for each augmented view, of which one is drawn per epoch."""

    captions: bool = False
    """The stored text features have a row for each caption."""

    model: str | None = None
    """Directory of a model: an export or import of MegaCLIP, an open_clip directory, or one of transformers."""

    @model_validator(mode="after")
    def _check(self) -> "Teacher":
        stored = self.image is not None and self.text is not None and self.logit_scale is not None
        if stored == (self.model is not None) or (stored and not (self.dims and min(self.dims) > 0)):
            raise ValueError("give image, text, dims and logit_scale of stored features, or model")
        return self

    def fields(self) -> dict[str, SampleField]:
        """Return the stored features by tower."""
        if self.image is None or self.text is None:
            return {}
        size = (sum(self.dims),)
        return {
            "image": SampleField(self.image, size, one_of="views" if self.views else ""),
            "text": SampleField(self.text, size, one_of="captions" if self.captions else ""),
        }


class TeacherModel:
    """A frozen model from a directory with a model card. It receives the student's images and tokens.

    Images are normalised and, if the models have images of different sizes, resized for the teacher. It is no part of
    the student: it has no optimizer states and is not saved. Every rank holds it whole.
    """

    def __init__(self, directory: Path, transform: "ImageTransform", pad_id: int) -> None:
        """transform: image preprocessing of the student. pad_id: padding of the tokens. Raises ConfigError,
        CheckpointError."""
        if not directory.is_dir():
            raise ConfigError(f"megaclip.objective_settings.teachers: {str(directory)!r} is not a directory of a model")
        self.card, self._pad_id = read_model_card(directory), pad_id
        teacher = self.card.pixel_settings
        pixels = (transform.mean, transform.std, teacher["mean"], teacher["std"])
        self._pixels = [torch.tensor(values).view(3, 1, 1) for values in pixels]
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
            return self._model(self._normalised(inputs))[0]
        text = self.card.config.text_cfg
        missing = 0 if is_cut_exact(text) else text.context_length - inputs.shape[1]
        return self._model(None, F.pad(inputs, (0, missing), value=self._pad_id))[1]

    def _normalised(self, images: Tensor) -> Tensor:
        """Return the student's images with the teacher's mean, deviation and size."""
        mean, std, own_mean, own_std = (values.to(images.device, images.dtype) for values in self._pixels)
        size = self.card.config.vision_cfg.image_size
        if size != images.shape[-1]:
            images = F.interpolate(images.float(), (size, size), mode="bicubic", antialias=True).to(images.dtype)
        return (images * std + mean - own_mean) / own_std


class Settings(BaseModel):
    """Settings of the objective."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    teachers: tuple[Teacher, ...] = Field(min_length=1)
    """Teachers. The term "distillation" is the mean over them."""

    weight: float = Field(default=1.0, ge=0)
    """Factor of the term "distillation"."""

    contrastive_weight: float = Field(default=1.0, ge=0)
    """Factor of the contrastive loss."""

    feature_weight: float = Field(default=0.0, ge=0)
    """Factor of the term "features". 0: there is no such term."""

    feature_loss: Literal["cosine", "mse"] = "cosine"
    """Distance of features: 1 - cosine, or the mean square of the difference of features of unit length."""

    project: bool = False
    """Map the student's features to the teacher's size by a trained linear layer before they are compared. Required if
    the sizes differ. Both towers then encode chunk by chunk together. It has no effect with `feature_weight` 0."""

    crop: str | None = None
    """Stored crop of each view, as shares of the image (left, top, width, height), which replaces the random crop."""


class Distillation(Objective):
    """Distillation from stored features and models. `Settings` documents its settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        chosen = self.settings = Settings.model_validate(settings)
        weights = {"distillation": chosen.weight, "features": chosen.feature_weight}
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.weights["contrastive"] = chosen.contrastive_weight
        self.paired, self.fields = chosen.project and chosen.feature_weight > 0, {}
        self._models: dict[int, TeacherModel] = {}
        for number, teacher in enumerate(chosen.teachers):
            self.fields |= {f"{tower}_{number}": field for tower, field in teacher.fields().items()}
        if chosen.crop is not None:
            self.fields[CROP] = SampleField(chosen.crop, (4,), one_of="views")
        self._loss = DistillationLoss()

    def prepare(self, transform: "ImageTransform", tokenizer: "Tokenizer") -> list["ModelCard"]:
        """Read the descriptions of the models."""
        for number, teacher in enumerate(self.settings.teachers):
            if teacher.model is not None:
                self._models[number] = TeacherModel(Path(teacher.model), transform, tokenizer.pad_id)
        return [model.card for model in self._models.values()]

    def build(self, model: "DualEncoder") -> None:
        """Load the models, and make the layers that map the student's features to the teachers' sizes."""
        for teacher in self._models.values():
            teacher.load()
        width = model.config.embed_dim
        for number in range(len(self.settings.teachers) if self.settings.feature_weight else 0):
            size = sum(self._dims(number))
            if self.settings.project:
                for tower in TOWERS:
                    self.add_module(f"{tower}_{number}", nn.Linear(width, size, bias=False))
            elif size != width:
                raise ConfigError(
                    f"megaclip.objective_settings.project: teacher {number} has features of size {size}, the model of "
                    f"size {width}; set it to true, or feature_weight to 0"
                )

    def changes_graphs(self) -> bool:
        """Return whether there are models or distances of features."""
        return bool(self._models) or self.settings.feature_weight > 0

    def _dims(self, number: int) -> tuple[int, ...]:
        teacher = self.settings.teachers[number]
        return teacher.dims or (self._models[number].embed_dim,)

    def chunk_features(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return the features of the models. Only feature distillation uses them when a chunk is encoded again."""
        if chunk.is_repeated and not self.settings.feature_weight:
            return {}
        inputs = {"image": (chunk.images, chunk.image_features), "text": (chunk.tokens, chunk.text_features)}
        return {
            f"{tower}_{number}": teacher.encode(tower, given, own.dtype)
            for number, teacher in self._models.items()
            for tower, (given, own) in inputs.items()
            if given is not None and own is not None
        }

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return the sum of the distances of features over the samples, the mean over towers and teachers."""
        if not self.settings.feature_weight:
            return {}
        targets, total = chunk.fields | chunk.features, torch.zeros(())
        for number in range(len(self.settings.teachers)):
            for tower, features in (("image", chunk.image_features), ("text", chunk.text_features)):
                if features is not None:
                    own = self.get_submodule(f"{tower}_{number}")(features) if self.settings.project else features
                    target = torch.cat(self._parts(targets[f"{tower}_{number}"], number), dim=1)
                    total = total.to(own.device) + self._distance(own, target).sum()
        return {"features": total / (2 * len(self.settings.teachers))}

    def _distance(self, own: Tensor, target: Tensor) -> Tensor:
        """Return the distance of each row of (m, E) features, (m,)."""
        own, target = _unit(own), _unit(target)
        return 1 - (own * target).sum(1) if self.settings.feature_loss == "cosine" else (own - target).square().mean(1)

    def _parts(self, features: Tensor, number: int) -> list[Tensor]:
        """Return the features of each teacher of (m, E) stored ones, of unit length."""
        return [_unit(part) for part in features.split(self._dims(number), dim=1)]

    def batch_terms(self, batch: WholeBatch) -> dict[str, Tensor]:
        """Return the term "distillation"."""
        student, losses = (batch.image_features, batch.text_features, batch.logit_scale), list[Tensor]()
        targets = batch.fields | batch.features
        for number, teacher in enumerate(self.settings.teachers if self.settings.weight else ()):
            scale = teacher.logit_scale or self._models[number].logit_scale
            parts = (self._parts(targets[f"{tower}_{number}"].detach(), number) for tower in TOWERS)
            losses += [self._loss(*student, image, text, scale) for image, text in zip(*parts, strict=True)]
        return {"distillation": torch.stack(losses).mean()} if losses else {}


def _unit(features: Tensor) -> Tensor:
    """Return features (m, E) of unit length, in float32 or higher precision."""
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)))
