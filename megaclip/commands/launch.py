"""Start a command of megaclip on the ranks of this host, and restart it after failures. Run it once on every host.

    megaclip launch --nnodes 1:4 --nproc-per-node 8 --max-restarts 5 --rdzv-endpoint node-0:29400 train ...

The options are those of torchrun, with other defaults: --rdzv-backend c10d, and an hour of --shutdown-timeout, in which
ranks save. `megaclip show multi_node` describes when a run is not restarted.
"""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import TimeoutError  # a class of its own before Python 3.11
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from megaclip.checkpoint import search
from megaclip.commands import known_command
from megaclip.config import load_training_config, parse_arguments
from megaclip.engine.process_group import usable_ranks
from megaclip.errors import ConfigError, MegaclipError, first_line, nearest
from megaclip.hosts.agent import Agent
from megaclip.logging import get_logger
from megaclip.threads import in_thread

logger = get_logger(__name__)

# Seconds, except for the number of attempts. read_timeout is how long this host waits for the store.
RENDEZVOUS = {"last_call_timeout": 5, "keep_alive_interval": 3, "keep_alive_max_attempt": 5, "read_timeout": 600}
_READ_TIMEOUT_S = 60


def main(argv: list[str] | None = None) -> NoReturn:
    parser = get_args_parser()  # of torchrun, for a command of megaclip instead of a script
    parser.prog, parser.usage = "megaclip launch", "megaclip launch [OPTIONS] COMMAND ..."
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # --logs of the command is no short form of --logs-specs
    parser.set_defaults(rdzv_backend="c10d", shutdown_timeout=3600)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = set(parser._option_string_actions)
        parser.error(f"unknown argument {unknown[0]!r}{nearest(unknown[0].partition('=')[0], known)}")
    command = [arguments.training_script, *arguments.training_script_args]
    known_command(command[0])
    arguments.training_script, arguments.training_script_args, arguments.module = "megaclip", command, True
    try:
        launch(arguments, command)
    except RendezvousError as error:
        where, reason = f"--rdzv-endpoint {arguments.rdzv_endpoint}", first_line(error.__cause__ or error)
        raise MegaclipError(f"{arguments.nnodes} hosts have not met at {where}: {reason}") from error


def launch(arguments: argparse.Namespace, command: list[str]) -> NoReturn:
    """Run this host's agent to the end of the run, and exit.

    Raises ConfigError if an argument is refused, and RendezvousError if too few hosts have come, or the store cannot be
    reached.
    """
    try:
        config, program, words = config_from_args(arguments)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=config.rdzv_endpoint or "localhost:0",
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr or (None if config.rdzv_endpoint else "localhost"),
            **{**RENDEZVOUS, **config.rdzv_configs},
        )
        parameters.get_as_bool("is_host")
        seconds = {name: parameters.get_as_int(name) or 0 for name in parameters.config.keys() - {"is_host"}}
        silence_s = seconds["keep_alive_interval"] * seconds["keep_alive_max_attempt"]
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"{first_line(error).rstrip('.')}; see megaclip launch --help") from None
    if config.rdzv_backend != "c10d" or not (config.rdzv_endpoint or config.max_nodes == 1):
        raise ConfigError("--rdzv-endpoint HOST:PORT, and no --rdzv-backend but c10d, is required for several hosts")
    newest_step = checked_training(config, command[1:]) if command[0] == "train" else lambda: None
    config.max_restarts = config.max_restarts if command[0] == "train" else 0
    # Otherwise hosts that come wait for an address that is not written again (torch 2.8 to 2.14).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if config.rdzv_endpoint:
        logger.info("meeting %s hosts at --rdzv-endpoint %s", arguments.nnodes, config.rdzv_endpoint)
    backend, store = _connected(parameters, 2 * seconds["read_timeout"])
    store.set_timeout(timedelta(seconds=_READ_TIMEOUT_S))
    options = {field.name for field in fields(WorkerSpec)} & {field.name for field in fields(config)}
    spec = WorkerSpec(
        **{name: getattr(config, name) for name in options},
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(word.replace("$", "$$") for word in words),  # torch replaces ${local_rank} and $$
        rdzv_handler=create_handler(store, backend, parameters),
    )
    assert config.logs_specs is not None  # torch sets it
    Agent(spec, config.logs_specs, store, silence_s, newest_step, arguments.shutdown_timeout).run_to_end()


def _connected(parameters: RendezvousParameters, limit_s: int) -> tuple[Any, Any]:
    """Return the rendezvous and its store. Raises RendezvousError if nothing answers at the endpoint.

    Another program that uses the port may accept the connection and answer nothing. torch would wait for it forever.
    """
    try:
        return in_thread(lambda: create_backend(parameters), "rendezvous").result(limit_s)
    except TimeoutError:
        problem = f"no answer in {limit_s} s; another program may use the port, choose another one"
        raise RendezvousError(problem) from None


def checked_training(config: LaunchConfig, training: list[str]) -> Callable[[], int]:
    """Return the function that returns the step of the newest complete checkpoint of a training, 0 without one.

    Raises ConfigError if an argument of the training is refused, or a restart could not resume it.
    """
    run = parse_arguments(training)
    settings, fewer = load_training_config(run.deepspeed_config, run.set), config.max_nodes > config.min_nodes
    if (config.max_restarts or fewer) and not (run.resume == "auto" and run.name):
        raise ConfigError("--max-restarts and --nnodes MIN:MAX require --resume auto and --name NAME of the training")
    ranks = config.min_nodes * config.nproc_per_node
    if fewer and not (settings.deepspeed.get("train_batch_size") and usable_ranks(settings, ranks)):
        raise ConfigError(
            f"{settings.path}: --nnodes {config.min_nodes}:{config.max_nodes} requires a train_batch_size for "
            f"{ranks} or fewer ranks; set it, and leave out gradient_accumulation_steps"
        )
    checkpoints = Path(run.logs) / (run.name or "") / "checkpoints"
    return lambda: search.step_of(search.latest_tag(checkpoints) or search.tag_of(0))
