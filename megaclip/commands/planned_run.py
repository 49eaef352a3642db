"""The run and the machines that the flags of `megaclip plan` describe, and their plan."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaclip.config import TrainArguments, TrainingConfig, load_training_config
from megaclip.config.checks import check_ds_config
from megaclip.errors import ConfigError
from megaclip.models import load_model_config
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
from megaclip.planner.cluster import gpu_preset, parse_size
from megaclip.planner.compile_estimate import check_recomputation, compile_estimate
from megaclip.planner.report import graphs_text, loss_table, memory_table, time_table
from megaclip.planner.tensor_parallel import fastest_without
from megaclip.planner.workload import EvaluationSets, nvme_paths
from megaclip.step.layout import cuts_captions


def described_run(arguments: argparse.Namespace) -> tuple[Workload, Cluster]:
    """Return the run and the machines that the flags of `plan_parser` describe.

    Raises:
        ConfigError: the run would refuse its settings, or a flag is missing or has no effect.
    """
    cluster = _cluster(arguments)
    workload = _workload(arguments, cluster)
    if workload.sample_columns and not workload.samples:
        raise ConfigError(
            f"megaclip.loss {workload.megaclip.loss!r} keeps state of every sample; give --train-num-samples, "
            "the size of the dataset"
        )
    compiles = compile_estimate(workload, cluster).pays
    check_recomputation(workload.megaclip.selective_recompute, compiles=compiles)
    return workload, cluster


def _cluster(arguments: argparse.Namespace) -> Cluster:
    if arguments.here:
        return _clusters_like_this(arguments)
    counts = {"hosts": arguments.hosts} | ({} if arguments.gpus is None else {"gpus": arguments.gpus})
    return described_cluster(arguments, **counts)


def described_cluster(arguments: argparse.Namespace, **counts: Any) -> Cluster:
    """Return the cluster that the flags of `add_machine_flags` describe, with these numbers of GPUs and hosts."""
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


def print_plan(workload: Workload, cluster: Cluster) -> int:
    """Print the plan; return 0 if the run fits, else 2."""
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
    tables = memory_table(plan, cluster), graphs_text(plan.workload), loss_table(plan.workload)
    print(*tables, time_table(step, cluster), sep="\n\n")
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
