"""A ResNet and a RoBERTa of open_clip train on two ranks at ZeRO-3, resume, and export to open_clip."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megaclip.checkpoint.verify import TOLERANCE
from megaclip.checkpoint.weight_files import WEIGHTS_NAME
from megaclip.commands import export_open_clip
from megaclip.data.tokenizers import SentencePieceTokenizer
from megaclip.models.hugging_face import known_configurations
from megaclip.open_clip_package import import_open_clip
from tests.end_to_end.training_runs import flags, run_in_ranks
from tests.open_clip_families import HUGGING_FACE

STEPS, CHUNKS = 3, 2


def write_model(folder: Path, sentencepiece: Path) -> dict[str, Path]:
    """Write a model JSON, the text model's configuration and its tokenizer. Return the flags that name them."""
    tokenizer, text, description = (folder / name for name in ("tokenizer", "roberta", "model.json"))
    words = SentencePieceTokenizer(sentencepiece, 16)
    words.write_open_clip(tokenizer)
    text.mkdir()
    sizes = {"vocab_size": words.vocab_size, "max_position_embeddings": 32, "pad_token_id": words.pad_id}
    (text / "config.json").write_text(json.dumps(HUGGING_FACE["roberta"] | sizes))
    model = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64},
        "text_cfg": {
            "context_length": 16,
            "hf_model_name": str(text),
            "hf_tokenizer_name": str(tokenizer),
            "hf_proj_type": "mlp",
            "hf_pooler_type": "mean_pooler",
        },
    }
    description.write_text(json.dumps(model))
    return {"model": description, "tokenizer": tokenizer}


@pytest.mark.long
def test_train_resume_and_export(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    changes = write_model(tmp_path, tiny_run / "tokenizer.model")
    more = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16, "lr_scheduler": "const"}
    both = [
        flags(tiny_run, tiny_run / "zero3.json", tmp_path, **changes, **more, train_steps=steps, resume=resume)
        for steps, resume in ((2, None), (STEPS, "auto"))
    ]
    ends = [end for end, _ in run_in_ranks(both)]
    assert [end.exit_code for end in ends] == [0, 0], ends[0].output + ends[1].output
    assert "towers: open_clip's modules ModifiedResNet and HFTextEncoder" in ends[0].output
    assert "resumed from" in ends[1].output

    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "run"), str(exported), "--verify"])
    export_open_clip.main()
    shown = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("export_"))
    assert float(shown["export_max_abs_diff"]) <= TOLERANCE
    assert shown["export_captions_differing"].startswith("0 of ")

    package = import_open_clip()
    with known_configurations():
        loaded = package.create_model(f"local-dir:{exported}").state_dict()
    weights = load_file(exported / WEIGHTS_NAME)
    assert {name: (w.dtype, w.shape) for name, w in weights.items()} == {
        name: (w.dtype, w.shape) for name, w in loaded.items()
    }
    assert weights["visual.bn1.num_batches_tracked"] == STEPS * CHUNKS
    assert weights["visual.bn1.running_mean"].abs().max() > 0
