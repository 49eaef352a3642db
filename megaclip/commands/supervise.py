"""Start a run on several hosts, and restart it after failures. `launch/multi_node.sh --restarts N` calls it.

    megaclip supervise --restarts N --hostfile FILE --script launch/multi_node.sh ... -- TRAINING_ARGUMENTS

After a failure, the hosts that answer resume from the newest whole checkpoint, with as many ranks as can divide the
batch. docs/multi_node.md describes the rules.
"""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megaclip.commands.argument_types import integer
from megaclip.config import load_training_config, parse_arguments
from megaclip.errors import ConfigError, MegaclipError
from megaclip.hosts.hostfile import Host, read_hostfile
from megaclip.hosts.member import Member, own_host
from megaclip.hosts.policy import batch_fits, choose_hosts
from megaclip.hosts.supervisor import Supervisor, forwarded_signals, newest_step
from megaclip.logging import get_logger

logger = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    arguments = argument_parser().parse_args(argv)
    training = arguments.training[1:] if arguments.training[:1] == ["--"] else arguments.training
    try:
        if arguments.node_rank is not None:
            meeting = member(arguments, training)
            with forwarded_signals(lambda number, _: meeting.stop(number)):
                return meeting.run()
        return supervisor(arguments, training).run()
    except MegaclipError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=integer(1), required=True, help="largest number of restarts after failures")
    parser.add_argument("--hostfile", type=Path, required=True, help="all hosts, spare ones included")
    parser.add_argument(
        "--script",
        type=Path,
        required=True,
        help="starts the ranks: SCRIPT --hostfile FILE --master_addr ADDR --master_port PORT TRAINING_ARGUMENTS",
    )
    parser.add_argument("--master_addr", default="", help="address of the first host, for attempts that include it")
    parser.add_argument("--master_port", type=integer(1), default=29500, help="port on the first host of an attempt")
    parser.add_argument(
        "--probe",
        default="pdsh -S -w {host} {clean}",
        help="command that succeeds if {host} answers; {clean} is a shell command that ends leftover ranks on it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the hostfiles of the attempts, which SCRIPT reads (default: /tmp)"
    )
    parser.add_argument(
        "--node_rank", type=integer(0), help="without ssh: index of this host; the command runs on every host"
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, help="arguments of launch/train.py, after --")
    return parser


def supervisor(arguments: argparse.Namespace, training: list[str]) -> Supervisor:
    """Return the supervisor of a command line, for one process that starts the ranks of all hosts.

    Raises:
        ConfigError: an argument is refused, or the hosts cannot run the batch.
    """
    hosts = read_hostfile(arguments.hostfile)
    checkpoints, fits = checked_run(hosts, training)
    clean = end_leftover_ranks(hosts, arguments.master_addr, arguments.master_port)
    check_script(arguments.script)
    if arguments.folder is not None and not arguments.folder.is_dir():
        raise ConfigError(f"--folder {str(arguments.folder)!r} is not a folder; create it first")
    probe = probe_words(arguments.probe, hosts[0], clean)[0]
    if shutil.which(probe) is None:
        raise ConfigError(f"--probe {arguments.probe!r}: the command {probe!r} is not on PATH; install it")
    return Supervisor(
        hosts=hosts,
        fits=fits,
        restarts=arguments.restarts,
        start_command=lambda hostfile, chosen: start_command(arguments, training, hosts, hostfile, chosen),
        probe_command=lambda host: probe_words(arguments.probe, host, clean),
        checkpoints=checkpoints,
        folder=arguments.folder,
    )


def member(arguments: argparse.Namespace, training: list[str]) -> Member:
    """Return this host's part of a run without ssh. Raises ConfigError as `supervisor` does."""
    hosts = read_hostfile(arguments.hostfile)
    own = own_host(hosts, arguments.node_rank)
    checkpoints, fits = checked_run(hosts, training)
    check_script(arguments.script)

    def start(hostfile: Path, chosen: Sequence[Host], place: int) -> list[str]:
        command, *rest = start_command(arguments, training, hosts, hostfile, chosen)
        return [command, "--no_ssh", "--node_rank", str(place), *rest]

    return Member(
        folder=checkpoints.with_name("hosts"),
        hosts=hosts,
        own=own,
        fits=fits,
        restarts=arguments.restarts,
        start_command=start,
        newest_step=lambda: newest_step(checkpoints),
    )


def check_script(script: Path) -> None:
    """Raise ConfigError unless `script` can be run."""
    if shutil.which(script) is None:
        raise ConfigError(f"--script {str(script)!r} is not an executable file; give the path of one")


def probe_words(probe: str, host: Host, clean: str) -> list[str]:
    """Return the words of the command --probe for a host. Raises ConfigError for a command that cannot be read."""
    try:
        if words := [part.format(host=host.name, clean=clean) for part in shlex.split(probe)]:
            return words
    except (ValueError, LookupError, AttributeError):
        pass
    raise ConfigError(f"--probe {probe!r}: expected a command with {{host}} and {{clean}}; write other braces twice")


def checked_run(hosts: Sequence[Host], training: list[str]) -> tuple[Path, Callable[[int], bool]]:
    """Return the run's folder of checkpoints, and the function that returns whether a number of ranks fits the batch.

    Raises:
        ConfigError: an argument of the training is refused, or the hosts cannot run the batch.
    """
    run = parse_arguments(training)
    if run.resume != "auto" or run.name is None:
        raise ConfigError("--restarts requires --resume auto and --name NAME, to find its checkpoint")
    config = load_training_config(run.deepspeed_config)
    fits = batch_fits(config)
    if not choose_hosts(hosts, fits):
        config.batch_layout(sum(host.slots for host in hosts))  # raises the run's own error
    if len(hosts) > 1 and not choose_hosts(hosts[:-1], fits):
        logger.warning(
            "the batch of %s cannot be divided among fewer hosts, so a restart waits until a lost host answers again; "
            "leave out gradient_accumulation_steps to allow fewer hosts",
            config.path,
        )
    return Path(run.logs) / run.name / "checkpoints", fits


def start_command(
    arguments: argparse.Namespace, training: list[str], hosts: Sequence[Host], hostfile: Path, chosen: Sequence[Host]
) -> list[str]:
    """Return the command that starts an attempt on the hosts `chosen` among all `hosts`."""
    same_first = arguments.master_addr and chosen[0].name == hosts[0].name
    address = arguments.master_addr if same_first else chosen[0].address
    options = ["--hostfile", hostfile, "--master_addr", address, "--master_port", arguments.master_port]
    return [str(part) for part in (arguments.script, *options, *training)]


def end_leftover_ranks(hosts: Sequence[Host], master_addr: str, master_port: int) -> str:
    """Return the shell command that ends the ranks, and launchers without ranks, of earlier attempts on one host.

    It always succeeds.

    A host that has lost its network connection still runs its ranks, which wait for the others. launch/multi_node.sh
    ends the ranks of one attempt by the same pattern.

    master_addr: --master_addr, which `start_command` uses for some attempts, or "".
    """
    addresses = "|".join(re.escape(address) for address in (master_addr, *(host.address for host in hosts)) if address)
    launchers = f"^[^ ]+ -u -m deepspeed.launcher.launch .*--master_addr=({addresses}) --master_port={master_port} "
    return f"pgrep -f '{launchers}' | xargs -r -n 1 sh -c 'pkill -KILL -P $0 || kill -KILL $0'; true"
