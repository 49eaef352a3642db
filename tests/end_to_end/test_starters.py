"""Training without the deepspeed launcher, on one host: plain python and torchrun."""

import json
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.training_runs import DS_CONFIG, ROOT, flags, launcher_environment, scalars
from tests.tolerances import RUN, assert_close

# Without "--" torchrun on Python 3.10 and 3.11 refuses --logs, which it takes for its own --logs-specs.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--"]


def losses(start: list[str], tiny_run: Path, logs: Path) -> list[float]:
    """Start launch/train.py with a batch of 32 on any number of ranks; return the loss of each step."""
    config = {**DS_CONFIG, "zero_optimization": {"stage": 1}}
    del config["gradient_accumulation_steps"]  # it follows from the number of ranks
    logs.mkdir()
    (logs / "ds_config.json").write_text(json.dumps(config))
    command = [*start, str(ROOT / "launch/train.py"), *flags(tiny_run, logs / "ds_config.json", logs)]
    environment = {key: value for key, value in launcher_environment().items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=logs, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return [loss for _, loss in sorted(scalars(logs / "run")["train/loss"].items())]


def test_torchrun_has_the_losses_of_plain_python(tiny_run, tmp_path):
    one = losses([sys.executable], tiny_run, tmp_path / "python")
    two = losses(TORCHRUN, tiny_run, tmp_path / "torchrun")
    assert one[0] != one[1]
    assert_close(two, one, RUN["loss"])
