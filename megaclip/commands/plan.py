"""Plan a run before it starts: memory by part, largest batch that fits, and step time with its longest term.

    megaclip plan --deepspeed_config ds_configs/zero3.json --model ViT-L-14 --gpu h200 --gpus 8 --hosts 4
    megaclip plan ... --here                                 # this machine, with its free memory
    megaclip plan ... --batch 1048576 --micro-batch 256      # with another batch size
    megaclip plan ... --gpu-memory 80GiB --host-memory 900GiB --disk 2TB --link 200GB --network 25GB
    megaclip plan --calibrate rates.json                     # measure this machine; then --rates rates.json
    megaclip plan ... --sweep sweep.png --json sweep.json    # batch against memory and time, and the peers
    megaclip plan --compare measured.json --gpu h200         # planned against measured

It needs no GPU and starts nothing; only --calibrate uses the GPUs of this machine. --sweep needs matplotlib.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch

from megaclip.checkpoint.output import prepare_file, writing
from megaclip.config import MegaclipSection, TrainArguments, TrainingConfig, load_training_config
from megaclip.config.argument_types import integer
from megaclip.config.checks import check_ds_config
from megaclip.config.command_line import DEFAULT_WORKERS
from megaclip.errors import ConfigError, MegaclipError, first_line
from megaclip.logging import format_bytes
from megaclip.models import ModelConfig, load_model_config
from megaclip.planner import (
    Cluster,
    Rates,
    Workload,
    advice,
    advice_beyond_settings,
    describe,
    largest_batch,
    plan_memory,
    plan_time,
    tensor_parallel_verdict,
    zero_stage_verdict,
)
from megaclip.planner.cluster import GPUS, gpu_preset, parse_size, rates_json
from megaclip.planner.compilation import check_recomputation, compile_estimate
from megaclip.planner.peers import inf_cl_loss_bytes, open_clip_loss_bytes
from megaclip.planner.phases import loss_sizes
from megaclip.planner.report import graphs_text, loss_table, memory_table, time_table
from megaclip.planner.sweep import METHODS, draw, sweep
from megaclip.planner.tensor_parallel import fastest_without
from megaclip.planner.workload import EvaluationSets, nvme_paths
from megaclip.step.layout import cuts_captions

_USED_WITH = {
    "calibrate": {"model", "micro_batch"},
    "compare": {"gpu", "gpu_memory", "host_memory", "disk", "link", "network", "rates"},
}
"""Flags that outputs other than a plan use."""


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        if arguments.json and not arguments.sweep:
            raise ConfigError("--json has no effect without --sweep; add --sweep PICTURE.png, or leave --json out")
        for other, used in _USED_WITH.items():
            if getattr(arguments, other):
                _refuse_unused(parser, arguments, other, used)
        for path in (arguments.calibrate, arguments.sweep, arguments.json):
            if path:
                prepare_file(Path(path))
        if arguments.calibrate:
            return _calibrate(arguments)
        if arguments.compare:
            return _compare(arguments)
        if not (arguments.deepspeed_config and arguments.model):
            raise ConfigError("--deepspeed_config or --model is missing; give both, or --calibrate, or --compare")
        cluster = _cluster(arguments)
        workload = _workload(arguments, cluster)
        if workload.sample_columns and not workload.samples:
            raise ConfigError(
                f"megaclip.loss {workload.megaclip.loss!r} keeps state of every sample; give --train-num-samples, "
                "the size of the dataset"
            )
        compiles = compile_estimate(workload, cluster).pays
        check_recomputation(workload.megaclip.selective_recompute, compiles=compiles)
        return _sweep(arguments, workload, cluster) if arguments.sweep else _plan(workload, cluster)
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("run")
    what.add_argument("--deepspeed_config", "--deepspeed-config", help="ds_config.json")
    what.add_argument("--model", help="as in training: a name, the path of a model JSON, or a directory")
    what.add_argument("--batch", type=integer(1), help="contrastive batch, instead of train_batch_size")
    what.add_argument("--micro-batch", type=integer(1), help="instead of train_micro_batch_size_per_gpu")
    what.add_argument("--tensor-parallel", type=integer(1), help="instead of megaclip.tensor_parallel_size")
    what.add_argument(
        "--workers", type=integer(0), default=DEFAULT_WORKERS, help="loader processes per rank (default %(default)s)"
    )
    what.add_argument(
        "--train-num-samples", type=integer(0), default=0, help="samples of the dataset, for the FastCLIP losses' state"
    )
    what.add_argument(
        "--text-positions-saved",
        type=float,
        metavar="SHARE",
        help="share of token positions saved by cutting captions, as a run logs it (default: times of captions of 8 to "
        "77 tokens, memory for captions of full length, docs/planning.md)",
    )
    what.add_argument(
        "--train-steps", type=integer(1), help='steps of the run, for megaclip.compile "auto" (default: many)'
    )
    what.add_argument(
        "--val-num-samples", type=integer(0), default=0, help="number of image-caption pairs of the evaluation"
    )
    what.add_argument("--async-save", action="store_true", help="checkpoints are written from a copy in host memory")
    what.add_argument(
        "--lock-image", type=integer(0), nargs="?", const=0, help="freeze the image tower except its last N groups"
    )
    what.add_argument(
        "--lock-text", type=integer(0), nargs="?", const=0, help="freeze the text tower except its last N layers"
    )
    where = parser.add_argument_group("machines")
    where.add_argument("--here", action="store_true", help="this machine: its GPUs, and the memory that is free now")
    where.add_argument("--gpu", help=f"{', '.join(GPUS)} (default h200)")
    where.add_argument(
        "--gpus", type=integer(1), help="GPUs per host (default 8; with --here all of them, one rank on a CPU)"
    )
    where.add_argument("--hosts", type=integer(1), default=1, help="hosts, all alike (default 1)")
    where.add_argument("--gpu-memory", help="memory of one GPU, for example 80GiB")
    where.add_argument("--host-memory", help="free memory of one host (default 1000GiB)")
    where.add_argument("--disk", help="free disk of one host (default 4TB)")
    where.add_argument("--link", help="bytes per second that one GPU sends inside a host, for example 300GB")
    where.add_argument("--network", help="bytes per second that one GPU sends to other hosts")
    where.add_argument("--rates", help="file that --calibrate has written on such a machine")
    other = parser.add_argument_group("other output than the tables")
    other.add_argument(
        "--calibrate", metavar="RATES.json", help=("measure this machine's rates and write them to this file")
    )
    other.add_argument(
        "--sweep", metavar="PICTURE.png", help="draw memory and time over the batch, for MegaCLIP and other codes"
    )
    other.add_argument("--json", type=Path, help="with --sweep: write the figures too")
    other.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        help="JSON of tools/bench_train.py: planned beside measured, on one host of the GPUs of --gpu or --rates",
    )
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def _refuse_unused(parser: argparse.ArgumentParser, arguments: argparse.Namespace, other: str, used: set[str]) -> None:
    """Raise ConfigError if a flag was given that has no effect with --`other`."""
    for name, value in vars(arguments).items():
        if value != parser.get_default(name) and name not in {other, "local_rank", *used}:
            flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in sorted(used))
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --{other}, which uses {flags}; leave it out"
            )


def _cluster(arguments: argparse.Namespace) -> Cluster:
    if arguments.here:
        return _clusters_like_this(arguments)
    counts = {"hosts": arguments.hosts} | ({} if arguments.gpus is None else {"gpus": arguments.gpus})
    return _described(arguments, **counts)


def _described(arguments: argparse.Namespace, **counts: Any) -> Cluster:
    """Return the cluster that the flags describe, with these numbers of GPUs and hosts."""
    names = ("gpu", "gpu_memory", "host_memory", "disk", "link", "network")
    described = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    rates = Rates.read(arguments.rates, gpu_preset(arguments.gpu or "h200")[1]) if arguments.rates else None
    return describe(rates=rates, **described, **counts)


def _clusters_like_this(arguments: argparse.Namespace) -> Cluster:
    """Return hosts like this machine, with the memory that is free on it now."""
    from megaclip.engine.this_machine import this_machine

    if measured := [name for name in ("gpu", "gpu_memory", "host_memory", "disk") if getattr(arguments, name)]:
        raise ConfigError(f"--{measured[0].replace('_', '-')} describes another machine; remove it or --here")
    here = torch.cuda.device_count()
    if here and (arguments.gpus or 0) > here:
        raise ConfigError(f"--gpus {arguments.gpus}: this machine has {here}; use --gpu instead of --here for another")
    nvme = nvme_paths(load_training_config(arguments.deepspeed_config).zero)
    cluster = this_machine(arguments.gpus or max(1, here), Path.cwd(), nvme)
    rates = Rates.read(arguments.rates, cluster.rates) if arguments.rates else cluster.rates
    links = ("link", "network")
    given = {name: parse_size(value, f"--{name}") for name in links if (value := getattr(arguments, name)) is not None}
    return replace(cluster, hosts=arguments.hosts, rates=replace(rates, **given))


def _workload(arguments: argparse.Namespace, cluster: Cluster) -> Workload:
    config = load_training_config(arguments.deepspeed_config)
    if arguments.tensor_parallel is not None:
        config = _with_tensor_parallel(config, arguments.tensor_parallel)
    if arguments.batch or arguments.micro_batch:
        replicas = max(1, cluster.gpus // config.megaclip.tensor_parallel_size)
        config = _with_batch(config, arguments.batch, arguments.micro_batch, replicas)
    rows = TrainArguments.model_fields["eval_batch_size"].default
    evaluation = EvaluationSets(rows, pairs=arguments.val_num_samples) if arguments.val_num_samples else None
    workload = Workload.of(
        load_model_config(arguments.model, config.megaclip.towers),
        config,
        cluster.gpus,
        image_unlocked=arguments.lock_image,
        text_unlocked=arguments.lock_text,
        workers=arguments.workers,
        samples=arguments.train_num_samples,
        evaluation=evaluation,
        steps=arguments.train_steps,
        async_save=arguments.async_save,
    )
    saved = arguments.text_positions_saved
    if saved is not None and not 0 <= saved < 1:
        raise ConfigError(f"--text-positions-saved {saved} is not a share; use a number from 0 to less than 1")
    if saved is not None and not cuts_captions(workload.megaclip.cut_captions, workload.model.text_cfg):
        raise ConfigError(f"--text-positions-saved {saved} has no effect: this run cuts no captions; leave it out")
    return replace(workload, text_positions_saved=saved)


def _with_tensor_parallel(config: TrainingConfig, size: int) -> TrainingConfig:
    """Return the settings with another tensor-parallel size, checked again. Batch sizes stay those of a replica."""
    changed = dict(config.deepspeed, megaclip={**config.deepspeed.get("megaclip", {}), "tensor_parallel_size": size})
    return replace(config, deepspeed=changed, megaclip=check_ds_config(changed).megaclip)


def _with_batch(config: TrainingConfig, batch: int | None, micro_batch: int | None, replicas: int) -> TrainingConfig:
    """Return the settings with another batch size or micro-batch size; the number of chunks follows."""
    triple = {name: config.deepspeed.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")}
    accumulation = config.deepspeed.get("gradient_accumulation_steps")
    total = batch or triple["train_batch_size"]
    micro = micro_batch or triple["train_micro_batch_size_per_gpu"]
    if micro is None and triple["train_batch_size"] and accumulation:
        micro = max(1, triple["train_batch_size"] // (accumulation * replicas))
    changed = {key: value for key, value in config.deepspeed.items() if key != "gradient_accumulation_steps"}
    changed.update({"train_batch_size": total, "train_micro_batch_size_per_gpu": micro})
    if total is None:
        del changed["train_batch_size"]
        changed["gradient_accumulation_steps"] = accumulation or 1
    return replace(config, deepspeed=changed)


def _plan(workload: Workload, cluster: Cluster) -> int:
    plan, step, batch = plan_memory(workload, cluster), plan_time(workload, cluster), workload.batch
    whole, split = workload.with_megaclip(tensor_parallel_size=1).total, ""
    if workload.tensor_ranks > 1:
        split = f", {workload.total / 1e6:.1f} M on each of {workload.tensor_ranks} tensor-parallel ranks"
    known = workload.text_positions_saved is not None
    memory = "and for the memory of kept graphs" if known else "all of them for memory"
    print(
        f"batch {batch.global_batch:,} = {batch.world_size} ranks x {batch.local_batch:,}; chunks of "
        f"{batch.micro_batch} images and {batch.text_micro_batch} texts; {whole / 1e6:.1f} M "
        f"parameters{split}, ZeRO-{workload.zero.stage}\n"
        f"captions: {workload.text_positions:.1f} of {workload.model.text_cfg.context_length} token positions on "
        f"average for the step's time, {memory}\n"
    )
    sizes = loss_sizes(workload)
    peers = {"open_clip (local loss, bf16 autocast)": open_clip_loss_bytes(sizes), "Inf-CL": inf_cl_loss_bytes(sizes)}
    losses = loss_table(plan.workload, peers)
    print(memory_table(plan, cluster), graphs_text(plan.workload), losses, time_table(step, cluster), sep="\n\n")
    print(f"\nlargest batch that fits, all else the same: {_largest_batch(workload, cluster)}")
    verdict = tensor_parallel_verdict(workload, cluster)
    if not plan.refusals:
        print("this run fits")
        if verdict:
            print(verdict)
        elif workload.tensor_ranks > 1 and (best := fastest_without(workload, cluster)):
            print(f"without tensor parallelism: {best.settings} at {best.seconds:.3g} s per step")
        if faster := zero_stage_verdict(workload, cluster):
            print(faster)
        return 0
    print("this run DOES NOT FIT: " + "; ".join(plan.refusals))
    for change in advice(workload, cluster) or [advice_beyond_settings(workload)]:
        print(f"  it would with {change}")
    if verdict:
        print(verdict)
    return 2


def _largest_batch(workload: Workload, cluster: Cluster) -> str:
    """Return the largest batch, with the text chunk that it needs if that is not the default."""
    largest, chunk = largest_batch(workload, cluster), workload.batch.text_micro_batch
    if not largest or workload.with_batch(largest // workload.world_size).batch.text_micro_batch == chunk:
        return f"{largest:,}"
    return f'{largest:,}, with "megaclip": {{"text_micro_batch_size": {chunk * workload.tensor_ranks}}}'


def _sweep(arguments: argparse.Namespace, workload: Workload, cluster: Cluster) -> int:
    """Print the largest batches that fit; draw memory and time over the batch, for this project and the peers."""
    if not isinstance(workload.model, ModelConfig):
        raise ConfigError(
            f"--sweep compares with other codes by formulas for MegaCLIP's own towers, and open_clip's modules run "
            f"{arguments.model}; leave --sweep out"
        )
    if not cluster.gpu_memory:
        raise ConfigError("--sweep compares the memory of GPUs, and this plan is for CPUs; name a GPU with --gpu")
    if locked := [name for name in ("lock_image", "lock_text") if getattr(arguments, name) is not None]:
        raise ConfigError(
            "--sweep compares with other codes by formulas for training both towers; leave "
            f"--{locked[0].replace('_', '-')} or --sweep out"
        )
    rows = sweep(workload, cluster)
    for method in METHODS:
        largest = max((row["batch"] for row in rows if row["method"] == method and row["fits"]), default=0)
        print(f"{method:26} largest batch of these that fits: {largest:,}")
    title = f"{Path(arguments.model).stem} on {cluster.gpus} x {format_bytes(cluster.gpu_memory)}"
    if arguments.json:
        with writing(arguments.json):
            arguments.json.write_text(json.dumps({"title": title, "results": rows}, indent=1))
    with writing(Path(arguments.sweep)):
        draw(rows, title, cluster, arguments.sweep)
    print(f"wrote {arguments.sweep}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    """Print planned beside measured GPU peaks and steps, from the rows of tools/bench_train.py."""
    print(f"{'run':58}{'planned':>10}{'measured':>10}{'ratio':>7}{'plan s':>8}{'s':>8}{'ratio':>7}  peak")
    outside = 0
    for path in arguments.compare:
        try:
            record = json.loads(path.read_text())
            rows = [row for row in record["results"] if row["method"] == "megaclip" and row["peak_mib"]]
            for row in rows:
                outside += _compare_row(row, _described(arguments, gpus=row["world_size"]))
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(path)!r} was not written by tools/bench_train.py --json ({type(error).__name__}: "
                f"{first_line(error)}); give a file that it has written"
            ) from None
    print(f"{outside} peaks outside 10%")
    return 1 if outside else 0


def _compare_row(row: dict[str, Any], cluster: Cluster) -> int:
    """Print one row; return 1 if its peak is more than a tenth off."""
    ds_config, ranks = row["ds_config"], row["world_size"]
    # Rows without `kept_graphs` were measured before graphs were kept, others before compiled towers recomputed.
    section = {
        "text_micro_batch_size": row.get("text_micro_batch", ds_config["train_micro_batch_size_per_gpu"]),
        **ds_config.get("megaclip", {}),
        "keep_graphs": sum(row.get("kept_graphs", ())),
        "selective_recompute": row.get("selective_recompute", False),
    }
    config = TrainingConfig(path=Path("row"), deepspeed=ds_config, megaclip=MegaclipSection(**section))
    workload = Workload.of(load_model_config(row["model"], section.get("towers", "auto")), config, ranks)
    # Rows without these figures are from versions that did not cut captions, let DeepSpeed check every gradient and
    # compiled nothing by default.
    workload = replace(workload, text_positions_saved=row.get("text_positions_saved", 0.0))
    workload = workload.with_megaclip(compile=row.get("compiled", False))
    if "update_ms" not in row:
        workload = replace(workload, checks_gradients=True)
    cluster = replace(cluster, rates=replace(cluster.rates, decoded=math.inf))  # synthetic samples are not decoded
    plan, step = plan_memory(workload, cluster), plan_time(workload, cluster)
    measured = row["peak_mib"] * 2**20
    ratio = plan.gpu_peak / measured
    name = f"{Path(row['model']).stem} B={workload.batch.global_batch} W={ranks} ZeRO-{workload.zero.stage}"
    name += f" {workload.batch.micro_batch}/{workload.batch.text_micro_batch}"
    name += " checkpointing" if workload.checkpointing else ""
    name += " offload" if workload.offload_optimizer != "none" else ""
    name += f" tensor-parallel size {workload.tensor_ranks}" if workload.tensor_ranks > 1 else ""
    kept = sum(workload.kept)
    name += f" keep {kept}" if kept and workload.backward_passes > 1 else ""
    name += " (first step)" if row.get("first_step", len(row.get("losses") or "..") == 1) else ""
    sizes = f"{format_bytes(plan.gpu_peak):>10}{format_bytes(measured):>10}{ratio:7.3f}"
    taken = row["step_s"] or float("nan")
    print(f"{name:58}{sizes}{step.total:8.1f}{taken:8.1f}{step.total / taken:7.2f}  {plan.peak_phase}")
    return int(not 0.9 <= ratio <= 1.1)


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine; under a launcher, with all its ranks at once."""
    from megaclip.engine.machine_rates import machine_name, measure_rates
    from megaclip.engine.process_group import start_process_group

    start_process_group()
    model = load_model_config(arguments.model or "ViT-B-32", "own")
    assert isinstance(model, ModelConfig), "the measured shapes are those of MegaCLIP's towers"
    gpu = torch.cuda.is_available()
    out = Path(arguments.calibrate)
    measured = measure_rates(model, arguments.micro_batch or (256 if gpu else 8), out.absolute().parent)
    if dist.get_rank() == 0:
        text = rates_json(machine_name(), measured)
        with writing(out):
            out.write_text(text)
        print(text)
        missing = "network" if "link" in measured else "link (it needs several ranks) and network"
        print(f"not measured: {missing}; with --rates they are those of --gpu, or of --link and --network")
    dist.destroy_process_group()
    return 0
