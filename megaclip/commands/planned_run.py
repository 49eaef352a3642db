"""The run and the machines that the flags of `megaclip plan` describe, and their plan."""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaclip.commands.plan import SETTINGS
from megaclip.config import TrainArguments, TrainingConfig, load_training_config
from megaclip.config.command_line import DEFAULT_EPOCHS
from megaclip.engine.schedule import whole_steps
from megaclip.errors import ConfigError
from megaclip.logging import format_count
from megaclip.models import load_model_config
from megaclip.planner import Cluster, Rates, Workload, advice, describe, faster_run, largest_batch, plan_memory, time_of
from megaclip.planner.cluster import gpu_preset
from megaclip.planner.compile_estimate import check_recomputation, compile_estimate
from megaclip.planner.report import data_text, graphs_text, loss_table, memory_table, micro_batch_table, time_table
from megaclip.planner.search import micro_batches
from megaclip.planner.workload import EvaluationSets
from megaclip.step.layout import cuts_captions

_MOST_GPUS = 16
"""Number of GPUs above which --gpus is probably the number of a whole job, without --hosts."""


def described_run(arguments: argparse.Namespace) -> tuple[Workload, Cluster]:
    """Return the run and the machines that the flags of `plan_parser` describe.

    Raises ConfigError if the run would refuse its settings, or a flag is missing or has no effect.
    """
    short = ((setting, getattr(arguments, flag[2:].replace("-", "_"))) for flag, setting in SETTINGS.items())
    changes = [*arguments.set, *(f"{setting}={value}" for setting, value in short if value is not None)]
    config = load_training_config(arguments.deepspeed_config, changes)
    cluster = _cluster(arguments)
    workload = _workload(arguments, config, cluster)
    if workload.sample_columns and not workload.samples:
        raise ConfigError(
            f"megaclip.loss {workload.megaclip.loss!r} keeps state of every sample; give --train-num-samples, "
            "the size of the dataset"
        )
    compiles = compile_estimate(workload, cluster).pays
    check_recomputation(workload.megaclip.selective_recompute, compiles=compiles)
    return workload, cluster


def _cluster(arguments: argparse.Namespace) -> Cluster:
    if (arguments.gpus or 0) > _MOST_GPUS and arguments.hosts is None and not arguments.here:
        raise ConfigError(
            f"--gpus {arguments.gpus} is the number per host; give the number of hosts too, for example --gpus 8 "
            f"--hosts {math.ceil(arguments.gpus / 8)}, or --hosts 1 for one host"
        )
    hosts = arguments.hosts or 1
    if arguments.here:
        here = _this_machine(arguments)
        described = described_cluster(arguments, gpu=here.name, gpus=here.gpus_per_host, hosts=hosts)
        cluster = replace(here, hosts=hosts, rates=described.rates)
    else:
        cluster = described_cluster(arguments, gpus=arguments.gpus or 8, hosts=hosts)
    cores = arguments.cores or (os.cpu_count() if arguments.here else None)
    decoded = arguments.samples_per_core or cluster.rates.decoded
    return replace(cluster, cores=cores, rates=replace(cluster.rates, decoded=decoded))


def described_cluster(arguments: argparse.Namespace, **machine: Any) -> Cluster:
    """Return the cluster that the flags of `add_machine_flags` and `machine`, arguments of `describe`, describe."""
    names = ("gpu", "gpu_memory", "host_memory", "disk", "link", "network")
    machine |= {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    rates = Rates.read(arguments.rates, gpu_preset(machine.get("gpu", "h200"))[1]) if arguments.rates else None
    return describe(rates=rates, **machine)


def _this_machine(arguments: argparse.Namespace) -> Cluster:
    """Return this machine, with the memory that is free on it now."""
    from megaclip.engine.preflight import this_machine

    if measured := [name for name in ("gpu", "gpu_memory", "host_memory", "disk") if getattr(arguments, name)]:
        raise ConfigError(f"--{measured[0].replace('_', '-')} describes another machine; remove it or --here")
    here = torch.cuda.device_count()
    if here and (arguments.gpus or 0) > here:
        raise ConfigError(f"--gpus {arguments.gpus}: this machine has {here}; use --gpu instead of --here for another")
    return this_machine(arguments.gpus or max(1, here), Path.cwd())


def _workload(arguments: argparse.Namespace, config: TrainingConfig, cluster: Cluster) -> Workload:
    if arguments.epochs and (arguments.train_steps or not arguments.train_num_samples):
        raise ConfigError(f"--epochs {arguments.epochs} requires --train-num-samples, without --train-steps; set it")
    steps = arguments.train_steps
    if arguments.train_num_samples and not steps:
        batch = config.batch_layout(cluster.gpus).global_batch
        steps = whole_steps(arguments.epochs or DEFAULT_EPOCHS, arguments.train_num_samples, batch)
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
        steps=steps,
        async_save=arguments.async_save,
    )
    saved = arguments.text_positions_saved
    if saved is not None and not 0 <= saved < 1:
        raise ConfigError(f"--text-positions-saved {saved} is not a share; use a number from 0 to less than 1")
    if saved is not None and not cuts_captions(workload.megaclip.cut_captions, workload.model.text_cfg):
        raise ConfigError(f"--text-positions-saved {saved} has no effect: this run cuts no captions; leave it out")
    return replace(workload, text_positions_saved=saved)


def print_plan(workload: Workload, cluster: Cluster) -> int:
    """Print the plan; return 0 if the run fits, else 2."""
    plan, batch = plan_memory(workload, cluster), workload.batch
    step = time_of(plan, cluster)
    whole, split = workload.with_megaclip(tensor_parallel_size=1).total, ""
    if workload.tensor_ranks > 1:
        split = f", {workload.total / 1e6:.1f} M on each of {workload.tensor_ranks} tensor-parallel ranks"
    known = workload.text_positions_saved is not None
    memory = "and for the memory of kept graphs" if known else "all of them for memory"
    print(
        f"batch {batch.global_batch:,} = {format_count(batch.world_size, 'rank')} x {batch.local_batch:,}; chunks of "
        f"{format_count(batch.micro_batch, 'image')} and {format_count(batch.text_micro_batch, 'text')}; "
        f"{whole / 1e6:.1f} M parameters{split}, ZeRO-{workload.zero.stage}\n"
        f"captions: {workload.text_positions:.1f} of {workload.model.text_cfg.context_length} token positions on "
        f"average for the step's time, {memory}\n"
    )
    tables = memory_table(plan, cluster), graphs_text(plan.workload), loss_table(plan.workload)
    print(*tables, time_table(step, cluster), sep="\n\n")
    if workload.megaclip.objective is not None:
        print(f"NOT PLANNED: memory and time of megaclip.objective {workload.megaclip.objective}")
    if step.decoding_hidden:
        print(data_text(step, workload, cluster))
    if workload.steps is not None:
        hours, samples = workload.steps * step.total / 3600, workload.steps * batch.global_batch
        print(f"RUN: {workload.steps:,} steps, {samples:,} samples: {hours:,.1f} hours, without evaluations and saves")
    print(f"\n{micro_batch_table(micro_batches(workload, cluster), batch.micro_batch)}")
    print(f"\nlargest batch that fits, all else the same: {_largest_batch(workload, cluster)}")
    faster = faster_run(workload, cluster)
    if plan.refusals:
        print("this run DOES NOT FIT: " + "; ".join(plan.refusals))
        for change in advice(workload, cluster):
            print(f"  it would with {change}")
    else:
        print("this run fits")
    if faster:
        print(faster)
    return 2 if plan.refusals else 0


def _largest_batch(workload: Workload, cluster: Cluster) -> str:
    """Return the largest batch, with the text chunk that it needs if that is not the default."""
    largest, chunk = largest_batch(workload, cluster), workload.batch.text_micro_batch
    if not largest or workload.with_batch(largest // workload.world_size).batch.text_micro_batch == chunk:
        return f"{largest:,}"
    return f'{largest:,}, with "megaclip": {{"text_micro_batch_size": {chunk * workload.tensor_ranks}}}'
