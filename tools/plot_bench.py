"""Draw the results of tools/bench_loss.py: time and extra memory of every method, one pair of panels per size.

    python tools/plot_bench.py bench.json --out docs/figures/loss_one_gpu.png

Needs matplotlib.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"megaclip": "#12784a", "open_clip": "#7a8699", "Inf-CL": "#c0702a", "siglip-kernel": "#8a5aa8"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="what bench_loss.py --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg)")
    arguments = parser.parse_args()
    try:
        records = [json.loads(path.read_text()) for path in arguments.json]
        draw([result for record in records for result in record["results"]], records[0]["device"], arguments.out)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: cannot draw {', '.join(map(str, arguments.json))}: {error!r}", file=sys.stderr)
        return 1
    return 0


def draw(results: list[dict[str, Any]], device: str, out: Path) -> None:
    """One row per size: milliseconds on the left, extra MiB on the right, both on logarithmic axes."""
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


if __name__ == "__main__":
    sys.exit(main())
