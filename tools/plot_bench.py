"""Draw the results of one or several runs of tools/bench_loss.py or tools/bench_train.py.

    python tools/plot_bench.py bench.json --out docs/figures/loss_one_gpu.png
    python tools/plot_bench.py train.json --out docs/figures/train_one_gpu.png

For losses it draws time and extra memory of every method, one pair of panels per size. For training steps it draws
samples per second and peak memory over the batch, one pair of panels per model. Requires matplotlib.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "megaclip": "#12784a",
    "open_clip": "#7a8699",
    "open_clip_compiled": "#3d4756",
    "open_clip_compiled_task": "#5b6b8c",
    "Inf-CL": "#c0702a",
    "siglip-kernel": "#8a5aa8",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="files that --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg)")
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: pip install matplotlib")
    try:
        records = [json.loads(path.read_text()) for path in arguments.json]
        results = [result for record in records for result in record["results"]]
        draw = draw_losses if "milliseconds" in results[0] else draw_training
        draw(results, records[0]["device"], arguments.out)
    except (OSError, ValueError, LookupError) as error:
        print(f"error: cannot draw {', '.join(map(str, arguments.json))}: {error!r}", file=sys.stderr)
        return 1
    return 0


def draw_losses(results: list[dict[str, Any]], device: str, out: Path) -> None:
    """Draw one row per size: milliseconds on the left, extra MiB on the right, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys((r["ranks"], r["batch"], r["embedding"]) for r in results))
    figure, axes = plt.subplots(len(sizes), 2, figsize=(10, 1.1 + 1.5 * len(sizes)), squeeze=False)
    for (ranks, batch, embedding), pair in zip(sizes, axes, strict=True):
        chosen = [r for r in results if (r["ranks"], r["batch"], r["embedding"]) == (ranks, batch, embedding)]
        names = [r["method"] for r in chosen][::-1]
        for axis, key, unit in ((pair[0], "milliseconds", "ms"), (pair[1], "extra_peak_mib", "MiB")):
            values = [r[key] for r in chosen][::-1]
            bars = axis.barh(names, values, color=[COLOURS.get(name.split()[0], "#444444") for name in names])
            axis.bar_label(bars, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3)
            axis.set_xscale("log")
            axis.set_xlim(min(values) / 2, max(values) * 4)
            axis.set_title(f"{unit}, B = {batch:,}, D = {embedding}, {ranks} GPU{'s' * (ranks > 1)}", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        pair[1].set_yticklabels([])
    figure.suptitle(f"Forward + backward time and extra peak memory, {device}, lower is better", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def draw_training(results: list[dict[str, Any]], device: str, out: Path) -> None:
    """Draw one row per model and number of GPUs: samples/s on the left, peak GiB on the right. Skip failed rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [r for r in results if r["steps"]]
    kinds = list(dict.fromkeys((r["model"], r["world_size"]) for r in measured))
    figure, axes = plt.subplots(len(kinds), 2, figsize=(10, 0.6 + 2.9 * len(kinds)), squeeze=False)
    for (model, ranks), pair in zip(kinds, axes, strict=True):
        rows = sorted(
            (r for r in measured if (r["model"], r["world_size"]) == (model, ranks)), key=lambda r: r["batch"]
        )
        for method in dict.fromkeys((r["method"], r["precision"]) for r in rows):
            chosen = [r for r in rows if (r["method"], r["precision"]) == method]
            batches = [r["batch"] for r in chosen]
            for axis, values in (
                (pair[0], [r["samples_per_s"] for r in chosen]),
                (pair[1], [r["peak_mib"] / 1024 for r in chosen]),
            ):
                style = "--" if method[1] == "amp_bf16" else "-"
                axis.plot(batches, values, style, marker="o", color=COLOURS[method[0]], label=" ".join(method))
        for axis, unit in ((pair[0], "samples/s"), (pair[1], "peak GiB per GPU")):
            axis.set_xscale("log", base=2)
            ticks = sorted({r["batch"] for r in rows})
            axis.set_xticks(ticks, [f"{batch:,}" for batch in ticks])
            axis.minorticks_off()
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.set_title(f"{unit}, {model}, {ranks} GPU{'s' * (ranks > 1)}", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        pair[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"Whole training steps against the contrastive batch, {device}", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
