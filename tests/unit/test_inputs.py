"""What a run refuses before it opens any data: settings that fit their own file and not each other."""

import json
from pathlib import Path

import pytest

from megaclip.arguments import parse_arguments
from megaclip.engine.inputs import read_inputs
from megaclip.errors import ConfigError


def test_the_sigmoid_loss_needs_a_model_with_a_bias(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megaclip": {"loss": "siglip"},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    flags = ["--deepspeed_config", str(path), "--model", "demo-tiny", "--train-data", "nowhere"]
    with pytest.raises(ConfigError, match="needs a model with init_logit_bias"):
        read_inputs(parse_arguments(flags))
