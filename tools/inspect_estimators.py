"""Compare the estimators of a FastCLIP run with the exact values: log u with log g over the whole dataset.

    python tools/inspect_estimators.py runs/NAME --train-data 'data/train/*.tar' [--batch 32] [--json FILE]

runs/NAME is a run whose loss has one temperature (sogclr, fastclip_v0, fastclip_v1, fastclip_v3). The command computes
all similarities, so the dataset should have a few thousand samples at most. For the model and temperature of the last
checkpoint (or --tag), it prints the error of the run's log u, and the error of log g of one random batch. A loss
without memory would use the latter.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaclip.checkpoint.search import locate, require_whole
from megaclip.checkpoint.store import read_loss_states
from megaclip.data import Batch, EvaluationLoader, open_pairs
from megaclip.engine.saved_model import SavedModel, load_saved_model
from megaclip.errors import CheckpointError, MegaclipError
from megaclip.evaluation import ModelEncoder


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        log_u, temperature, samples = read_state(arguments.run, arguments.tag)
        features = encode(load_saved_model(arguments.run, tag=arguments.tag), arguments.train_data, samples)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log_g = whole_log_g(*features, temperature)
    batch_log_g = one_batch_log_g(*features, temperature, arguments.batch)
    found: dict[str, Any] = {
        "samples": samples,
        "temperature": temperature,
        "seen": int((~log_u.isnan().any(dim=1)).sum()),
        "log_g": {"mean": float(log_g.mean()), "deviation": float(log_g.std())},
        "log_u_error": error_of(log_u, log_g),
        "batch_error": error_of(batch_log_g, log_g),
    }
    print(f"{samples} samples, {found['seen']} seen; temperature {temperature:.4f}")
    print(f"log g over the whole dataset: mean {log_g.mean():.2f}, standard deviation {log_g.std():.2f}")
    for name, key in (("log u of the run", "log_u_error"), (f"log g of a batch of {arguments.batch}", "batch_error")):
        print(f"{name:<24} " + ", ".join(f"{word} {value:.2f}" for word, value in found[key].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run (runs/NAME), its checkpoints folder, or one checkpoint")
    parser.add_argument("--tag", help="checkpoint of the run, such as step_00000100 (default: the latest)")
    parser.add_argument("--train-data", nargs="+", required=True, help="training data of the run")
    parser.add_argument("--batch", type=int, default=32, help="size of the random batch (default 32)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(argv)


def read_state(run: Path, tag: str | None) -> tuple[Tensor, float, int]:
    """Return log u (n, 2) float64 by sample, the temperature, and n. Raise CheckpointError for another kind of loss."""
    folder, tag = locate(run, tag)
    require_whole(folder, tag)
    log_u, temperature = torch.empty(0, 2), math.nan
    for part in read_loss_states(folder, tag):
        rows = part["samples"]
        if len(rows["columns"]) != 2 or rows["samples"] is None:
            raise CheckpointError(
                f"{run}: its loss is {part['variant']}; this tool requires one temperature and ids 0 to n-1"
            )
        if not len(log_u):
            log_u = torch.full((rows["samples"], 2), math.nan, dtype=torch.float64)
        log_u[rows["rank"] :: rows["world_size"]] = rows["values"].double()
        temperature = math.exp(-float(part["temperature"]["log_scale"]))
    if not len(log_u):
        raise CheckpointError(
            f"{run}: its loss keeps no state per sample; use a run with sogclr, fastclip_v0, _v1 or _v3"
        )
    return log_u, temperature, len(log_u)


def encode(saved: SavedModel, train_data: list[str], samples: int) -> tuple[Tensor, Tensor]:
    """Return the features (n, D) float64 of all images and all texts."""
    pairs = open_pairs(train_data)
    if len(pairs) != samples:
        raise CheckpointError(f"--train-data has {len(pairs)} samples, but the run was trained on {samples}")
    encoder = ModelEncoder(
        saved.model,
        saved.transform.normalise,
        device=torch.device("cpu"),
        cut_captions=saved.model.cut_captions,
    )
    found: list[tuple[Tensor, Tensor]] = []
    for batch in EvaluationLoader(pairs, saved.transform, saved.tokenizer, batch_size=64):
        assert isinstance(batch, Batch), "pairs have captions"
        images, texts = encoder(batch.images, batch.tokens)
        assert images is not None and texts is not None, "both were given"
        found.append((images.double(), texts.double()))
    return torch.cat([x for x, _ in found])[:samples], torch.cat([y for _, y in found])[:samples]


def whole_log_g(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return log g1 and log g2 (n, 2) as defined in `megaclip.losses.fastclip`, with the whole dataset as the batch."""
    s = x @ y.T
    positive = s.diagonal().clone()
    s.fill_diagonal_(-math.inf)
    rows = torch.logsumexp((s - positive[:, None]) / temperature, dim=1)
    columns = torch.logsumexp((s - positive[None, :]) / temperature, dim=0)
    return torch.stack([rows, columns], dim=1) - math.log(len(x) - 1)


def one_batch_log_g(x: Tensor, y: Tensor, temperature: float, batch: int) -> Tensor:
    """Return log g1 and log g2 (n, 2) within random batches. Samples of a last, smaller batch are NaN."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    log_g = torch.full((len(x), 2), math.nan, dtype=x.dtype)
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        log_g[chosen] = whole_log_g(x[chosen], y[chosen], temperature)
    return log_g


def error_of(estimate: Tensor, truth: Tensor) -> dict[str, Any]:
    """Return mean difference, root mean square difference and correlation over the samples that have an estimate."""
    known = ~estimate.isnan()
    difference = (estimate - truth)[known]
    pair = torch.stack([estimate[known], truth[known]])
    return {
        "bias": float(difference.mean()),
        "rms": float(difference.square().mean().sqrt()),
        "correlation": float(torch.corrcoef(pair)[0, 1]),
    }


if __name__ == "__main__":
    sys.exit(main())
