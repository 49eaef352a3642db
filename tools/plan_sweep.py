"""Plan memory and time of a step over the batch, for this project and other codes, and draw both.

usage: python tools/plan_sweep.py --deepspeed_config ds_configs/zero1.json --model ViT-L-14 --out sweep.png [--json F]

The other flags are those of `megaclip plan`. It prints the largest batches that fit and requires matplotlib.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from peers import PEERS, peer_gpu_bytes, peer_step_seconds

from megaclip.checkpoint.output import prepare_file, writing
from megaclip.commands.plan import plan_parser
from megaclip.commands.planned_run import described_run
from megaclip.errors import ConfigError, MegaclipError
from megaclip.logging import format_bytes
from megaclip.models import ModelConfig
from megaclip.planner import Cluster, Workload, plan_memory, plan_time

_OWN = "MegaCLIP"
METHODS = (_OWN, *PEERS)
_COLOURS = dict(zip(METHODS, ("#12784a", "#7a8699", "#3d4756", "#c0702a"), strict=True))


def main() -> int:
    parser = plan_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, metavar="PICTURE.png", help="the picture to draw")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    try:
        return _sweep_and_draw(arguments)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _sweep_and_draw(arguments: argparse.Namespace) -> int:
    for path in (arguments.out, arguments.json):
        if path:
            prepare_file(path)
    workload, cluster = described_run(arguments)
    if not isinstance(workload.model, ModelConfig):
        raise ConfigError(
            f"--model {arguments.model} is run by open_clip's modules, and the formulas of other codes are for "
            "MegaCLIP's own towers; choose another model"
        )
    if not cluster.gpu_memory:
        raise ConfigError("the sweep compares the memory of GPUs, and this plan is for CPUs; name a GPU with --gpu")
    for name in ("lock_image", "lock_text"):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: the formulas of other codes are for training both towers; leave it out")
    rows = sweep(workload, cluster)
    for method in METHODS:
        largest = max((row["batch"] for row in rows if row["method"] == method and row["fits"]), default=0)
        print(f"{method:26} largest batch of these that fits: {largest:,}")
    title = f"{Path(arguments.model).stem} on {cluster.gpus} x {format_bytes(cluster.gpu_memory)}"
    if arguments.json:
        with writing(arguments.json):
            arguments.json.write_text(json.dumps({"title": title, "results": rows}, indent=1))
    with writing(arguments.out):
        draw(rows, title, cluster, str(arguments.out))
    print(f"wrote {arguments.out}")
    return 0


def sweep(workload: Workload, cluster: Cluster) -> list[dict[str, Any]]:
    """Plan every power of two of chunks, by each of `METHODS`, with the graphs that ds_config.json keeps.

    "auto" would fill the GPU at every batch. So it counts as 0, to show the memory that a batch needs.
    """
    if workload.megaclip.keep_graphs == "auto":
        workload = workload.with_megaclip(keep_graphs=0)
    rows: list[dict[str, Any]] = []
    chunk = workload.batch.micro_batch
    if workload.megaclip.text_micro_batch_size:  # otherwise text chunks follow the number of image chunks
        chunk = math.lcm(chunk, workload.batch.text_micro_batch)
    quantum = workload.world_size * chunk
    for power in range(25):
        batch = quantum * 2**power
        if batch > 2**26:
            break
        sized = workload.with_batch(batch // workload.world_size)
        whole = sized.with_megaclip(tensor_parallel_size=1)  # the peers have no tensor parallelism
        plan = plan_memory(sized, cluster)
        ours = {"method": _OWN, "gpu_bytes": plan.gpu_peak, "seconds": plan_time(sized, cluster).total}
        rows.append({"batch": batch, **ours, "fits": not plan.refusals})
        for method in PEERS:
            size = peer_gpu_bytes(whole, method)
            fits = size <= cluster.usable_gpu_memory
            seconds = peer_step_seconds(whole, cluster, method)
            rows.append({"batch": batch, "method": method, "gpu_bytes": size, "seconds": seconds, "fits": fits})
    return rows


def draw(rows: list[dict[str, Any]], title: str, cluster: Cluster, out: str) -> None:
    """Draw the rows of `sweep`: memory and time over the batch, one line per method. Requires matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the picture `out` cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("tools/plan_sweep.py requires matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, time) = plt.subplots(1, 2, figsize=(11, 4.2))
    for method, colour in _COLOURS.items():
        own = [row for row in rows if row["method"] == method]
        fitting = [row for row in own if row["fits"]]
        batches = [row["batch"] for row in own]
        memory.plot(batches, [row["gpu_bytes"] / 2**30 for row in own], color=colour, label=method)
        time.plot(
            [row["batch"] for row in fitting],
            [row["seconds"] for row in fitting],
            "o-",
            ms=3,
            color=colour,
            label=method,
        )
    memory.axhline(cluster.usable_gpu_memory / 2**30, color="#b03030", ls="--", lw=1, label="usable memory of a GPU")
    memory.set_ylabel("planned GiB per GPU")
    memory.set_ylim(1, 20 * max(1.0, cluster.usable_gpu_memory / 2**30))
    time.set_ylabel("planned seconds per step, if the run fits")
    for axis in (memory, time):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("contrastive batch")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{title}: planned by formulas, not measured", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
