"""Print planned GPU peaks and steps beside the measured ones of tools/bench_train.py.

usage: python tools/plan_compare.py runs.json [...] [--gpu h200 | --rates rates.json] [--link 300GB]

The files are those of `tools/bench_train.py --json`. The exit status is 1 if a planned peak is more than a tenth off.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaclip.commands.plan import add_machine_flags
from megaclip.commands.planned_run import described_cluster
from megaclip.config import MegaclipSection, TrainingConfig
from megaclip.errors import ConfigError, MegaclipError, first_line
from megaclip.logging import format_bytes
from megaclip.models import load_model_config
from megaclip.planner import Cluster, Workload, plan_memory, plan_time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of tools/bench_train.py")
    add_machine_flags(parser)
    try:
        return compare(parser.parse_args())
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def compare(arguments: argparse.Namespace) -> int:
    """Print one line per row of the files; return 1 if a peak is more than a tenth off."""
    print(f"{'run':58}{'planned':>10}{'measured':>10}{'ratio':>7}{'plan s':>8}{'s':>8}{'ratio':>7}  peak")
    outside = 0
    for path in arguments.files:
        try:
            record = json.loads(path.read_text())
            rows = [row for row in record["results"] if row["method"] == "megaclip" and row["peak_mib"]]
            for row in rows:
                outside += _compare_row(row, described_cluster(arguments, gpus=row["world_size"]))
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(path)!r} was not written by tools/bench_train.py --json ({type(error).__name__}: "
                f"{first_line(error)}); give a file that it has written"
            ) from None
    print(f"{outside} peaks outside 10%")
    return 1 if outside else 0


def measured_workload(row: dict[str, Any]) -> Workload:
    """Return the workload of a row of tools/bench_train.py.

    Rows that lack a figure are from versions that did not keep graphs, cut captions or recompute, that compiled nothing
    by default, or whose DeepSpeed checked every gradient.
    """
    ds_config = row["ds_config"]
    section = {
        "text_micro_batch_size": row.get("text_micro_batch", ds_config["train_micro_batch_size_per_gpu"]),
        **ds_config.get("megaclip", {}),
        "keep_graphs": sum(row.get("kept_graphs", ())),
        "selective_recompute": row.get("selective_recompute", False),
    }
    config = TrainingConfig(path=Path("row"), deepspeed=ds_config, megaclip=MegaclipSection(**section))
    workload = Workload.of(load_model_config(row["model"], section.get("towers", "auto")), config, row["world_size"])
    workload = replace(workload, text_positions_saved=row.get("text_positions_saved", 0.0))
    return workload.with_megaclip(compile=row.get("compiled", False))


def _compare_row(row: dict[str, Any], cluster: Cluster) -> int:
    """Print one row; return 1 if its peak is more than a tenth off."""
    workload = measured_workload(row)
    cluster = replace(cluster, rates=replace(cluster.rates, decoded=math.inf))  # synthetic samples are not decoded
    plan, step = plan_memory(workload, cluster), plan_time(workload, cluster)
    measured = row["peak_mib"] * 2**20
    ratio = plan.gpu_peak / measured
    name = f"{Path(row['model']).stem} B={workload.batch.global_batch} W={row['world_size']} ZeRO-{workload.zero.stage}"
    name += f" {workload.batch.micro_batch}/{workload.batch.text_micro_batch}"
    name += " checkpointing" if workload.checkpointing else ""
    name += " offload" if workload.offloads_optimizer else ""
    name += f" tensor-parallel size {workload.tensor_ranks}" if workload.tensor_ranks > 1 else ""
    kept = sum(workload.kept)
    name += f" keep {kept}" if kept and not workload.one_chunk_each else ""
    name += " (first step)" if row.get("first_step", len(row.get("losses") or "..") == 1) else ""
    sizes = f"{format_bytes(plan.gpu_peak):>10}{format_bytes(measured):>10}{ratio:7.3f}"
    taken = row["step_s"] or float("nan")
    print(f"{name:58}{sizes}{step.total:8.1f}{taken:8.1f}{step.total / taken:7.2f}  {plan.peak_phase}")
    return int(not 0.9 <= ratio <= 1.1)


if __name__ == "__main__":
    sys.exit(main())
