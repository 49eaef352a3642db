"""Workloads and machines for the planner's tests."""

import json
from pathlib import Path

from megaclip.config import load_training_config
from megaclip.models import ModelDescription, load_model_config
from megaclip.planner import Workload, describe

GIB, MIB = 2**30, 2**20
H200 = describe(gpu="h200", gpus=8)
FLAT = load_model_config("ViT-18B-14").replace(vision_cfg={"layers": 4}, text_cfg={"layers": 2})
"""Towers as wide as those of the largest models, 1.6 billion parameters, which are traced in a second."""


def workload(
    tmp_path: Path, ranks: int = 8, model: str | ModelDescription = "ViT-B-32", settings: dict | None = None, **changes
) -> Workload:
    """Return a bf16 ZeRO-2 workload with float32 accumulation and eight chunks of 512 on each rank.

    changes: settings of ds_config.json. The towers are plain PyTorch and no graphs are kept, as in the runs that were
    measured, unless `changes` sets megaclip.compile and megaclip.keep_graphs.
    """
    changes["megaclip"] = {"keep_graphs": 0, **changes.get("megaclip", {})}
    settings = settings or {
        "train_batch_size": 4096 * ranks,
        "train_micro_batch_size_per_gpu": 512,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 2},
        **changes,
    }
    settings = {**settings, "megaclip": {"compile": False, **settings.get("megaclip", {})}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    description = load_model_config(model) if isinstance(model, str) else model
    return Workload.of(description, load_training_config(path), ranks)


def of_batch(job: Workload, global_batch: int) -> Workload:
    """Return the workload with another contrastive batch, which is a multiple of the chunks."""
    return job.with_batch(global_batch // job.world_size)
