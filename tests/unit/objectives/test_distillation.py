"""A frozen model as a teacher computes its own features from the student's images and tokens."""

import pytest
import torch

from megaclip.checkpoint.model_card import write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.data import ImageTransform
from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, build_model
from megaclip.objectives.base import Chunk
from megaclip.objectives.distillation import Distillation, TeacherModel

CONFIG = ModelConfig.from_dict(
    {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
    }
)
PIXELS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic", "resize_mode": "shortest"}


def test_a_teacher_sees_the_students_inputs_in_its_own_form(tmp_path):
    model = build_model(CONFIG).eval()
    write_weights(tmp_path, model.state_dict(), CONFIG)
    write_model_card(tmp_path, CONFIG, PIXELS)
    student = ImageTransform(16, mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7))
    teacher = TeacherModel(tmp_path, student, pad_id=0)
    teacher.load()
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 5, 63, 0], [1, 6, 7, 63], [1, 63, 0, 0]])  # cut at 4 of 8
    with torch.no_grad():
        images, texts, *_ = model(ImageTransform(16, **PIXELS).normalise(pixels), tokens)
    assert teacher.embed_dim == 16 and teacher.logit_scale == pytest.approx(model.logit_scale.exp().item())
    dtype = torch.float32
    torch.testing.assert_close(teacher.encode("image", student.normalise(pixels), dtype), images)
    torch.testing.assert_close(teacher.encode("text", tokens, dtype), texts)
    assert not teacher.encode("text", tokens, dtype).requires_grad
    larger = torch.zeros(2, 3, 32, 32)
    assert teacher.encode("image", larger, dtype).shape == (2, 16)
    chunk = Chunk({}, {}, is_repeated=False, tokens=tokens, text_features=texts.bfloat16())
    own = Distillation(teachers=[{"model": str(tmp_path)}], project=True)
    assert not own.encodes_pairs()  # no features are compared
    own._models = {0: teacher}
    assert own.chunk_features(chunk)["text_0"].dtype == torch.bfloat16  # also before the first images


def test_a_teacher_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"teachers: .*gone' is not a directory of a model"):
        TeacherModel(tmp_path / "gone", ImageTransform(16), pad_id=0)
